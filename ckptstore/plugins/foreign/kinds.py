"""Of what kind is a file, by its first bytes, and how is a file of torch.save read without trusting
it?

Tensors and plain values are read, and anything else only if allowed.
"""

import io
import logging
import pickle
import re
import sys
import zipfile
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ckptstore.errors import InvalidInput, Unavailable
from ckptstore.plugin.values import class_name, found_in, is_stateful
from ckptstore.plugins.foreign.magic import (
    GGUF_MAGIC,
    HDF5_MAGIC,
    LEGACY_MAGIC,
    NPY_MAGIC,
    SAFETENSORS_HEADER_BYTES_MAX,
    TAR_MAGIC,
    TAR_MAGIC_AT,
    ZIP_MAGIC,
)
from ckptstore.plugins.foreign.plain_pickles import known_names, outermost, save, settled

_logger = logging.getLogger("ckptstore")


FileKind: TypeAlias = Literal["torch", "files"]
"""What reads a file: torch, or the parsers of an adoption, which run nothing."""

_TORCH_TAR = (b"sys_info\0", b"pickle\0", b"tensors\0", b"storages\0")
"""How files of torch before 0.1.12 begin, which are tar archives."""
_LEGACY_NUMBER = LEGACY_MAGIC[2:]
"""What is the same in all protocols of the pickle with which files of torch before 1.6 begin."""

_HEAD_BYTES = 512
_READ = (
    "safetensors, torch.save (also TorchScript), .npy, .npz, GGUF, HDF5, .keras, .onnx, .nemo, or "
    "a directory"
)


def file_kind(path: Path) -> FileKind:
    """The kind of the file at `path`, by its first bytes; its name is ignored. Raises
    `InvalidInput`, which describes the file, if no reader here can read it."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise Unavailable(
            f"cannot read {path}: {error.strerror}; see that it may be read, then repeat"
        ) from error
    if head.startswith(ZIP_MAGIC):
        return _archive_kind(path)
    if head[TAR_MAGIC_AT:].startswith(TAR_MAGIC):
        return "torch" if head.startswith(_TORCH_TAR) else "files"
    if _LEGACY_NUMBER in head[:32]:
        return "torch"
    if _is_pickle(head):
        raise InvalidInput(
            f"{path} is a pickle that torch.save did not write; where you trust it, load it with "
            f"Python's pickle and commit the state. `ckptstore adopt {path.parent}` commits the "
            "directory that it is in and runs nothing"
        )
    if head.startswith((NPY_MAGIC, GGUF_MAGIC, HDF5_MAGIC)) or is_safetensors(head):
        return "files"
    raise _unknown(path, _said(head))


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins with `head` has the frame of safetensors."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= SAFETENSORS_HEADER_BYTES_MAX


def _is_pickle(head: bytes) -> bool:
    return len(head) > 1 and head[0] == 0x80 and head[1] <= pickle.HIGHEST_PROTOCOL


def _archive_kind(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise InvalidInput(
            f"{path} begins as a zip archive, as files of torch.save do, but is damaged or cut off "
            f"({error}); copy it again"
        ) from error
    is_script = any(name.endswith("/constants.pkl") for name in names)
    if any(name.endswith("/data.pkl") for name in names) and not is_script:
        return "torch"
    if is_script or any(name.endswith((".npy", ".h5")) for name in names):
        return "files"
    some = ", ".join(names[:3])
    raise _unknown(path, f"a zip archive of other files ({some:.80})")


def _said(head: bytes) -> str:
    """A description of a file of unknown format, for the error."""
    if not head:
        return "empty"
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        text = head[: error.start].decode() if error.start > len(head) - 4 else ""
    if text and "\0" not in text:
        return f"a text file (it begins with {text.splitlines()[0][:40]!r})"
    return f"of a format that import does not know (it begins with the bytes {head[:8].hex(' ')})"


def _unknown(path: Path, what: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is {what}; wanted {_READ}. `ckptstore adopt {path.parent}` commits the directory "
        "that it is in, any file byte for byte"
    )


def load_torch(file: Path | io.BytesIO, name: str, *, allow_pickle: bool) -> Any:
    """The content of a file of torch.save, called `name` in errors.

    Tensors stay in the file until they are read. Exceptions are files of torch before 1.6 and
    compressed archives: their entries are read and compared with their checksums. Values that a
    commit stores as they are (dates, paths, arrays, generators) count as plain, and so do classes
    that the caller registered, here or with torch. Raises `InvalidInput` for other objects, unless
    `allow_pickle`, and for a damaged or foreign file; `Unavailable` for one that may not be read.
    """
    try:
        mapped = isinstance(file, Path) and _may_be_mapped(file)
        if allow_pickle:
            loaded = _load(file, mapped=mapped, weights_only=False)
            _tell_of_objects(name, loaded)
            return loaded
        return settled(_load_plain(file, mapped=mapped))
    except InvalidInput as error:
        raise InvalidInput(f"{name} is damaged or forged: {error}") from error
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise InvalidInput(f"{name} is not a file of torch.save: {error}") from error
        raise InvalidInput(f"{name} {_refusal(file, str(error))}") from error
    except PermissionError as error:
        raise Unavailable(
            f"cannot read {name}: {error}; see that it may be read, then repeat"
        ) from error
    except (ImportError, AttributeError) as error:  # a pickled class, which is imported by name
        raise InvalidInput(
            f"{name} holds objects of a class that cannot be imported here "
            f"({_first_line(str(error))}); install its package or put its folder on PYTHONPATH, or "
            "save tensors and plain values where it can be imported: "
            "torch.save(model.state_dict(), …)"
        ) from error
    except Exception as error:  # a pickle may raise anything
        raise InvalidInput(
            f"{name} is not a file of torch.save, or is damaged: {_first_line(str(error))}"
        ) from error


def _tell_of_objects(name: str, loaded: Any) -> None:
    """Log which objects of a file are committed as their state dict, so that the object itself is
    in no export."""
    found = [(keys, type(each)) for keys, each in found_in(loaded, is_stateful)]
    if found:
        keys, cls = found[0]
        where = f"{'/'.join(map(str, keys))} in {name}" if keys else name
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        _logger.warning(
            "%s is a %s%s: its state_dict() is committed, and that is what an export has",
            where,
            class_name(cls),
            more,
        )


def check_comes_back(file: Path | io.BytesIO, state: Any, path: str = "") -> None:
    """Raise `InvalidInput` unless `load_torch` reads `file`, to which the state at `path` was
    written, without trust in it."""
    try:
        load_torch(file, "the export", allow_pickle=False)
    except InvalidInput as error:
        found = outermost(state, path)
        where = next((at for at, value in found if not _comes_back(value)), path or "the state")
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise InvalidInput(
                f"{where} cannot be written: torch.load does not read what torch.save makes of it "
                f"({error.__cause__!s:.200}); choose the rest with --select (select=…)"
            ) from error
        raise InvalidInput(
            f"`ckptstore import` would not read {where} from this format without --allow-pickle; "
            "choose the rest with --select (select=…), or give --allow-pickle (allow_pickle=True) "
            "here too"
        ) from error


def _comes_back(value: Any) -> bool:
    data = io.BytesIO()
    save(value, data)
    data.seek(0)
    try:
        load_torch(data, "it", allow_pickle=False)
    except InvalidInput:
        return False
    return True


def _refusal(file: Path | io.BytesIO, message: str) -> str:
    """The error for objects that torch reads only from trusted files, with the caller's options."""
    named = _NAMED.search(message)
    what = (
        f"holds a {named[1]}, and reading it would run code that the file names"
        if named
        else "is read by Python's own unpickler alone, which runs code that a file names "
        f"({_first_line(message.rpartition('error: ')[2])})"
    )
    directory = str(file.parent) if isinstance(file, Path) else "DIRECTORY"
    return (
        f"{what}. `ckptstore adopt {directory}` commits the directory of the file as it is, its "
        "tensors as leaves, and runs nothing; if you trust the file, import it with --allow-pickle "
        "(allow_pickle=True)"
    )


