"""What `Store.on` offers: the long jobs of a store on the workers of an executor."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from ckptstore.interop.formats.new_files import EVERYTHING, Exported
from ckptstore.plugin.checks import (
    Level,
    Report,
    fsck,
    offline_store_of,
    parse_level,
    parse_shard,
    parse_share,
)
from ckptstore.plugin.handles import AnyRef, StoreHandle, find_commit
from ckptstore.plugin.mirrors import Mirrored
from ckptstore.plugin.progress import Progress, silent
from ckptstore.plugin.upkeep import CompactReport, GcReport, Spread, Stores
from ckptstore.plugins.engine.consolidated import export_on
from ckptstore.plugins.engine.work import Place, spread_on, stores_on


class Moves(Protocol):
    """What of the maintenance of a store moves chunks; the arguments are those of `Store`."""

    @property
    def compact(self) -> Callable[..., CompactReport]: ...

    @property
    def gc(self) -> Callable[..., GcReport]: ...

    @property
    def push(self) -> Callable[..., Mirrored]: ...

    @property
    def pull(self) -> Callable[..., Mirrored]: ...

    @property
    def mirror(self) -> Callable[..., Mirrored]: ...


class OnWorkers:
    """A store whose long jobs run on the workers of `executor`: `fsck` and `export`, and as in
    `Store` `compact`, `gc`, of which they copy what is left in packs, `push`, `pull` and
    `mirror`."""

    def __init__(
        self,
        handle: StoreHandle,
        executor: Executor,
        run: str | None,
        maintenance: Callable[[Callable[..., Spread[Stores]]], Moves],
    ) -> None:
        """`maintenance` makes that of the store, with what carries out its jobs."""
        self._handle, self._executor, self._run = handle, executor, run
        its = maintenance(partial(stores_on, executor))
        self.compact, self.gc = its.compact, its.gc
        self.push, self.pull, self.mirror = its.push, its.pull, its.mirror

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

    def export(
        self,
        ref: AnyRef,
        path: str | os.PathLike[str],
        *,
        select: str | Sequence[str] = EVERYTHING,
        shard_bytes: int | None = None,
        progress: Progress = silent,
    ) -> Exported:
        """Write the tensors of a commit as safetensors files, by ranges, without an accelerator and
        beside a training.

        Args:
            ref: The commit.
            path: A new directory for `model-00001-of-00003.safetensors` … and their index, as
                Hugging Face's `save_pretrained` names them; or one new file, if it ends in
                `.safetensors`. All workers must see it at this path, by a shared file system.
            select: Keys of the state, or globs of leaf paths, as in `interop.formats.export`.
            shard_bytes: Largest file, unless a tensor is larger; default: 5 GiB.
            progress: Called with phase, done and total bytes.

        Returns:
            As `interop.formats.export`. The files appear together, when all are durable.

        Raises:
            Conflict: `path` exists.
            InvalidInput: A tensor has no safetensors dtype; or two have one name.
            Unavailable: A worker does not reach the store or `path`, or was lost. Nothing is at
                `path`.

        Example:
            >>> store.on(executor).export("best:loss", "/shared/release", select="model")
        """
        found = find_commit(self._handle, ref, self._run)
        return export_on(
            self._executor,
            self._handle,
            found,
            path,
            select=select,
            shard_bytes=shard_bytes,
            progress=progress,
        )
