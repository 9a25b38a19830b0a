"""Lazily created committers, readers and thread pools of one store, closed together."""

from functools import cached_property

from ckptstore.commit.transaction import Destination
from ckptstore.core.settings import Settings
from ckptstore.distributed.commit import Committer
from ckptstore.distributed.coordinator import PartsCommitter
from ckptstore.distributed.worker_client import WorkerCommitter
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader

REMOTE_READS = 8
"""Least number of concurrent reads from a bucket. They wait for the network, not for processors."""


class StoreRuntime:
    """A committer that the caller waits for, and one in the background: with low priority in this
    process, or in a worker process.

    A property creates its object at the first use. `close` ends their use.
    """

    def __init__(self, handle: StoreHandle, settings: Settings) -> None:
        self._handle, self._settings = handle, settings
        self.threads, self._background = (
            ThreadPool(settings.threads),
            ThreadPool(settings.threads, aside=True),
        )
        slow = handle.storage.capabilities.slow_requests
        self._reading = ThreadPool(max(settings.threads, REMOTE_READS)) if slow else self.threads

    @cached_property
    def committer(self) -> Committer:
        return Committer(Destination(self._handle, self.threads))

    @cached_property
    def background_committer(self) -> Committer | WorkerCommitter:
        if self._settings.executor != "process":
            return Committer(Destination(self._handle, self._background))
        options = {
            "storage_options": dict(self._settings.storage_options),
            "direct_io": self._settings.direct_io is not False,
            "index": self._settings.index,
        }
        return WorkerCommitter(self._handle.place, options, self._settings.threads)

    @cached_property
    def parts_committer(self) -> PartsCommitter:
        """For commits whose parts another library's ranks write: `open` and `write`, then
        `publish` within `StoreInternals.commit_external`."""
        return PartsCommitter(Destination(self._handle, self.threads))

    @cached_property
    def reader(self) -> Reader:
        return Reader(self._handle.config, self._handle.objects, self._reading)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker process; None while there is none."""
        worker = self._worker
        return worker.pid if worker else None

    def close(self) -> None:
        """Stop the worker process and the threads."""
        if worker := self._worker:
            worker.close()
        self.threads.close()
        self._background.close()
        self._reading.close()

    @property
    def _worker(self) -> WorkerCommitter | None:
        found = self.__dict__.get("background_committer")
        return found if isinstance(found, WorkerCommitter) else None
