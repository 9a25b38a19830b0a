"""Which threads hash, encode, read and write?

They take work from one queue; the first failure stops them all and reaches the caller. Hashing,
zstd, `pwrite` and `preadv` release the GIL, so threads scale if each piece of work is large.
"""

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptstore.core.forks import Condition, survives_forks
from ckptstore.core.process import Pool
from ckptstore.core.text import bytes_text
from ckptstore.errors import Unavailable

logger = logging.getLogger("ckptstore")

T = TypeVar("T")


ASIDE_NICE = 10
"""By how much threads step aside that work behind a caller's back: training keeps its cores, and
idle ones are used all the same. At 19, a commit beside training on all cores took 10.7 s instead of
3.2, and training no less (`--case async-training`)."""


REMOTE_READS = 8
"""Least number of concurrent reads from a bucket. They wait for the network, not for processors."""


def reads_at_once(threads: int) -> int:
    """The number of threads that read from storage with slow requests, where others use
    `threads`."""
    return max(threads, REMOTE_READS)


NO_MEMORY = memoryview(b"")

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Python's default is memory that forked processes share."""


class Scratch:
    """Page-aligned buffers for threads, one owner at a time, kept for reuse: fresh memory costs
    as much as a copy into it. Needs no lock."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """A page-aligned buffer of at least `nbytes` with undefined content. Raises `Unavailable`
        if there is no memory."""
        if not nbytes:
            return NO_MEMORY
        with suppress(IndexError):
            while True:
                found = self._free.pop()
                if len(found) >= nbytes:
                    return found
        try:
            # A power of two, so that it fits the next request, too. Untouched pages cost nothing.
            memory = mmap.mmap(-1, 1 << (nbytes - 1).bit_length(), flags=_PRIVATE)
        except OSError as error:
            raise Unavailable(
                f"cannot allocate {bytes_text(nbytes)} of working memory: {error}; "
                "free memory, or raise the limit of the container or process, and repeat"
            ) from error
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # only faster
        return memoryview(memory)

    def give(self, memory: memoryview) -> None:
        """Return a buffer to the pool. The caller must drop every reference to it."""
        if len(memory):
            self._free.append(memory)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """`nbytes` of a buffer, which returns to the pool at the end of the block."""
        memory = self.take(nbytes)
        try:
            yield memory[:nbytes]
        finally:
            self.give(memory)


def one_by_one(
    task: Callable[[T], object], items: Sequence[T], *, max_workers: int | None = None
) -> None:
    """`ThreadPool.spread` on the calling thread."""
    for item in items:
        task(item)


class ThreadPool:
    """The threads of one store, started when first needed, and again after a fork. With `aside`
    they have low priority."""

    def __init__(self, count: int, *, aside: bool = False) -> None:
        self.count = count
        self.aside = aside
        self.scratch = Scratch()
        survives_forks(self)

    def forked(self) -> None:
        self._lock = threading.Lock()
        self._pool: Pool | None = None

    def spread(
        self, task: Callable[[T], object], items: Sequence[T], *, max_workers: int | None = None
    ) -> None:
        """Call `task` for every item, in any order, on at most `max_workers` threads. A single
        item, or a single worker, runs on the calling thread."""
        if len(items) < 2 or max_workers == 1:
            for item in items:
                task(item)
            return
        shared = _Shared(items)

        def work() -> None:
            for item in shared:
                task(item)

        self.together([work] * min(max_workers or self.count, self.count, len(items)), shared.stop)

    def together(self, works: Sequence[Callable[[], object]], stop: Callable[[], object]) -> None:
        """Run `works` in parallel, the last one on the calling thread.

        On a failure call `stop`, wait for the others, and raise the first error. None goes on after
        this call, however often it is interrupted: they write to memory that is used again. Works
        must not wait for each other: there may be fewer threads than works, or only the calling
        one.
        """
        if len(works) == 1:
            works[0]()
            return
        pool, others = self._alive(), _Others(len(works) - 1, stop)
        interrupts = 0
        try:
            for number in range(len(works) - 1):
                pool.put(_Other(others, number), works[number])
            works[-1]()
            others.wait()
        except BaseException:
            while not others.have_ended:
                try:  # all of it, since Python may raise an interrupt as any function begins
                    others.end(interrupts)
                except BaseException:
                    interrupts += 1
            raise
        others.raise_failure()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Start `work` in the background. If no thread can be started, it runs before this
        returns."""
        return self._alive().submit(work)

    def close(self) -> None:
        with self._lock:
            if self._pool:
                self._pool.shutdown()
            self._pool = None
            self.scratch = Scratch()

    def _alive(self) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = Pool(self.count, begin=step_aside if self.aside else None)
            return self._pool


