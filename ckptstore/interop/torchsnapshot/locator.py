"""What the path of a snapshot means: a store, a tag in it, and a pointer file at the path itself
(docs/decisions/018-…).

The store of `dir/name` is the nearest one that encloses it (`core.paths.search`). Otherwise a new
store is made at `dir`, at `dir/.ckptstore` if `dir` contains other files, or at
`dir/name/.ckptstore` if others may write to `dir`. The snapshot is a commit with the tag `name`. In
a bucket there is no pointer, only the tag.

Stores stay open for later snapshots of the process: staging memory, chunk index and log pay from
the second commit on. A store that was removed, or made anew in the same place, is closed.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptstore import Storage, Store
from ckptstore import open as open_store
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, InvalidInput, NotFound, ReadOnly
from ckptstore.plugin.files import (
    BESIDE,
    SAFE,
    base_of,
    distrust,
    is_alone,
    make_directories,
    rights,
    search,
)
from ckptstore.plugin.model import CONFIG_KEY, ROOT_ENTRIES, CommitId, check_tag, digest
from ckptstore.plugin.pointers import DIRECTORY_POINTERS, Pointer, is_pointer, read_pointer
from ckptstore.plugin.storage import open_storage
from ckptstore.plugin.text import redact
from ckptstore.plugin.work import forks
from ckptstore.plugins.foreign.loaded import SNAPSHOT_METADATA

logger = logging.getLogger("ckptstore")

_LOCAL = ("fs", "file", "")
_UNSAFE = re.compile(r"[^A-Za-z0-9_./-]|(?<=\.)\.|(?<=/)/")
_TAG_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot's store, a path or a URL; its tag; and the path of its pointer file, None in a
    bucket.
    """

    store: str
    tag: str
    pointer: str | None


def place_to_take(path: str, storage_options: Mapping[str, Any] | None = None) -> SnapshotRef:
    """The place for a new snapshot at this path. Its parent directory is created; the store and the
    pointer are not.

    Raises `Conflict` if another file is at the path. Raises `InvalidInput` for a path that is a
    store, that is among a store's own files, that is below a store which other users could have
    made, or where a new store would be writable by others. Raises `ReadOnly` if a directory cannot
    be made.
    """
    local = local_path(path)
    if local is None:
        return _in_bucket(path, storage_options)
    if (local / CONFIG_KEY).is_file():
        raise InvalidInput(f"{path} is a store; name the snapshot: {os.path.join(path, 'NAME')}")
    pointer = _pointer(local)
    if os.path.lexists(pointer) and not is_pointer(pointer):
        raise Conflict(
            f"{pointer} is there and is not a snapshot of ckptstore; choose another "
            "path, or remove it"
        )
    if (store := _store_above(local)) is None:
        store = _new_store(local)
        pointer = _pointer(local)  # a new store may be inside the path, which is then a directory
    return SnapshotRef(str(store), tag_of(_name(local, store)), str(pointer))


