"""Where does the pointer of a checkpoint lie: on a disk of this host, or at a URL?

Lightning takes URLs (`s3://…`) where it takes paths, through fsspec. A pointer there is an object
of some hundred bytes; the commit is in the store.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptStoreError, Conflict
from ckptstore.plugin.files import make_directories, sync_path
from ckptstore.plugin.pointers import (
    POINTER_BYTES_MAX,
    Pointer,
    decode_pointer,
    encode_pointer,
    is_pointer,
    pointer_file,
    read_pointer,
    write_pointer,
)

AnyPath = str | os.PathLike[str]

_BRACE = b"{"
"""How a pointer file begins; no file of `torch.save` does."""


def is_url(path: AnyPath) -> bool:
    return "://" in os.fspath(path)


def place_of(path: AnyPath) -> str:
    """The absolute name of a path; a URL is one. Raises `Conflict` if a directory is there."""
    if is_url(path):
        return os.fspath(path)
    place = os.path.abspath(path)
    if os.path.isdir(place) and not os.path.islink(place):
        raise Conflict(f"{place} is a directory; a checkpoint cannot be saved there")
    make_directories(Path(place).parent)
    return place


def resolved(path: AnyPath) -> str:
    """The name of the file that `path`, perhaps a link, stands for."""
    return os.fspath(path) if is_url(path) else os.path.realpath(path)


def is_pointer_file(path: AnyPath) -> bool:
    """Whether the file at `path` is a pointer, possibly a damaged one, or a link to one."""
    if is_url(path):
        if os.fspath(path).startswith(("http://", "https://")):
            return False  # Lightning downloads such files without fsspec, and saves none there
        with suppress(FileNotFoundError):
            return _content(path, 1)[:1] == _BRACE
        return False
    if not os.path.isfile(path):
        return False
    with Path(path).open("rb") as file:
        return file.read(1) in (_BRACE, b"")


def pointer_of(path: AnyPath) -> Pointer:
    """The pointer at `path`. Raises as `read_pointer` does, `FileNotFoundError` for a URL."""
    if is_url(path):
        return decode_pointer(_content(path, POINTER_BYTES_MAX + 1), os.fspath(path))
    return read_pointer(path)


def pointer_at(path: AnyPath) -> Pointer | None:
    """The pointer at `path`, or in the directory there; None if there is none that can be read."""
    with suppress(CkptStoreError, ValueError, FileNotFoundError):
        return pointer_of(path if is_url(path) else pointer_file(path))
    return None


def publish(place: str, pointer: Pointer) -> None:
    """Make the file at `place` the pointer, whatever it was."""
    if is_url(place):
        files, name = _files(place)
        files.makedirs(os.path.dirname(name), exist_ok=True)
        files.pipe_file(name, encode_pointer(pointer))
    elif os.path.lexists(place) and not is_pointer(place):
        target = Path(place)
        fresh = target.with_name(f".{target.name}.pointer")
        write_pointer(fresh, pointer)
        fresh.replace(target)
        sync_path(target.parent)
    else:
        write_pointer(place, pointer)


def remove(path: AnyPath) -> None:
    """Remove the pointer at `path`, or the directory of one."""
    if is_url(path):
        files, name = _files(path)
        files.rm_file(name)
    elif os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def files_in(directory: AnyPath, suffix: str) -> list[str]:
    """The files in a directory whose names end so; no links."""
    if is_url(directory):
        files, name = _files(directory)
        return [files.unstrip_protocol(path) for path in files.glob(f"{name}/*{suffix}")]
    found = Path(directory).glob(f"*{suffix}")
    return [str(path) for path in found if not path.is_symlink()]


def _content(url: AnyPath, nbytes: int) -> bytes:
    """The first bytes of the file at a URL."""
    files, name = _files(url)
    content: bytes = files.cat_file(name, start=0, end=nbytes)
    return content


def _files(url: AnyPath) -> tuple[Any, str]:
    """The file system of a URL, and the name of the URL's file there."""
    from fsspec.core import url_to_fs

    files, name = url_to_fs(os.fspath(url))
    return files, name