_wholly = ThreadPool(REMOTE_READS)


def wholly(act: Callable[[], T], stop: Callable[[], object] = lambda: None) -> T:
    """The result of `act`, which runs to its end on a thread that Ctrl-C does not reach. An
    interrupt of the caller calls `stop`, and is raised when `act` has ended."""
    if threading.current_thread() is not threading.main_thread():
        return act()
    begun, found = list[None](), list[T]()

    def run() -> None:
        begun.append(None)
        found.append(act())

    stopped: BaseException | None = None
    while not begun:
        try:
            _wholly.together([run, lambda: None], stop)
        except BaseException as error:
            stopped = stopped or error  # an interrupt counts, and not how `act` took the `stop`
    if stopped:
        try:
            raise stopped
        finally:
            del stopped  # whose traceback has this frame
    return found[0]


class _Others:
    """Works on the threads of a pool, while the caller has one of its own."""

    def __init__(self, count: int, stop: Callable[[], object]) -> None:
        self.stop = stop
        self.left, self.begun = set(range(count)), set[int]()
        self.failed: dict[int, BaseException] = {}
        self.changed = Condition()
        self.have_ended = False

    def wait(self) -> None:
        """Wait until all works have ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.left)

    def end(self, interrupts: int) -> None:
        """Let no more works begin, and wait until those that have begun have ended, after so many
        interrupts of this wait."""
        if interrupts == 1:
            logger.warning(
                "waiting for copies, reads or writes that are under way, since their memory is "
                "used again; Ctrl-\\ ends this process at once"
            )
        self.stop()
        with self.changed:
            self.left &= self.begun
        self.wait()
        self.have_ended = True

    def raise_failure(self) -> None:
        """Raise what the first of the works that failed raised."""
        if self.failed:
            failure = self.failed[min(self.failed)]
            self.failed.clear()
            try:
                raise failure
            finally:
                del failure  # whose traceback has this frame


class _Other(NamedTuple):
    """One of the works: a pool says what becomes of it, as of a future."""

    others: _Others
    number: int

    def set_running_or_notify_cancel(self) -> bool:
        others, number = self
        with others.changed:
            if number in others.left:
                others.begun.add(number)
            return number in others.left

    def set_result(self, _: object, /) -> None:
        with self.others.changed:
            self.others.left.discard(self.number)
            self.others.changed.notify_all()

    def set_exception(self, error: BaseException, /) -> None:
        self.others.failed[self.number] = error
        try:
            self.others.stop()
        finally:
            self.set_result(None)

    def cancel(self) -> bool:
        self.set_result(None)
        return True


def step_aside(process: int | None = None) -> None:
    """Lower the priority of the calling thread below the main thread of `process`, by default
    this one.

    The change is permanent: raising it again needs privileges. Threads and processes inherit it,
    so a thread may have it from its start.
    """
    with suppress(OSError):  # a sandbox that forbids it
        ahead = os.getpriority(os.PRIO_PROCESS, process or os.getpid())
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), ahead + ASIDE_NICE
        )  # on Linux, a thread has one of its own


def step_aside_of_parent() -> None:
    """Lower the priority of this process, which leads a session; call it before threads start.

    With autogroup (sched(7)), Linux shares processors among sessions first, and a thread's
    priority counts only within its session.
    """
    step_aside(os.getppid())
    with suppress(OSError):  # Linux does not group, or there is no /proc
        Path("/proc/self/autogroup").write_text(str(ASIDE_NICE), encoding="ascii")


class _Shared(Iterable[T]):
    """A queue of items for several threads, until it is empty or `stop` is called."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def __iter__(self) -> Iterator[T]:
        end = object()
        while not self._stopped:
            with self._lock:
                item = next(self._items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]  # `end` was the only foreign value


def shared(items: Iterable[T]) -> _Shared[T]:
    """An iterable over `items` for several threads; each item goes to one of them."""
    return _Shared(items)
