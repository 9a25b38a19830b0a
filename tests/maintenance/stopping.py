"""A store whose process stops after its n-th change: objects put, created, appended to, finished or
deleted, and entries of the log."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptstore.log.log import Log
from ckptstore.repository.store_handle import StoreHandle
from tests.maintenance.collecting import at
from tests.shared.sites import Site

HEARTBEAT = "ckptstore-heartbeat"
"""The thread whose puts come at any time, and do not count."""


class Stopped(BaseException):
    """The process ended here, as far as the store can tell. No handler of errors may see it."""


class StoppingBackend:
    """A backend on which the change after the first `changes` ends the process; `changed` counts
    them."""

    def __init__(self, storage: Any, changes: int) -> None:
        self._storage = storage
        self._left = changes
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def put(self, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == HEARTBEAT:
            if not self._left:
                return  # nor does the thread of a process that ended go on
        else:
            self._change()
        self._storage.put(*args, **kwargs)

    def put_new(self, *args: Any) -> bool:
        self._change()
        created: bool = self._storage.put_new(*args)
        return created

    def delete(self, key: str) -> None:
        self._change()
        self._storage.delete(key)

    def create(self, *args: Any, **kwargs: Any) -> Any:
        self._change()
        return _StoppingWriter(self, self._storage.create(*args, **kwargs))

    def counting(self, change: Callable[..., bool]) -> Callable[..., bool]:
        """`change` of the log's, after which the process may end before it does anything else."""

        def call(*args: Any) -> bool:
            self._change()
            return change(*args)

        return call

    def _change(self) -> None:
        if not self._left:
            raise Stopped
        self._left -= 1
        self.changed += 1


class _StoppingWriter:
    def __init__(self, stopping: StoppingBackend, writer: Any) -> None:
        self._stopping, self._writer = stopping, writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append(self, *args: Any) -> None:
        self._stopping._change()
        self._writer.append(*args)

    def finish(self) -> bool:
        self._stopping._change()
        created: bool = self._writer.finish()
        return created

    def discard(self) -> None:
        """A process that has ended discards nothing."""
        if self._stopping._left:
            self._writer.discard()


def opened_stopping(place: Path | Site, changes: int) -> tuple[StoreHandle, StoppingBackend]:
    """A store whose process ends after so many changes to it."""
    handle = at(place).handle()
    return handle, stop_after(handle, changes)


def stop_after(handle: StoreHandle, changes: int) -> StoppingBackend:
    """Let the process that has this view of a store, newly opened, end after so many changes to
    it."""
    stopping = StoppingBackend(handle.storage, changes)
    handle.storage = stopping  # type: ignore[assignment]  # a Backend but for its type
    if handle.database is None:
        handle.log = Log(stopping, handle.config.store, handle.config.generation)  # type: ignore[arg-type]
    else:
        handle.database._storage = stopping  # type: ignore[assignment]
        handle.database.create = stopping.counting(handle.database.create)  # type: ignore[method-assign]
        handle.log = Log(
            stopping, handle.config.store, handle.config.generation, place=handle.database
        )  # type: ignore[arg-type]
    return stopping
