"""One host at a shared store, in a process of its own: `python -m tests.shared.worker SCENARIO
PLACE WAY …`; WAY is JSON for `ckptstore.open`.

`work` commits, restores what others keep, forgets and collects until time is up and it has done
each, and says `kept STEP` for each commit that was acknowledged with a tag `keep-…`, `away` for
each call that ended in `Unavailable`. Whatever else goes wrong ends it. `check` says `there STEP`
for each commit that has such a tag, once everything in the store was found whole; on an empty
store, which it makes, nothing.
"""

import json
import random
import sys
import time

import ckptstore
from ckptstore.errors import Busy, Conflict, Unavailable
from ckptstore.maintenance.check import Kind
from ckptstore.maintenance.retention import KeepLast
from ckptstore.store import Store
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import CHUNK_BYTES

STEPS = 1_000_000
WANTED = {"keep", "restore", "gc"}
"""What a host does at least once, however little it gets done on a machine that has other things to
do."""


def check(place: str, way: str) -> None:
    with ckptstore.open(
        place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, **json.loads(way))
    ) as store:
        found = store.fsck(read_data="100%").findings
        # A commit that was cut off leaves objects that no entry names, which are nobody's loss.
        assert {finding.kind for finding in found} <= {Kind.ORPHAN}, found
        for info in store.log():
            assert_equal(store.checkout(info.id).state_dict(), state_of(info.step or 0))
        for tag in store.tags():
            print(f"there {tag.removeprefix('keep-')}")


def work(place: str, way: str, run: str, seconds: str, seed: str) -> None:
    random.seed(f"{seed} {run}")
    deadline, done = float("inf"), set[str]()
    step = STEPS * (1 + int(run.rpartition("-")[2]))
    while time.monotonic() < deadline or done < WANTED:
        try:
            with ckptstore.open(
                place,
                storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, **json.loads(way)),
                run=run,
                threads=1,
            ) as store:
                deadline = min(deadline, time.monotonic() + float(seconds))
                while time.monotonic() < deadline or done < WANTED:
                    step += 1
                    done |= {_one(store, step)} & WANTED
        except Unavailable as error:
            print(f"away {error}", flush=True)


def _one(store: Store, step: int) -> str:
    """Do something, and say what was done."""
    what = random.choices(["commit", "keep", "restore", "forget", "gc"], [40, 10, 25, 10, 15])[0]
    if what in ("commit", "keep"):
        store.commit(state_of(step), step=step, tag=f"keep-{step}" if what == "keep" else ())
        print(f"kept {step}" if what == "keep" else "committed", flush=True)
    elif what == "restore" and (kept := sorted(store.tags())):
        tag = random.choice(kept)
        assert_equal(store.checkout(tag).state_dict(), state_of(int(tag.removeprefix("keep-"))))
        print("restored", flush=True)
    elif what == "restore":
        return "nothing"
    elif what == "forget":
        store.forget(KeepLast(2))
    elif what == "gc":
        try:
            store.gc(max_unused=0.0, force=random.random() < 0.5, grace_s=0)
        except (Busy, Conflict) as error:  # the other host collects as well
            print(f"gc: {error}", flush=True)
            return "nothing"
        print("collected", flush=True)
    return what


if __name__ == "__main__":
    {"work": work, "check": check}[sys.argv[1]](*sys.argv[2:])
