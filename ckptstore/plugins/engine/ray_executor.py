"""Ray (https://docs.ray.io) as a `concurrent.futures.Executor`, which Ray has none of its own."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from ckptstore.errors import InvalidInput, Unavailable

RETRIES = 5
"""So often a task begins again whose worker, or its node, is gone."""

CONNECT_TIMEOUT_S = 10.0

_ABSENT = '--on ray needs Ray: pip install "ckptstore[ray]"'


class RayExecutor(Executor):
    """Runs each call as a task of a Ray cluster, which takes one CPU.

    Nodes need the same ckptstore and Python, and reach what the calls are about. A task whose
    worker dies begins again elsewhere, `RETRIES` times.

    Args:
        address: `ray` for the cluster that this host is a node of (or `$RAY_ADDRESS`), or
            `ray://HOST[:PORT]` for one elsewhere, by Ray's client server. Not used where the
            process is connected already.

    Raises:
        InvalidInput: Ray is not installed, or `address` is none.
        Unavailable: No cluster answers.

    Example:
        >>> with RayExecutor("ray://head:10001") as executor:
        ...     store.on(executor).fsck(read_data="all")
    """

    def __init__(self, address: str = "ray") -> None:
        if address != "ray" and not address.startswith("ray://"):
            raise InvalidInput(f"{address!r:.80} is no engine: wanted ray, or ray://HOST:PORT")
        try:
            import ray
        except ImportError as error:
            raise InvalidInput(f"{_ABSENT} ({error})") from error
        self._ray, self._connected = ray, not ray.is_initialized()
        if self._connected:
            where = "auto" if address == "ray" else address
            try:
                _knock(address if where == address else os.environ.get("RAY_ADDRESS", ""))
                ray.init(where, log_to_driver=False, logging_level="ERROR")
            except (OSError, RuntimeError, ValueError) as error:
                raise Unavailable(f"no Ray cluster answers at {address}: {error}") from error
        self._remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return _RayFuture(self._ray, self._remote.remote(fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, if this object has joined it; what it still runs is cancelled."""
        if self._connected:
            self._connected = False
            self._ray.shutdown()


def _knock(address: str) -> None:
    """Raise `OSError` if nothing listens at an address: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


class _RayFuture(Future[Any]):
    """The result of a task. It can be cancelled until it is there; it is over when the task is."""

    def __init__(self, ray: Any, ref: Any) -> None:
        super().__init__()
        self._ray, self._ref = ray, ref
        ref.future().add_done_callback(self._ended)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._ray.cancel(self._ref)
        return cancelled

    def _ended(self, task: "Future[Any]") -> None:
        if not self.set_running_or_notify_cancel():
            return
        if task.cancelled():
            self.set_exception(BrokenExecutor("Ray has given up a task"))
            return
        error = task.exception()
        if error is None:
            self.set_result(task.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            self.set_exception(error.cause)
        else:
            self.set_exception(BrokenExecutor(f"Ray has lost a task: {error}"))
