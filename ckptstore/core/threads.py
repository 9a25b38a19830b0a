"""How does work continue when no more threads can be started?

Users and containers have a limit of threads. Work whose result is awaited then runs on the
calling thread. A server without a thread is `Unavailable`.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ckptstore.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")


def start(thread: threading.Thread, why: str) -> None:
    """Start a required thread. Raises `Unavailable`."""
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(
            f"{why}: {error}; raise the limit of processes (ulimit -u, or the container's pids), "
            "or end others, and repeat"
        ) from error


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
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        item = future, partial(work, *args, **options)
        with self._changed:
            if self._closed:
                raise RuntimeError("work was submitted to threads that have ended")
            self._queue.append(item)
            if self._idle >= len(self._queue) or self._more() or self._threads:
                self._changed.notify()
                return future
            self._queue.pop()
        _run(*item)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the submitted work, or only after the work already begun. With
        `wait`, return when they have ended."""
        with self._changed:
            self._closed = True
            if cancel_futures:
                for future, _ in self._queue:
                    future.cancel()
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

    def _work(self) -> None:
        if self._begin:
            self._begin()
        while item := self._next():
            _run(*item)
            del item  # what it refers to must not live until the next one comes

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            return self._queue.popleft() if self._queue else None


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
