"""How does this process share its host: which boot is it, how much memory is left, how do processes
take turns, how does work continue when no more threads can be started, and when does Python's cycle
collector pause?

Users and containers have a limit of threads. Work whose result is awaited then runs on the
calling thread. A server without a thread is `Unavailable`.
"""

import fcntl
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import ref

from ckptstore.core.forks import (
    Condition,
    halts_for_forks,
    new_future,
    survives_forks,
)
from ckptstore.core.paths import rights
from ckptstore.errors import Unavailable

_FORK_TIMEOUT_S = 2.0


class _Garbage:
    def __init__(self) -> None:
        self.itself = self


def _collects() -> bool:
    """Whether a collection can begin: not while one is in progress, on any thread."""
    found = ref(_Garbage())
    gc.collect(0)
    return found() is None


class _Uncollected:
    """Who is within `uncollected`. Whoever leaves does so in C first: an interrupt may end anything
    that is written in Python, and a collector that stays off fills the memory."""

    def __init__(self) -> None:
        self.inside = set[object]()
        self.is_off = False
        """Whether the collector was on before."""
        survives_forks(self)
        halts_for_forks(self, turn=0)

    def enter(self, who: object) -> None:
        self.inside.add(who)
        if gc.isenabled():
            self.is_off = True
            gc.disable()

    def enable(self) -> None:
        """Once nobody is within: enable the collector if it was on before."""
        if self.is_off and not self.inside:
            self.is_off = False
            gc.enable()

    def halt(self) -> None:
        """No collection is in progress at a fork. A finalizer lets other threads run, and a child
        that one of them forks meanwhile never collects again; worse, it has objects in lists that
        begin on the stack of a thread that it lacks, and crashes when that memory is used anew.
        Only a collection that itself forks is not awaited to its end."""
        self.enter(self)
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        while not _collects() and time.monotonic() < deadline:
            time.sleep(0.001)

    def go_on(self) -> None:
        self.inside.discard(self)
        self.enable()

    def forked(self) -> None:
        """A child has none of the threads that were within `uncollected`."""
        self.inside.clear()
        self.enable()


_uncollected = _Uncollected()


@contextmanager
def uncollected() -> Iterator[None]:
    """No automatic collection begins within the block. Threads may enter it concurrently: the
    last one out enables the collector again, if the first one disabled it.

    A walk over 10,000 tensors keeps about 60,000 new objects. Meanwhile the collector scans every
    object of the process, torch's included, once or twice, which takes longer than the walk. Use
    it only for short work without I/O: it affects the whole process, and cycles that hold device
    memory are freed later.
    """
    me = object()
    try:
        _uncollected.enter(me)
        yield
    finally:
        try:
            _uncollected.inside.discard(me)
        finally:
            if _uncollected.is_off and not _uncollected.inside:
                _uncollected.is_off = False
                gc.enable()


@cache
def boot_id() -> str:
    """The id of the host's boot; empty where the host does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated now without swapping or being killed; None if unknown.

    The smallest answer of the host and of every control group of this process counts. Page cache
    counts as free. `proc` and `sys/fs/cgroup` are read below `root`.
    """
    known = (_free_on_host(root), *map(_free_in_group, _limited_groups(root)))
    return min((free for free in known if free is not None), default=None)


