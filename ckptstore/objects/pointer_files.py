"""A pointer file: a small JSON file, anywhere, that means one commit of one store.

    {"ckptstore_pointer": 1, "store": "..", "commit": "91bc…"}

The pointer of a hollow directory (`plugins.adopt.hollow`) has a "hold", too: the random id of that
directory and its copies, under which the store keeps the commit.

A directory may stand for its pointer: scripts expect a checkpoint to be one. The pointer then has
the file name of that library's metadata, so that programs that look for this file find it. A hollow
directory (`plugins.adopt.hollow`) keeps some files, and a pointer under a name of its own.

`store` is a bucket's URL, or a directory: relative to the pointer's own where the pointer lies in
the store or beside it, so that both can be moved together. Scripts may list, copy and delete
pointers as if they were checkpoints; the commit is not changed by that.

The content of a pointer is foreign input: it may have come with a download. It is read only from a
regular file that is no symbolic link, its commit is an id, which is a hash and cannot mean another
commit, and its store can only be a directory or a bucket.
"""

import json
import os
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from ckptstore.core.ids import CommitId, HoldId, parse_commit_id, parse_hold_id
from ckptstore.core.paths import check_path, make_directories, scratch_for, sync_path, write_file
from ckptstore.core.text import redact
from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.objects.canonical import decode, field

VERSION = 1
DIRECTORY_POINTERS = (".metadata", ".snapshot_metadata")
"""The names of a pointer in a directory that stands for it: as DCP's metadata, and as
TorchSnapshot's."""
HOLLOW_POINTER = "ckptstore-pointer.json"
"""The name of the pointer in a directory whose other files are in its commit."""
POINTER_BYTES_MAX = 16 << 10

