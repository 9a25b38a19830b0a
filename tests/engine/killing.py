"""Workers of Ray, and drivers, that are killed at random moments. Neither imports torch: a new one
begins soon."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ckptstore.core.ids import random_digits
from ckptstore.maintenance import compact as compaction
from ckptstore.maintenance.compact import CompactPolicy
from ckptstore.maintenance_api import Maintenance
from ckptstore.plugins.engine.ray_executor import RayExecutor
from ckptstore.plugins.engine.work import stores_on
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool

POLICY = CompactPolicy(newest=1, every=4)


class Killing(RayExecutor):
    """Some tasks, one of `every` so many, end with the death of their worker, the first time."""

    def __init__(self, marks: Path, *, every: int = 3) -> None:
        super().__init__()
        marks.mkdir(exist_ok=True)
        self._marks, self._count, self._every = marks, 0, every

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        if self._count % self._every:
            return super().submit(fn, *args, **kwargs)
        return super().submit(_dies_once, str(self._marks / random_digits(8)), fn, args)


def _dies_once(mark: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Do the work; the first time, die meanwhile, or before anybody is told."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return fn(*args)
    threading.Timer(Random().uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
    fn(*args)
    time.sleep(9)
    raise AssertionError("it is dead")


def work(store: Any, on: Any, target: Path, verb: str) -> Any:
    """Carry a verb out, by `on` if that is given."""
    on = on or store
    if verb == "compact":
        return on.compact(POLICY)
    if verb == "gc":
        return on.gc(max_unused=0.0, grace_s=0, max_repack_bytes=1 << 30)
    return on.push(target, create=True, verify=True)


def drive(place: str, there: str, verb: str) -> None:
    """A driver of Ray."""
    compaction.ENTRY_BYTES, compaction.RUN_BYTES = 1, 1 << 18  # type: ignore[attr-defined]
    with RayExecutor() as executor:
        handle, threads = StoreHandle(place), ThreadPool(2)
        store = Maintenance(handle, threads, None, partial(stores_on, executor))
        work(store, None, Path(there), verb)


if __name__ == "__main__":
    drive(*sys.argv[1:])
