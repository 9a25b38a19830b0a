"""Open, create or clone a store."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypedDict, Unpack

from ckptstore.core.settings import Executor, OnFull, Settings
from ckptstore.distributed.gloo import is_several
from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.mirror.plan import other_end
from ckptstore.maintenance.mirror.tiers import Tier
from ckptstore.maintenance.retention import Policy
from ckptstore.repository.init_store import init_store
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.store import Store


class OpenOptions(TypedDict, total=False):
    """More arguments of `open`. None means the default.

    `chunk_bytes` (a power of two, 1 MiB), `codec` (`raw` or `zstd`) and `private` (modes 0700 and
    0600, whatever the umask) apply only to a store that this call makes.
    """

    chunk_bytes: int | None
    codec: str | None
    private: bool
    on_full: OnFull | None
    """On a full disk, `"raise"` raises `NoSpace`; `"gc"` collects forgotten commits and retries."""
    threads: int | None
    """Threads that hash, read and write; else `$CKPTSTORE_THREADS`, else by the processors."""
    staging_bytes: int | None
    """Memory for copies of asynchronous commits; else `$CKPTSTORE_STAGING_BYTES`, else half of what
    is available at the first `commit_async`."""
    max_in_flight: int | None
    """Asynchronous commits under way at once; 1."""
    executor: Executor | None
    """`"process"` commits in a worker process, which shares no interpreter lock with training and
    finishes its commit when the trainer dies."""
    direct_io: bool | None
    """Write large packs past the page cache of a local disk: always, never, or by default for
    commits in the background."""
    read_cache_bytes: int | None
    """Disk space of this host for data read from a bucket; else `$CKPTSTORE_READ_CACHE_BYTES`."""
    mirror_options: Mapping[str, Any] | None
    """Storage options of `mirror`."""
    mirror_index: str | None
    """The database that has the log of `mirror`."""


def open(
    place: str | os.PathLike[str],
    *,
    run: str | None = None,
    create: bool = True,
    read_only: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    index: str | None = None,
    mirror: str | os.PathLike[str] | None = None,
    keep_local: Policy | Sequence[Policy] = (),
    **options: Unpack[OpenOptions],
) -> Store:
    """Open the store at `place`; make it if there is nothing yet.

    Args:
        place: A directory or an fsspec URL.
        run: Groups the commits of one training run; else `$CKPTSTORE_RUN`, else `main`.
        create: Make a store where there is none.
        read_only: Refuse commits and other changes.
        storage_options: Options for fsspec, such as credentials.
        index: `postgresql+psycopg://USER@HOST/DATABASE`, if a database has log and catalog; else
            `$CKPTSTORE_INDEX` (docs/shared-store.md).
        mirror: Another store, to which commits are uploaded in the background (docs/mirrors.md).
        keep_local: Policies of commits that stay at `place` after the upload; default: all.
        options: See `OpenOptions`.

    Returns:
        The store. Close it, or use it as a context manager.

    Raises:
        NotFound: There is no store.
        InvalidInput: `place` holds something else, or a store of a newer format.
        Corrupt: `ckptstore.json` is damaged.
        ReadOnly, Unavailable: The store cannot be made.

    Example:
        >>> store = ckptstore.open("checkpoints", run="pretrain", threads=8)
    """
    mirror_options = options.pop("mirror_options", None)
    mirror_index = options.pop("mirror_index", None)
    given = dict(storage_options) if storage_options is not None else None
    settings = Settings.of(
        run=run,
        create=create,
        read_only=read_only,
        storage_options=given,
        index=index,
        **_known(options),
    )
    if mirror is None:
        return Store(_open_or_make(place, settings), settings)
    like_mirror = options.get("chunk_bytes") is None and options.get("codec") is None
    return _open_mirrored(
        place, settings, os.fspath(mirror), keep_local, mirror_options, mirror_index, like_mirror
    )


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`. Raises `TypeError` for a name that `open` does not take, as Python does."""
    if unknown := sorted(set(options) - set(OpenOptions.__annotations__)):
        raise TypeError(f"open() got an unexpected keyword argument {unknown[0]!r}")
    return dict(options)


def _open_mirrored(
    place: str | os.PathLike[str],
    settings: Settings,
    mirror: str,
    keep_local: Policy | Sequence[Policy],
    mirror_options: Mapping[str, Any] | None,
    mirror_index: str | None,
    like_mirror: bool,
) -> Store:
    if is_several(None):
        raise InvalidInput(
            "mirror= is for one process; with several ranks open without it, and let one rank call "
            "store.mirror(to=…)"
        )
    if like_mirror:
        settings = _like_mirror(settings, mirror, mirror_options, mirror_index)
    handle = _open_or_make(place, settings)
    if settings.read_only:
        return Store(handle, settings)
    keep = (keep_local,) if isinstance(keep_local, Policy) else tuple(keep_local)
    own = StoreHandle(place, storage_options=settings.storage_options, index=settings.index)
    tier = Tier(own, mirror, keep=keep, storage_options=mirror_options, index=mirror_index)
    return Store(handle, settings, tier)


def _like_mirror(
    settings: Settings,
    mirror: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    index: str | None,
) -> Settings:
    """Settings of a new store with the chunks and codec of `mirror`, if that exists."""
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
    """Make a store at `to` with every commit and tag of the one at `source`, and open it for `run`.

    Repeat an interrupted clone to complete it. `storage_options` and `index`, the database of the
    log, are those of `source`; `to_options` and `to_index` those of `to`. Raises as `Store.pull`.
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


def _open_or_make(place: str | os.PathLike[str], settings: Settings) -> StoreHandle:
    def opened() -> StoreHandle:
        handle = StoreHandle(
            place,
            read_only=settings.read_only,
            storage_options=settings.storage_options,
            direct_io=settings.direct_io,
            index=settings.index,
            read_cache_bytes=settings.read_cache_bytes,
        )
        if not settings.read_only:
            handle.warm()
        return handle

    try:
        return opened()
    except NotFound:
        if not settings.create or settings.read_only:
            raise
    with suppress(Conflict):  # another process made it at the same time
        init_store(
            place,
            chunk_bytes=settings.chunk_bytes,
            codec=settings.codec,
            private=settings.private,
            storage_options=settings.storage_options,
            index=settings.index,
        )
    return opened()
