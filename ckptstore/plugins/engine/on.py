"""What `Store.on` offers: the long jobs of a store on the workers of an executor."""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.upkeep import (
    Level,
    OfflineStore,
    Progress,
    Report,
    Spread,
    fsck,
    offline_store_of,
    parse_level,
    parse_shard,
    parse_share,
    silent,
)
from ckptstore.plugins.engine.ray_executor import RayExecutor
from ckptstore.plugins.engine.work import Place, spread_on


class OnWorkers:
    """A store whose long jobs run on the workers of `executor`."""

    def __init__(self, handle: StoreHandle, executor: Executor) -> None:
        self._handle, self._executor = handle, executor

    def fsck(
        self,
        level: Level | str = Level.CONNECTIVITY,
        *,
        read_data: str | None = None,
        shard: str | None = None,
        progress: Progress = silent,
    ) -> Report:
        """`Store.fsck`, with the same report; workers read and hash the data.

        Args:
            level, read_data, shard: As in `Store.fsck`.
            progress: Called with phase, done and total.

        Raises:
            Unavailable: A worker does not reach the store, or was lost. What was verified is
                kept: the next call goes on from there.

        Example:
            >>> with ProcessPoolExecutor(8) as executor:
            ...     store.on(executor).fsck(read_data="all")
        """
        offline = offline_store_of(self._handle)
        return fsck(
            offline,
            level=parse_level(level),
            share=parse_share(read_data),
            shard=parse_shard(shard),
            spread=spread_on(self._executor, Place.of(offline)),
            progress=progress,
        )


@contextmanager
def workers(where: str, store: OfflineStore) -> Iterator[Spread]:
    """The workers that `--on` names. Raises as `RayExecutor`."""
    with RayExecutor(where) as executor:
        yield spread_on(executor, Place.of(store))