def find_snapshot(
    path: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[str, CommitId]:
    """The store and the commit of an existing snapshot.

    A path may also lead into a store of the native interface: `STORE/REF`, or `STORE` for the
    newest commit. Raises `NotFound` if no store encloses the path, `InvalidInput` for any other
    file or directory.
    """
    local = local_path(path)
    if local is None:
        place = _in_bucket(path, storage_options)
        return _first(path, place.store, storage_options, place.tag, path[len(place.store) + 1 :])
    if (local / CONFIG_KEY).is_file():
        return _first(path, str(local), storage_options, "latest")
    if os.path.lexists(pointer := _pointer(local)):
        found = _pointed_to(pointer)
        try:
            return found.store, store_at(found.store, storage_options).checkout(found.id).id
        except NotFound as error:
            raise found.without_store(path, error) from error
    store = _store_above(local)
    if store is None:
        raise NotFound(f"there is no snapshot at {path}, and no store above it; check the path")
    name = _name(local, store)
    return _first(path, str(store), storage_options, tag_of(name), name)


def _first(
    path: str, place: str, storage_options: Mapping[str, Any] | None, *refs: str
) -> tuple[str, CommitId]:
    """The commit of the first of `refs` that the store has."""
    store = store_at(place, storage_options)
    for ref in refs[:-1]:
        with suppress(NotFound):
            return place, store.checkout(ref).id
    try:
        return place, store.checkout(refs[-1]).id
    except CkptStoreError as error:
        raise NotFound(f"there is no snapshot at {path}: {error}") from error


def local_path(path: str) -> Path | None:
    """The absolute local path of `path`, None for a URL of a bucket."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme not in _LOCAL:
        return None
    return Path(os.path.abspath(rest if separator else path))


def tag_of(name: str) -> str:
    """The tag for a snapshot's name, different for every name. A name that is a valid tag without
    `+` is its own tag.
    """
    escaped = _UNSAFE.sub(lambda found: "".join(f"+{byte:02X}" for byte in found[0].encode()), name)
    if (
        not re.match(r"[A-Za-z0-9_]", escaped)
        or escaped == "latest"
        or escaped.isdecimal()
        or escaped.startswith("snapshot/")
    ):
        escaped = f"snapshot/{escaped}"
    if len(escaped) > _TAG_CHARACTERS:
        escaped = f"snapshot/{digest(name.encode()).hex()}"
    return check_tag(escaped)


def _pointer(local: Path) -> Path:
    """The path of a snapshot's pointer: in a directory of its own, it has the name of
    TorchSnapshot's metadata.
    """
    names = [
        name for name in (SNAPSHOT_METADATA, *DIRECTORY_POINTERS) if is_pointer(local / name)
    ]  # perhaps a pointer of the DCP interface
    return local / (names or [SNAPSHOT_METADATA])[0] if local.is_dir() else local


def _store_above(local: Path) -> Path | None:
    """The store that encloses a path. Raises `Corrupt` for one without a configuration: a second
    store there would split the history.
    """
    found = search(local)
    for directory in found.passed:
        for place in (directory, directory / BESIDE):
            if all((place / name).is_dir() for name in ("log", "packs", "commits")):
                raise Corrupt(
                    f"{place} has a log and no {CONFIG_KEY}: it was a store and lost that file; "
                    f"`ckptstore --store {place} repair` writes it again"
                )
    return found.store


def _pointed_to(pointer: Path) -> Pointer:
    try:
        return read_pointer(pointer)
    except InvalidInput as error:
        if pointer.name != SNAPSHOT_METADATA:
            raise
        raise InvalidInput(
            f"{pointer.parent} is a directory that TorchSnapshot wrote, not a snapshot of "
            f"ckptstore: `ckptstore import {pointer.parent} "
            f"--tag {tag_of(pointer.parent.name)}` brings it into a store"
        ) from error


def _new_store(local: Path) -> Path:
    """The path for a new store if none encloses the snapshot's: its parent directory if only this
    user can write to it, else the path itself, which is created.
    """
    directory = local.parent
    try:
        make_directories(directory)
        if is_alone(directory):
            holds_others = next(directory.iterdir(), None) is not None
            return directory / BESIDE if holds_others else directory
        if not local.is_dir():
            local.mkdir(mode=rights(directory) & ~0o022)
            logger.warning(
                "%s: the snapshot %s is a store of its own, which shares nothing with others; list "
                "the directory in $%s to share one store",
                distrust(directory),
                local,
                SAFE,
            )
    except OSError as error:
        raise ReadOnly(
            f"cannot make a store for the snapshot {local}: {error.strerror}; choose another path"
        ) from error
    if is_alone(local):
        return local / BESIDE
    raise InvalidInput(
        f"no store is made for the snapshot {local}, because {distrust(local)}, and so could "
        "change it; choose a path in a directory of "
        f"your own, or list one that you share in ${SAFE}"
    )


def _name(local: Path, store: Path) -> str:
    base, real = Path(os.path.realpath(base_of(store))), Path(os.path.realpath(local))
    if base == real:
        return local.name
    name = real.relative_to(base)
    if base == store and name.parts[0] in ROOT_ENTRIES:
        raise InvalidInput(
            f"{local} is the store's own; snapshots in {store} cannot be called "
            f"{', '.join(sorted(ROOT_ENTRIES))}"
        )
    return name.as_posix()


def _in_bucket(path: str, storage_options: Mapping[str, Any] | None) -> SnapshotRef:
    parts = path.rstrip("/").split("/")
    if len(parts) < 5 or not all(parts[3:]):
        raise InvalidInput(
            f"{redact(path)} is not the path of a snapshot in a bucket; wanted "
            f"{parts[0]}//BUCKET/PREFIX/NAME"
        )
    for store, name in _above(parts):
        with closing(
            open_storage(store, read_only=True, storage_options=dict(storage_options or {}) or None)
        ) as storage:
            if storage.size(CONFIG_KEY) is not None:
                return SnapshotRef(store, tag_of(name), None)
    return SnapshotRef("/".join(parts[:-1]), tag_of(parts[-1]), None)


def _above(parts: list[str]) -> Iterator[tuple[str, str]]:
    """Every prefix that could be the path's store, the nearest first, and the name within it."""
    for length in range(len(parts) - 1, 3, -1):
        yield "/".join(parts[:length]), "/".join(parts[length:])


class _Open(NamedTuple):
    """An open store; `identity` is that of its configuration file when it was opened."""

    store: Store
    identity: tuple[int, ...] | None


_open: dict[tuple[int, str, str], _Open] = {}
_lock = forks.lock()


def store_at(
    place: str, storage_options: Mapping[str, Any] | None = None, *, create: bool = False
) -> Store:
    """The store at `place`, opened once per process; `create` makes a missing one. Raises like
    `ckptstore.open`.
    """
    key = (os.getpid(), place, repr(sorted((storage_options or {}).items())))
    with _lock:
        _release()
        known = _open.get(key)
        if known is None:
            store = open_store(place, create=create, storage=Storage(options=storage_options))
            known = _open[key] = _Open(store, _identity(place))
        return known.store


def _release() -> None:
    """Close stores that are no longer in their place. A forked child leaves its parent's stores
    alone.
    """
    for key, (store, identity) in list(_open.items()):
        pid, place, _ = key
        if pid == os.getpid() and identity != _identity(place):
            del _open[key]
            with suppress(CkptStoreError):
                store.close()


def _identity(place: str) -> tuple[int, ...] | None:
    if "://" in place:
        return None
    try:
        status = (Path(place) / CONFIG_KEY).stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns
