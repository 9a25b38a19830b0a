"""Work that takes longer than an answer may: it goes on in the background while somebody asks.

A page asks for the same job again until it has the value. A job that nobody has asked for in
`LEASE_S` stops at its next progress, so leaving a page, closing it and pressing Stop are one case.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ckptstore.errors import Cancelled
from ckptstore.plugins.ui.values import Json

LEASE_S = 3.0
WAIT_S = 0.25
"""An answer waits this long for the value before it tells the progress."""
KEPT = 16
THREADS = 2


class Job:
    """One piece of work, with what it has told so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.asked_s = clock()
        self.told: tuple[str, int, int] = ("waiting", 0, 0)
        self.partial: Json = None
        self.future: Future[Json]

    def progress(self, phase: str, done: int, total: int) -> None:
        """Note the progress. Raises `Cancelled` once nobody asks any more."""
        self.told = (phase, done, total)
        if self._clock() - self.asked_s > LEASE_S:
            raise Cancelled(f"nobody asks any more: {phase} stopped at {done} of {total}")


Work = Callable[[Job], Json]


class Jobs:
    """Jobs of all stores. Values are kept for the last `KEPT` keys. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._jobs: OrderedDict[Hashable, Job] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "ckptstore-ui")

    def ask(self, key: Hashable, work: Work) -> Json:
        """The value of `work` as `{"value": …}`, or what it has told so far as `{"progress": …}`.

        `key` must change when the value would. Raises what `work` raised.
        """
        job = self._job(key, work)
        wait([job.future], WAIT_S)
        if not job.future.done():
            return {"progress": job.told, "partial": job.partial}
        if job.future.exception() is not None:
            with self._lock:
                self._jobs.pop(key, None)
        return {"value": job.future.result()}

    def _job(self, key: Hashable, work: Work) -> Job:
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (job.future.done() and isinstance(job.future.exception(), Cancelled)):
                job = self._jobs[key] = Job(self._clock)
                job.future = self._threads.submit(work, job)
            job.asked_s = self._clock()
            self._jobs.move_to_end(key)
            for old in [old for old, each in self._jobs.items() if each.future.done()][:-KEPT]:
                del self._jobs[old]
            return job

    def close(self) -> None:
        """Stop at the next progress of each job, and wait for that."""
        with self._lock:
            for job in self._jobs.values():
                job.asked_s = -2 * LEASE_S
        self._threads.shutdown(cancel_futures=True)
