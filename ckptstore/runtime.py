"""Lazily created committers, readers and thread pools of one store, closed together."""

from functools import cached_property

from ckptstore.commit.commit import Committer
from ckptstore.commit.worker_client import ProcessCommitter, WorkerClient
from ckptstore.core.settings import Settings
from ckptstore.distributed.commit import RanksCommitter
from ckptstore.distributed.external_commit import PartsCommitter
from ckptstore.distributed.worker_group_client import ProcessRanksCommitter
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader

REMOTE_READS = 8
"""Least number of concurrent reads from a bucket. They wait for the network, not for processors."""


class StoreRuntime:
    """Committers that the caller waits for, and `background_…` ones with low priority.

    A property creates its object at the first use. `close` ends their use.
    """

    def __init__(self, handle: StoreHandle, settings: Settings) -> None:
        self._handle, self._settings = handle, settings
        self._where = handle.config, handle.objects, handle.log
        self.threads, self._background = (
            ThreadPool(settings.threads),
            ThreadPool(settings.threads, aside=True),
        )
        slow = handle.storage.capabilities.slow_requests
        self._reading = ThreadPool(max(settings.threads, REMOTE_READS)) if slow else self.threads

    @cached_property
    def committer(self) -> Committer:
        return Committer(*self._where, self.threads)

    @cached_property
    def background_committer(self) -> Committer:
        return Committer(*self._where, self._background)

    @cached_property
    def ranks_committer(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self.threads)

    @cached_property
    def background_ranks_committer(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self._background)

    @cached_property
    def parts_committer(self) -> PartsCommitter:
        """For commits whose parts another library's ranks write: `open` and `write`, then
        `publish` within `StoreInternals.commit_external`."""
        return PartsCommitter(*self._where, self.threads)

    @cached_property
    def process_committer(self) -> ProcessCommitter:
        return ProcessCommitter(self._worker_client, self.reader.document)

    @cached_property
    def process_ranks_committer(self) -> ProcessRanksCommitter:
        return ProcessRanksCommitter(self._worker_client)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self._handle.config, self._handle.objects, self._reading)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker process; None while there is none."""
        return self._worker_client.pid if "_worker_client" in self.__dict__ else None

    def close(self) -> None:
        """Stop the worker process and the threads."""
        if "_worker_client" in self.__dict__:
            self._worker_client.release()
        self.threads.close()
        self._background.close()
        self._reading.close()

    @cached_property
    def _worker_client(self) -> WorkerClient:
        settings = self._settings
        return WorkerClient(
            place=self._handle.place,
            storage_options=settings.storage_options,
            direct_io=settings.direct_io,
            index=settings.index,
            threads=settings.threads,
        )
