"""How one comes by a `Store`: open it, make it, clone it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ckptstore.core.settings import Executor, OnFull, Settings
from ckptstore.distributed.gloo import is_several
from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.maintenance.mirror.remotes import other_end
from ckptstore.maintenance.mirror.tiers import Tier
from ckptstore.maintenance.progress import Progress, silent
from ckptstore.maintenance.retention import Policy
from ckptstore.repository.init_store import init_store
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.store import Store


def open(
    place: str | os.PathLike[str],
    *,
    run: str | None = None,
    create: bool = True,
    read_only: bool = False,
    chunk_bytes: int | None = None,
    codec: str | None = None,
    private: bool = False,
    on_full: OnFull | None = None,
    threads: int | None = None,
    staging_bytes: int | None = None,
    max_in_flight: int | None = None,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    direct_io: bool | None = None,
    index: str | None = None,
    read_cache_bytes: int | None = None,
    mirror: str | os.PathLike[str] | None = None,
    keep_local: Policy | Sequence[Policy] = (),
    mirror_options: Mapping[str, Any] | None = None,
    mirror_index: str | None = None,
) -> Store:
    """Open the store at `place`, a directory or an fsspec URL; with `create`, make it where there
    is nothing yet.

    `run` groups the commits of one training run (default `$CKPTSTORE_RUN`, else `main`).
    `chunk_bytes` (a power of two, default 1 MiB) and `codec` (`raw` or `zstd`) apply only to a
    store that is made here, and so does `private`, which keeps everybody but its owner out: its
    directories get the mode 0700 and its files 0600, whatever the umask of those who write them.
    `index="postgresql+psycopg://USER@HOST/DATABASE"` makes a store whose log and catalog are in
    that database, and is needed, or `$CKPTSTORE_INDEX`, to open one (docs/shared-store.md).

    `read_cache_bytes` (default `$CKPTSTORE_READ_CACHE_BYTES`, else 0) is how much of what is read
    from a bucket this host keeps on its disk, for all its processes; a store in a directory needs
    none.

    `threads` (default `$CKPTSTORE_THREADS`, else by the processors) hash, read and write. With
    `direct_io=True`, large packs are written past the page cache of a local disk: what others have
    there stays, and the next restore on this host reads the disk. By default that is so for what is
    committed in the background, where it saves processor time; with False, for nothing. On a full
    disk a commit raises `NoSpace`, or with `on_full="gc"` collects what was forgotten and tries
    once more. `staging_bytes` (default `$CKPTSTORE_STAGING_BYTES`, else half of what is available
    at the first `commit_async`) is the memory that asynchronous commits may copy states to,
    `max_in_flight` (default 1) how many may be under way. With `executor="process"` they are made
    by a process of their own, which shares no interpreter lock with training and finishes its
    commit when the trainer dies.

    With `mirror`, another store (`mirror_options` are its storage options, `mirror_index` is the
    database that has its log), commits are durable at `place` at once and uploaded in the
    background (docs/mirrors.md). `keep_local` says which commits stay at `place` once they have
    arrived there (default: all).

    Raises `NotFound` if there is no store, `InvalidInput` if `place` holds something else or a
    store of a newer format, `Corrupt` if `ckptstore.json` is damaged, `ReadOnly` or `Unavailable`
    if it cannot be made.
    """
    settings = Settings.of(
        run=run,
        create=create,
        read_only=read_only,
        chunk_bytes=chunk_bytes,
        codec=codec,
        private=private,
        on_full=on_full,
        threads=threads,
        staging_bytes=staging_bytes,
        max_in_flight=max_in_flight,
        executor=executor,
        storage_options=None if storage_options is None else dict(storage_options),
        direct_io=direct_io,
        index=index,
        read_cache_bytes=read_cache_bytes,
    )
    if mirror is not None and is_several(None):
        raise InvalidInput(
            "mirror= is for one process; with several ranks open without it, and let one rank call "
            "store.mirror(to=…)"
        )
    if mirror is not None and chunk_bytes is None and codec is None:
        settings = _like_mirror(settings, mirror, mirror_options, mirror_index)
    handle = _find_or_make(place, settings)
    if not read_only:
        handle.warm()
    tier = None
    if mirror is not None and not read_only:
        keep = (keep_local,) if isinstance(keep_local, Policy) else tuple(keep_local)
        own = StoreHandle(place, storage_options=settings.storage_options, index=index)
        tier = Tier(
            own, os.fspath(mirror), keep=keep, storage_options=mirror_options, index=mirror_index
        )
    return Store(handle, settings, tier)


def _like_mirror(
    settings: Settings,
    mirror: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    index: str | None,
) -> Settings:
    """Settings with which a store that is made now can be uploaded to `mirror`, if that is
    there."""
    try:
        with other_end(
            mirror, read_only=True, storage_options=storage_options, index=index
        ) as there:
            return settings.model_copy(
                update={"chunk_bytes": there.config.chunk_bytes, "codec": there.config.codec}
            )
    except (NotFound, Unavailable):
        return settings


def clone(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    run: str | None = None,
    verify: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    index: str | None = None,
    to_options: Mapping[str, Any] | None = None,
    to_index: str | None = None,
    progress: Progress = silent,
) -> Store:
    """A new store at `to` with every commit and tag of the one at `source`, opened for `run`. A
    clone that was interrupted is completed.

    `storage_options` and `index`, the database that has its log, are for `source`, `to_options` and
    `to_index` for `to`. Raises as `Store.pull` does.
    """
    settings = Settings.of(run=run, storage_options=dict(to_options or {}), index=to_index)
    with (
        other_end(source, read_only=True, storage_options=storage_options, index=index) as origin,
        ExitStack() as undo,
    ):
        with other_end(to, like=origin, storage_options=to_options, index=to_index):
            pass  # made
        store = undo.enter_context(
            Store(
                StoreHandle(to, storage_options=settings.storage_options, index=to_index), settings
            )
        )
        store.pull(
            source, verify=verify, storage_options=storage_options, index=index, progress=progress
        )
        undo.pop_all()
        return store


def _find_or_make(place: str | os.PathLike[str], settings: Settings) -> StoreHandle:
    def opened() -> StoreHandle:
        return StoreHandle(
            place,
            read_only=settings.read_only,
            storage_options=settings.storage_options,
            direct_io=settings.direct_io,
            index=settings.index,
            read_cache_bytes=settings.read_cache_bytes,
        )

    try:
        return opened()
    except NotFound:
        if not settings.create or settings.read_only:
            raise
    with suppress(Conflict):  # another process made it at the same time: open that one
        init_store(
            place,
            chunk_bytes=settings.chunk_bytes,
            codec=settings.codec,
            private=settings.private,
            storage_options=settings.storage_options,
            index=settings.index,
        )
    return opened()
