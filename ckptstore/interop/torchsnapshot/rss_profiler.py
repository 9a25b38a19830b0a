"""How much the resident memory of this process grows during a block."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

_INTERVAL = timedelta(milliseconds=100)


@contextmanager
def measure_rss_deltas(rss_deltas: list[int], interval: timedelta = _INTERVAL) -> Iterator[None]:
    """Append the growth of resident memory in bytes to `rss_deltas`, every `interval` from start to
    end of the block.
    """
    base, ended = _resident_bytes(), Event()

    def measure() -> None:
        rss_deltas.append(_resident_bytes() - base)
        while not ended.wait(interval.total_seconds()):
            rss_deltas.append(_resident_bytes() - base)

    thread = Thread(target=measure, name="ckptstore-rss", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