_NAMED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
"""A name in torch's messages about what it does not read."""


def _load_plain(file: Path | io.BytesIO, *, mapped: bool) -> Any:
    """Load as torch does. If torch refuses a name, load again with records in place of known
    values."""
    try:
        return _load(file, mapped=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        if not _NAMED.search(str(error)):
            raise
    if isinstance(file, io.BytesIO):
        file.seek(0)
    with known_names():
        return _load(file, mapped=mapped, weights_only=True)


def _load(file: Path | io.BytesIO, *, mapped: bool, weights_only: bool) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped)
    except RuntimeError as error:
        if mapped and "mmap can only be used with files saved with" in str(error):
            return _load(file, mapped=False, weights_only=weights_only)
        raise
    except pickle.UnpicklingError as error:
        needed = [
            name
            for text, names in _NEEDED.items()
            if text in str(error)
            for name in names
            if name not in sys.modules
        ]
        if not needed:
            raise
        for name in needed:
            import_module(name)
        if isinstance(file, io.BytesIO):
            file.seek(0)
        return _load(file, mapped=mapped, weights_only=weights_only)


_NEEDED = {
    "``torch.nested`` and ``torch._dynamo`` must be imported": (
        "torch._dynamo",
        "torch.nested._internal.nested_tensor",
    ),
    "``torch.distributed.tensor`` must be imported": ("torch.distributed.tensor",),
}
"""What torch must have imported to read tensors of a kind, by its message. To import them always
would take a second."""


def _may_be_mapped(file: Path) -> bool:
    """Whether every entry is stored uncompressed: torch maps entries without checking their
    compression.
    """
    if not zipfile.is_zipfile(file):
        return True  # torch raises its own error
    try:
        with zipfile.ZipFile(file) as archive:
            stored = all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())
            damaged = None if stored else archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"its archive cannot be read: {error}") from error
    if damaged is not None:
        raise ValueError(f"its entry {damaged[:80]!r} does not match its checksum")
    return stored


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:200]