_MARK = "ckptstore_pointer"
_URL = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|hosts)://[^\s:@?#]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Commit `id` of the store at `store`, an absolute path or a URL. `hold` is the id of a hollow
    directory; other pointers have none."""

    store: str
    id: CommitId
    hold: HoldId | None = None

    def is_in(self, store: str) -> bool:
        """Whether this is a commit of the store at `store`, whichever links lead there."""
        if "://" in store:
            return self.store == store
        return os.path.realpath(self.store) == os.path.realpath(store)

    def without_store(self, path: str | os.PathLike[str], error: NotFound) -> NotFound:
        """The error for a pointer at `path` whose store or commit does not exist."""
        return NotFound(
            f"{os.fspath(path)} points to commit {self.id[:12]} in {self.store}: {error}. If the "
            "pointer or its store was copied or moved "
            "without the other, ckptstore.write_pointer(path, store, ref) makes it anew"
        )


def pointer_file(path: str | os.PathLike[str]) -> Path:
    """The pointer file for `path`: the one in that directory, else the path itself."""
    place = Path(path)
    names = (HOLLOW_POINTER, *DIRECTORY_POINTERS) if place.is_dir() else ()
    return next((place / name for name in names if os.path.lexists(place / name)), place)


def read_pointer(path: str | os.PathLike[str]) -> Pointer:
    """The pointer at `path`, or in the directory there. Raises `NotFound` if nothing is there,
    `InvalidInput` for any other file, `Unavailable` if it cannot be read."""
    check_path(Path(path))
    place = pointer_file(path)
    try:
        return _decoded(_read(place), str(place), place)
    except InvalidInput as error:
        if place == Path(path):
            raise
        raise InvalidInput(
            f"{error}; what other libraries wrote comes into one by `ckptstore import`"
        ) from error


def decode_pointer(data: bytes, name: str) -> Pointer:
    """The pointer in the content of a file called `name` that is on no disk of this host. Raises
    `InvalidInput` for anything else."""
    return _decoded(data, name, None)


def _decoded(data: bytes, name: str, place: Path | None) -> Pointer:
    if len(data) > POINTER_BYTES_MAX:
        raise InvalidInput(
            f"{name} is too large for a pointer file; `ckptstore import` reads checkpoints"
        )
    try:
        document = decode(data)
        version = field(document, _MARK, int)
        if version != VERSION:
            raise InvalidInput(
                f"{name} is a pointer file of version {version}, this ckptstore reads {VERSION}: "
                "install a newer one"
            )
        hold = document.get("hold")
        return Pointer(
            _place_of(field(document, "store", str), place),
            parse_commit_id(document.get("commit")),
            None if hold is None else parse_hold_id(hold),
        )
    except Corrupt as error:
        problem = str(error).removesuffix("; run `ckptstore fsck`")
        raise InvalidInput(
            f"{name} is no pointer file of ckptstore: {problem}; if it was one, remove it: its "
            "commit is in `ckptstore log`"
        ) from error


def is_pointer(path: str | os.PathLike[str]) -> bool:
    """Whether `path`, or the directory there, has a readable pointer file."""
    try:
        read_pointer(path)
    except (CkptStoreError, ValueError):
        return False
    return True


def write_pointer(path: str | os.PathLike[str], pointer: Pointer) -> None:
    """Make the file at `path` mean `pointer`, durably, at once; directories above it are made if
    need be.

    A pointer file that is there is replaced, or the one in the directory there. A hollow directory
    keeps its hold. Raises `Conflict` for anything else that is there, and for a hollow directory of
    another commit; `InvalidInput` for a store whose URL has secrets in it or is no bucket's,
    `ReadOnly` or `Unavailable` if the file cannot be written.
    """
    check_path(path)
    place = pointer_file(path)
    if os.path.lexists(place):
        if not is_pointer(place):
            raise Conflict(
                f"{place} is there and is no pointer file; choose another path, or remove it"
            )
        before = read_pointer(place)
        if before.hold and pointer.hold is None:
            if before.id != pointer.id:
                raise Conflict(
                    f"{place.parent} is a hollow directory of commit {before.id[:12]}, whose files "
                    f"a pointer to {pointer.id[:12]} would lose; materialize it first, or choose "
                    "another path"
                )
            pointer = replace(pointer, hold=before.hold)
    try:
        make_directories(place.parent)
        data = encode_pointer(pointer, place)
        with scratch_for(place) as new:
            write_file(new, data)
            sync_path(new)
            new.replace(place)  # a symbolic link that has appeared is replaced, not followed
        sync_path(place.parent)
    except OSError as error:
        kind = ReadOnly if isinstance(error, PermissionError) else Unavailable
        raise kind(f"cannot write the pointer file {place}: {error.strerror or error}") from error


def encode_pointer(pointer: Pointer, place: Path | None = None) -> bytes:
    """The content of a pointer file at `place`; without a place, one that may lie anywhere.

    Raises `InvalidInput` for a store whose URL has secrets in it or is no bucket's.
    """
    document = {
        _MARK: VERSION,
        "store": _name_of(pointer.store, place),
        "commit": parse_commit_id(pointer.id),
        **({"hold": pointer.hold} if pointer.hold else {}),
    }
    return json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"


def check_nameable(store: str) -> None:
    """Raise `InvalidInput` for a store that no pointer file can name, before anything is made that
    would need one."""
    _name_of(store, None)


def _read(place: Path) -> bytes:
    try:
        # Not blocking: the path may be a pipe that nobody writes to.
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidInput(
                    f"{place} is no file, so no pointer file; a store is opened by "
                    "ckptstore.open, what other libraries wrote comes into one by `ckptstore "
                    "import`"
                )
            data = os.read(fd, POINTER_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"no pointer file at {place}; `ckptstore log` lists the commits of a store"
        ) from error
    except OSError as error:
        if place.is_symlink():
            raise InvalidInput(
                f"{place} is a symbolic link, which is not followed; name the pointer file itself"
            ) from error
        raise Unavailable(f"cannot read the pointer file {place}: {error.strerror}") from error
    return data


def _place_of(store: str, pointer: Path | None) -> str:
    """The store that the pointer file at `pointer` names; None is a place without directories."""
    if not store or _CONTROL.search(store):
        raise Corrupt(f"its store {store[:80]!r} is no place")
    if "://" not in store:
        if pointer is None and not os.path.isabs(store):
            raise Corrupt(f"its store {store[:80]!r} is not an absolute path")
        directory = Path(os.path.realpath(pointer.parent)) if pointer else Path("/")
        return os.path.normpath(directory / store)
    if not _URL.fullmatch(store) or ".." in store.split("/"):
        raise Corrupt(f"its store {redact(store)[:80]!r} is no directory, bucket or hosts://")
    return store


def _name_of(store: str, pointer: Path | None) -> str:
    """The inverse of `_place_of`."""
    if "://" in store:
        if not _URL.fullmatch(store):
            raise InvalidInput(
                f"{redact(store)} cannot stand in a pointer file: wanted a directory, a bucket or "
                "hosts://, without secrets"
            )
        return store
    root = Path(os.path.realpath(store))
    if pointer is None:
        return str(root)
    directory = Path(os.path.realpath(pointer.parent))
    together = directory.is_relative_to(root) or (
        root.parent != root.parent.parent and directory.is_relative_to(root.parent)
    )
    return os.path.relpath(root, directory) if together else str(root)