def _free_on_host(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_bytes().splitlines():
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_group(files: tuple[Path, Path]) -> int | None:
    limit_file, usage_file = files
    try:
        limit, used = int(limit_file.read_bytes()), int(usage_file.read_bytes())
        lines = limit_file.with_name("memory.stat").read_bytes().splitlines()
        cached = dict(line.split() for line in lines).get(b"inactive_file", b"0")
        return max(limit - used + int(cached), 0)
    except (OSError, ValueError):  # a limit of `max` is none
        return None


@cache
def _limited_groups(root: Path) -> tuple[tuple[Path, Path], ...]:
    """The limit file and the usage file of each control group of this process, cgroup v1 and v2,
    that has a limit below the host's memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        # A container may see its own group as the top.
        groups = [group, *group.parents] if group.exists() else [top]
        found += [(each / limit, each / usage) for each in groups if each.is_relative_to(top)]
    return tuple(files for files in found if _is_limited(files[0]))


def _is_limited(limit: Path) -> bool:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(limit.read_bytes()) < memory
    except (OSError, ValueError):
        return False


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def start(thread: threading.Thread, why: str) -> None:
    """Start a required thread. Raises `Unavailable`."""
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(
            f"{why}: {error}; raise the limit of processes (ulimit -u, or the container's pids), "
            "or end others, and repeat"
        ) from error


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """The waits between attempts: each is twice the one before, up to the longest."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


def behind(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Run `work`, which must not raise, on a new thread, and return the thread. If none can be
    started, run it now and return None."""
    thread = threading.Thread(target=work, name=name)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


class Outcome(Protocol):
    """Is told what becomes of work that was given to a `Pool`, as a `Future` is."""

    def set_running_or_notify_cancel(self) -> bool:
        """The work begins now; False if it shall not."""

    def set_result(self, result: Any, /) -> None:
        """The work has ended."""

    def set_exception(self, error: BaseException, /) -> None:
        """The work has failed."""

    def cancel(self) -> bool:
        """The work will not begin."""


class Pool(Executor):
    """Up to `count` daemon threads, started on demand. If no thread can be started, `submit`
    runs the work itself. Each thread first calls `begin`.

    Unlike `ThreadPoolExecutor`'s, they do not end with the main thread: a background commit
    still needs them.
    """

    def __init__(
        self, count: int, *, name: str = "ckptstore", begin: Callable[[], object] | None = None
    ) -> None:
        self._count, self._name, self._begin = count, name, begin
        self._queue: deque[tuple[Outcome, Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._changed = Condition()

    def submit(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> "Future[T]":
        future: Future[T] = new_future()
        self.put(future, partial(work, *args, **options))
        return future

    def put(self, outcome: Outcome, work: Callable[[], object]) -> None:
        """As `submit`, with an outcome of the caller's."""
        with self._changed:
            if self._closed:
                raise RuntimeError("work was submitted to threads that have ended")
            self._queue.append((outcome, work))
            if self._idle >= len(self._queue) or self._more() or self._threads:
                self._changed.notify()
                return
        self._work(alone=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the submitted work, or only after the work already begun. With
        `wait`, return when they have ended."""
        with self._changed:
            self._closed = True
            if cancel_futures:
                for outcome, _ in self._queue:
                    outcome.cancel()
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()

    def _more(self) -> bool:
        """Whether another thread was started."""
        if len(self._threads) == self._count:
            return False
        thread = threading.Thread(
            target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.append(thread)
        return True

    def _work(self, *, alone: bool = False) -> None:
        """Work off the queue, and wait for more unless `alone` on a caller's thread."""
        if self._begin and not alone:
            self._begin()
        while item := self._next(wait=not alone):
            outcome, work = item
            try:
                if outcome.set_running_or_notify_cancel():
                    outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)
            del item, outcome, work  # these must not live until the next item comes

    def _next(self, *, wait: bool) -> tuple[Outcome, Callable[[], Any]] | None:
        with self._changed:
            if wait:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._idle -= 1
            return self._queue.popleft() if self._queue else None


AHEAD = 1024
"""So many tasks are submitted before the first has ended: enough for large clusters, and little
memory."""


def each_done(
    executor: Executor, task: Callable[[T], R], items: Iterable[T]
) -> Generator[tuple[T, R], None, None]:
    """Call `task` for each item on `executor`; yields each with its result as they end, in any
    order. Use it within `contextlib.closing`: after a failure, tasks that have not begun are
    cancelled, and those that have are waited for.

    Raises what a task raises, and `Unavailable` where the executor lost one.
    """
    left, running, ended = iter(items), dict[Future[R], T](), SimpleQueue[Future[R]]()
    try:
        while True:
            for item in islice(left, AHEAD - len(running)):
                future = executor.submit(task, item)
                running[future] = item
                future.add_done_callback(ended.put)
            if not running:
                return
            future = ended.get()
            yield running.pop(future), future.result()
    except (BrokenExecutor, CancelledError) as error:
        raise Unavailable(
            f"a worker ended before its task: {error or type(error).__name__}; what was done is "
            "kept: repeat the call when the workers are back"
        ) from error
    finally:
        for future in running:
            future.cancel()
        wait(running)


_POLL_S = 0.005
_stuck: set[Path] = set()
"""Locks that were not free within a timeout. Their holder may be stopped, so they are not waited
for again before they were free once."""


@contextmanager
def file_lock(path: Path, *, timeout_s: float, exclusive: bool = True) -> Iterator[bool]:
    """Hold the lock on the file `path` (`flock`) within the block; it ends with its process.
    Yields False after the timeout, or at once if `path` cannot be opened, or if it or its
    directory is a link.

    It protects indexes, which can be rebuilt, and never the store. Not reentrant: a thread that
    holds the lock and asks again waits for itself.
    """
    try:
        fd = _open_lock(path)
    except OSError:
        yield False
        return
    try:
        patience_s = 0.0 if path in _stuck else timeout_s
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        held = _take(fd, kind, time.monotonic() + patience_s)
        if held:
            _stuck.discard(path)
        elif timeout_s:
            _stuck.add(path)
        yield held
    finally:
        with suppress(OSError):  # the descriptor and its lock are gone whatever close(2) says
            os.close(fd)


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.open(path.name, flags, 0o666 & rights(path.parent), dir_fd=directory)
    finally:
        os.close(directory)


def _take(fd: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return False
