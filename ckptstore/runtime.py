"""Those who make and read the commits of one store: each is engaged when it is first needed, and
all are let go together."""

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
"""So many reads from a bucket are under way at once, whatever the number of processors: they wait
for the network."""


class StoreRuntime:
    """By one process or by many ranks (`ranks`); while the caller waits, or `aside`, which gives
    way to training."""

    def __init__(self, handle: StoreHandle, settings: Settings) -> None:
        self._handle, self._settings = handle, settings
        self._where = handle.config, handle.objects, handle.log
        self.threads, self._aside = (
            ThreadPool(settings.threads),
            ThreadPool(settings.threads, aside=True),
        )
        slow = handle.storage.capabilities.slow_requests
        self._reading = ThreadPool(max(settings.threads, REMOTE_READS)) if slow else self.threads

    @cached_property
    def one(self) -> Committer:
        return Committer(*self._where, self.threads)

    @cached_property
    def background_committer(self) -> Committer:
        return Committer(*self._where, self._aside)

    @cached_property
    def ranks(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self.threads)

    @cached_property
    def background_ranks_committer(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self._aside)

    @cached_property
    def parts(self) -> PartsCommitter:
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
        """The process of the hired; None while nobody is."""
        return self._worker_client.pid if "_worker_client" in self.__dict__ else None

    def release(self) -> None:
        """None of them may be asked any more."""
        if "_worker_client" in self.__dict__:
            self._worker_client.release()
        self.threads.close()
        self._aside.close()
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
