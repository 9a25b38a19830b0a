"""Writers of one process that append to a store's log at once: `python -m tests.shared.appender
PLACE WAY WRITERS APPENDS FOLDER`.

WAY is JSON: options of the storage, and what else `ckptstore.open` needs. It says `ready` when all
have read the log, begins when a line comes, and says `waited S` for each append and `computed S` at
the end.
"""

import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from ckptstore.log.log import Log
from tests.log.builders import fresh_commit
from tests.shared.sites import Site


def main(place: str, way: str, writers: str, appends: str, folder: str) -> None:
    options, more = json.loads(way)
    site = Site(place, options, more)
    go, failures = threading.Event(), list[BaseException]()

    def write(log: Log) -> None:
        go.wait()
        try:
            for _ in range(int(appends)):
                began_s = time.monotonic()
                log.append(fresh_commit())
                print(f"waited {time.monotonic() - began_s}\n", end="", flush=True)
        except BaseException as error:
            failures.append(error)

    with ExitStack() as stack:
        logs = [
            stack.enter_context(site.opened(Path(folder) / f"host-{me}")).log
            for me in range(int(writers))
        ]
        for log in logs:
            log.replay()
        threads = [threading.Thread(target=write, args=(log,)) for log in logs]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.readline()
        computed_s = time.process_time()
        go.set()
        for thread in threads:
            thread.join()
        print(f"computed {time.process_time() - computed_s}", flush=True)
    if failures:
        raise failures[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
