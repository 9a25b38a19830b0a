"""Those who make and read the commits of one store: each is engaged when it is first needed, and all are let go together."""

from functools import cached_property

from ckptstore.commit.commit import Committer
from ckptstore.commit.worker_client import Hired, HiredCommitter
from ckptstore.core.settings import Settings
from ckptstore.distributed.commit import RanksCommitter
from ckptstore.distributed.external_commit import PartsCommitter
from ckptstore.distributed.worker_group_client import HiredRanks
from ckptstore.repository.store_handle import Opening
from ckptstore.repository.thread_pool import Threads
from ckptstore.restore.reader import Reader

REMOTE_READS = 8
"""So many reads from a bucket are under way at once, whatever the number of processors: they wait for the network."""


class Crew:
    """By one process or by many ranks (`ranks`); while the caller waits, or `aside`, which gives way to training."""

    def __init__(self, opening: Opening, settings: Settings) -> None:
        self._opening, self._settings = opening, settings
        self._where = opening.config, opening.objects, opening.log
        self.threads, self._aside = Threads(settings.threads), Threads(settings.threads, aside=True)
        self._reading = self.threads if opening.backend.durable_root else Threads(max(settings.threads, REMOTE_READS))

    @cached_property
    def one(self) -> Committer:
        return Committer(*self._where, self.threads)

    @cached_property
    def one_aside(self) -> Committer:
        return Committer(*self._where, self._aside)

    @cached_property
    def ranks(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self.threads)

    @cached_property
    def ranks_aside(self) -> RanksCommitter:
        return RanksCommitter(*self._where, self._aside)

    @cached_property
    def parts(self) -> PartsCommitter:
        return PartsCommitter(*self._where, self.threads)

    @cached_property
    def hired_one(self) -> HiredCommitter:
        return HiredCommitter(self._hired, self.reader)

    @cached_property
    def hired_ranks(self) -> HiredRanks:
        return HiredRanks(self._hired)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self._opening.config, self._opening.objects, self._reading)

    @property
    def worker_pid(self) -> int | None:
        """The process of the hired; None while nobody is."""
        return self._hired.pid if "_hired" in self.__dict__ else None

    def let_go(self) -> None:
        """None of them may be asked any more."""
        if "_hired" in self.__dict__:
            self._hired.let_go()
        self.threads.close()
        self._aside.close()
        self._reading.close()

    @cached_property
    def _hired(self) -> Hired:
        settings = self._settings
        return Hired(
            place=self._opening.place,
            storage_options=settings.storage_options,
            direct_io=settings.direct_io,
            index=settings.index,
            threads=settings.threads,
        )
