"""Open, create or clone a store, or open the commit that a pointer file names.

`objects.pointer_files` has the format of those files.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from ckptstore.core.options import Async, Storage
from ckptstore.core.public_calls import public_call
from ckptstore.core.settings import Settings
from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.mirror import MirrorOptions, mirror
from ckptstore.maintenance.mirror_plan import all_commits, other_end
from ckptstore.maintenance.retention import Policy
from ckptstore.objects.pointer_files import Pointer, read_pointer
from ckptstore.objects.pointer_files import write_pointer as write_file
from ckptstore.peers import leads_all
from ckptstore.plugins.tiers.tiers import Tier
from ckptstore.repository.init_store import init_store
from ckptstore.repository.resolve_ref import AnyRef
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.store import Store, internals_of


@dataclass(frozen=True, slots=True)
class Mirror:
    """Another store, to which the commits of a store are uploaded in the background
    (docs/mirrors.md).

    Args:
        place: Its directory or URL.
        keep_local: Policies of commits that stay in the first store after the upload; default: all
            stay.
        storage: Where and how the mirror keeps its objects.
        every_steps: Upload, of each run, the first commit after each multiple of so many steps.
            Those with a tag are uploaded, too, and by `flush_mirror` and `close` the newest.

    Example:
        >>> mirror = Mirror("s3://bucket/run", keep_local=KeepLast(3))
        >>> store = ckptstore.open("/nvme/checkpoints", mirror=mirror)
    """

    place: str | os.PathLike[str]
    keep_local: Policy | Sequence[Policy] = ()
    storage: Storage = field(default_factory=Storage)
    every_steps: int = 1

    def __post_init__(self) -> None:
        if not (type(self.every_steps) is int and self.every_steps > 0):
            raise InvalidInput(
                f"every_steps is {self.every_steps!r:.80}; wanted a number of steps, 1 or more"
            )
        for policy in self.policies:
            if not isinstance(policy, Policy):
                raise InvalidInput(
                    f"keep_local has {policy!r}; wanted policies, such as KeepLast(3)"
                )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """`keep_local`, one or several."""
        keep = self.keep_local
        return tuple(keep) if isinstance(keep, Sequence) else (keep,)


@public_call
def open(
    place: str | os.PathLike[str],
    *,
    run: str | None = None,
    create: bool = True,
    read_only: bool = False,
    storage: Storage | None = None,
    background: Async | None = None,
    threads: int | None = None,
    mirror: Mirror | str | os.PathLike[str] | None = None,
    **misplaced: Never,
) -> Store:
    """Open the store at `place`; make it if there is nothing yet.

    Args:
        place: A directory or an fsspec URL.
        run: Groups the commits of one training run; else `$CKPTSTORE_RUN`, else `main`.
        create: Make a store where there is none.
        read_only: Refuse commits and other changes.
        storage: Where and how objects are kept: credentials, database, chunk size, caches.
        background: How asynchronous commits run.
        threads: Threads that hash, read and write; else `$CKPTSTORE_THREADS`, else by the
            processors.
        mirror: Another store, to which commits are uploaded in the background.

    Returns:
        The store. Close it, or use it as a context manager.

    Raises:
        NotFound: There is no store.
        InvalidInput: `place` holds something else, a store of a newer format, or one that was made
            with another codec or chunk size than `storage` asks for.
        Corrupt: `ckptstore.json` is damaged.
        ReadOnly, Unavailable: The store cannot be made.

    Example:
        >>> store = ckptstore.open("checkpoints", run="pretrain", threads=8)
    """
    _refuse_misplaced(misplaced)
    storage = storage or Storage()
    settings = _settings(storage, background, threads, run, create, read_only)
    if mirror is None:
        handle = _open_or_make(place, settings, storage)
        return Store(handle, settings, background=background)
    there = mirror if isinstance(mirror, Mirror) else Mirror(mirror)
    if storage.chunk_bytes is None and storage.codec is None:
        settings = _like_mirror(settings, there)
    handle = _open_or_make(place, settings, storage)
    if read_only:
        return Store(handle, settings, background=background)
    return Store(handle, settings, _tier(place, settings, there), background)


def _refuse_misplaced(given: Mapping[str, object]) -> None:
    """Raise `InvalidInput` for a field of a group of arguments that was given as an argument."""
    groups = (("storage", Storage), ("background", Async))
    for name in given:
        where = [f"{arg}={group.__name__}" for arg, group in groups if name in group.__slots__]
        if not where:
            raise TypeError(f"open() has no argument {name!r}")
        raise InvalidInput(f"{name} is given in a group: open(…, {where[0]}({name}=…))")


def _settings(
    storage: Storage,
    background: Async | None,
    threads: int | None = None,
    run: str | None = None,
    create: bool = True,
    read_only: bool = False,
) -> Settings:
    behind = background or Async()
    return Settings.of(
        run=run,
        create=create,
        read_only=read_only,
        threads=threads,
        storage_options=storage.options if storage.options is None else dict(storage.options),
        index=storage.index,
        chunk_bytes=storage.chunk_bytes,
        codec=storage.codec,
        private=storage.private,
        on_full=storage.on_full,
        direct_io=storage.direct_io,
        read_cache_bytes=storage.read_cache_bytes,
        patch_memory_bytes=storage.patch_memory_bytes,
        executor=behind.executor,
        max_in_flight=behind.max_in_flight,
        staging_bytes=behind.staging_bytes,
    )


def _tier(place: str | os.PathLike[str], settings: Settings, mirror: Mirror) -> Tier:
    there = os.fspath(mirror.place)
    return Tier(
        StoreHandle(place, storage_options=settings.storage_options, index=settings.index),
        # It is opened later, when the working directory may be another one.
        there if "://" in there else str(Path(os.path.expanduser(there)).absolute()),
        keep=mirror.policies,
        every_steps=mirror.every_steps,
        leads=leads_all(),
        storage_options=mirror.storage.options,
        index=mirror.storage.index,
    )


def _like_mirror(settings: Settings, mirror: Mirror) -> Settings:
    """Settings of a new store with the chunks and codec of `mirror`, if that exists."""
    try:
        with other_end(
            mirror.place,
            read_only=True,
            storage_options=mirror.storage.options,
            index=mirror.storage.index,
        ) as there:
            return settings.model_copy(
                update={"chunk_bytes": there.config.chunk_bytes, "codec": there.config.codec}
            )
    except (NotFound, Unavailable):
        return settings


@public_call
def clone(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    run: str | None = None,
    verify: bool = False,
    storage: Storage | None = None,
    to_storage: Storage | None = None,
    progress: Progress = silent,
) -> Store:
    """Make a store at `to` with every commit and tag of the one at `source`, and open it for `run`.

    Repeat an interrupted clone to complete it. `storage` is that of `source`, `to_storage` that of
    `to`. Raises as `Store.pull`.
    """
    there, here = storage or Storage(), to_storage or Storage()
    settings = _settings(here, None, run=run)
    with (
        other_end(
            source, read_only=True, storage_options=there.options, index=there.index
        ) as origin,
        ExitStack() as undo,
    ):
        with other_end(to, like=origin, storage_options=here.options, index=here.index):
            pass  # made
        handle = StoreHandle(to, storage_options=settings.storage_options, index=here.index)
        store = undo.enter_context(Store(handle, settings))
        mirror(
            origin,
            handle,
            all_commits(origin.log.replay()),
            MirrorOptions(verify=verify, holds=True),
            internals_of(store).threads,
            progress=progress,
        )
        undo.pop_all()
        return store


def _open_or_make(place: str | os.PathLike[str], settings: Settings, asked: Storage) -> StoreHandle:
    def opened() -> StoreHandle:
        handle = StoreHandle(
            place,
            read_only=settings.read_only,
            storage_options=settings.storage_options,
            direct_io=settings.direct_io,
            index=settings.index,
            read_cache_bytes=settings.read_cache_bytes,
            patch_memory_bytes=settings.patch_memory_bytes,
        )
        _check_as_made(handle, asked)
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


def _check_as_made(handle: StoreHandle, asked: Storage) -> None:
    """Raise `InvalidInput` if a store was not made as `asked`."""
    for name, wanted in (("codec", asked.codec), ("chunk_bytes", asked.chunk_bytes)):
        made = getattr(handle.config, name)
        if wanted not in (None, made):
            handle.close()
            raise InvalidInput(
                f"{handle.url} was made with {name}={made!r}, which stays; wanted {wanted!r}: "
                f"leave {name} out, or make another store with it and `ckptstore push` the "
                "commits there"
            )


@public_call
def open_pointer(
    path: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    threads: int | None = None,
) -> Snapshot:
    """Open the commit that the pointer file at `path` names, in the store that it names, read-only.

    Use it as a context manager, or call `close`: it closes the store. The options are those of
    `ckptstore.open`. If the store is open already, use `store.checkout(path)`: a path can stand for
    any ref.

    Raises `NotFound` if there is no such file, store or commit, `InvalidInput` if the file is not a
    pointer file.
    """
    return open_commit(read_pointer(path), path, storage=storage, threads=threads)


def open_commit(
    pointer: Pointer,
    name: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    threads: int | None = None,
) -> Snapshot:
    """As `open_pointer`, for a pointer that was read already; `name` says in errors where it came
    from."""
    with ExitStack() as undo:
        try:
            place = pointer.store
            store = open(place, create=False, read_only=True, storage=storage, threads=threads)
            undo.callback(store.close)
            snapshot = store.checkout(pointer.id)
        except NotFound as error:
            raise pointer.without_store(name, error) from error
        contents_of(snapshot).on_close = store.close
        undo.pop_all()
        return snapshot


@public_call
def write_pointer(path: str | os.PathLike[str], store: Store, ref: AnyRef = "latest") -> Snapshot:
    """Make the file at `path` name the commit `ref` of `store`, and return that commit. An existing
    pointer file is replaced atomically.

    The file does not protect the commit from `forget`; a tag does. Raises as `Store.checkout` does,
    `Conflict` if `path` is something else, `InvalidInput` for a store that is only in memory or
    whose URL has secrets in it.
    """
    snapshot = store.checkout(ref)
    write_file(path, Pointer(store.url, snapshot.id))
    return snapshot
