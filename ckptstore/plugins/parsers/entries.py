"""Where in a file do its tensors lie? A parser for each format, chosen by a file's first bytes.

A parser reads a window and returns entries, by their bytes in the window. It may raise anything for
a file of another format or a damaged one: such a file has no tensors.
"""

import ast
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod

from ckptstore.plugin.model import WIDTHS, Shape
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
from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.parsers.archives import MEMBERS_MAX, tar_members, zip_members
from ckptstore.plugins.parsers.gguf import gguf_entries
from ckptstore.plugins.parsers.hdf5 import hdf5_entries
from ckptstore.plugins.parsers.onnx_files import onnx_entries
from ckptstore.plugins.parsers.pickle_ops import TooLarge, counts_of
from ckptstore.plugins.parsers.safetensors_header import (
    LENGTH_BYTES,
    parse_header,
)
from ckptstore.plugins.parsers.torch_files import (
    legacy_torch,
    torch_archive,
)

logger = logging.getLogger("ckptstore")

ENTRIES_MAX = 1 << 20
_ELEMENTS_MAX = 1 << 53
"""The dimensions of an empty tensor have no bytes that would limit them: the manifest and torch do.
"""
_NAME_MAX = 2000
_NPY_HEADER_MAX = 1 << 16
_ONNX_BEGIN = b"\x08"
"""The number of the field that a model begins with; what follows must then be one to the end."""
_NUMPY = {
    "|b1": "bool",
    "|u1": "uint8",
    "|i1": "int8",
    "<u2": "uint16",
    "<i2": "int16",
    "<u4": "uint32",
    "<i4": "int32",
    "<u8": "uint64",
    "<i8": "int64",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<c8": "complex64",
    "<c16": "complex128",
}


def entries_of(file: Window, where: str) -> list[Entry]:
    """The tensors in a file, in order of their bytes. Empty for a file of no known format, for one
    that is damaged, for one whose tensors overlap, and with a warning that names `where`, for one
    that is too large to look into."""
    try:
        return checked(_parse(file, inner=False), file.size)
    except TooLarge as error:
        logger.warning("%s is kept as bytes, without tensors: %s", where, error)
        return []
    except Exception:  # a forged file may raise anything, and is kept as bytes
        return []


def _parse(file: Window, *, inner: bool) -> list[Entry]:
    """The tensors in a file, or in the file that an archive has as its member (`inner`)."""
    head = file.read_at(0, min(file.size, TAR_MAGIC_AT + len(TAR_MAGIC)))
    if head.startswith(ZIP_MAGIC):
        members = zip_members(file)
        if any(name.endswith("/data.pkl") for name in members):
            return torch_archive(file, members)
        return _npz(file, members) or _members(file, members, inner=inner)
    if head.startswith(LEGACY_MAGIC):
        return legacy_torch(file)
    if head.startswith(NPY_MAGIC):
        return _npy(file, "array")
    if head.startswith(GGUF_MAGIC):
        return gguf_entries(file)
    if head.startswith(HDF5_MAGIC):
        return hdf5_entries(file)
    if head[TAR_MAGIC_AT:] == TAR_MAGIC:
        return _members(file, tar_members(file), inner=inner)
    if head[8:9] == b"{":
        return _safetensors(file)
    if head[:1] == _ONNX_BEGIN:
        return onnx_entries(file).get("", [])
    return []


def checked(entries: Iterable[Entry], size: int) -> list[Entry]:
    """Entries in order, under names that differ and that a commit can hold. Raises `ValueError`
    if they overlap, exceed `size`, or are not as long as their shapes say."""
    found: list[Entry] = []
    end = 0
    names: set[tuple[str, Shape | None]] = set()
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if not (end <= entry.start <= entry.stop <= size and len(entry.shape) <= 64):
            raise ValueError(f"{entry.name[:80]!r} overlaps another tensor, or lies outside")
        if prod(max(1, sum(ends)) for ends in zip(*entry.box, strict=True)) > _ELEMENTS_MAX:
            raise ValueError(f"{entry.name[:80]!r} has a shape that no tensor has")
        if entry.dtype not in WIDTHS or entry.nbytes != entry.stop - entry.start:
            raise ValueError(f"{entry.name[:80]!r} is not as long as its shape says")
        name = entry.name[:_NAME_MAX].encode("utf-8", "replace").decode()
        if (name, entry.saved_offsets) in names:
            name = f"{name}~{len(names)}"
        names.add((name, entry.saved_offsets))
        found.append(replace(entry, name=name))
        end = entry.stop
        if len(found) > ENTRIES_MAX:
            raise TooLarge(f"it has more than {ENTRIES_MAX:,} tensors")
    if len(names) != len(found):
        raise ValueError("two tensors have one name")
    return found


def _safetensors(file: Window) -> list[Entry]:
    length = int.from_bytes(file.read_at(0, LENGTH_BYTES), "little")
    if length > SAFETENSORS_HEADER_BYTES_MAX:
        return []
    header = parse_header(file.read_at(0, LENGTH_BYTES + length), "the file")
    if len(header.raw) + header.data_bytes != file.size:
        return []
    return [moved(entry, len(header.raw)) for entry in header.entries]


def moved(entry: Entry, by: int, prefix: str = "") -> Entry:
    start, stop = entry.start + by, entry.stop + by
    return replace(entry, name=prefix + entry.name, start=start, stop=stop)


def _npy(file: Window, name: str) -> list[Entry]:
    wide = file.read_at(6, 1)[0] > 1
    start = 12 if wide else 10
    length = int.from_bytes(file.read_at(8, 4 if wide else 2), "little")
    if length > _NPY_HEADER_MAX:
        return []
    header = ast.literal_eval(file.read_at(start, length).decode("latin-1"))
    shape, dtype = counts_of(header["shape"]), _NUMPY.get(header["descr"])
    if dtype is None or (header["fortran_order"] and len(shape) > 1):
        return []
    return [Entry(name, dtype, shape, start + length, file.size)]


def _npz(file: Window, members: Mapping[str, tuple[int, int]]) -> list[Entry]:
    found = []
    for name, (start, nbytes) in members.items():
        if name.endswith(".npy"):
            member = file.part(start, nbytes)
            found += [moved(entry, start) for entry in _npy(member, name.removesuffix(".npy"))]
    return found


def _members(file: Window, members: Mapping[str, tuple[int, int]], *, inner: bool) -> list[Entry]:
    """The tensors of the files in an archive, which name them if several have some. An archive in
    an archive is not looked into, unless it is a file of torch.save or numpy."""
    total = sum(nbytes for _, nbytes in members.values())
    if inner or len(members) > MEMBERS_MAX or total > file.size:
        return []
    found: dict[str, list[Entry]] = {}
    for name, (start, nbytes) in members.items():
        with suppress(Exception):  # a forged file may raise anything, and is kept as bytes
            entries = checked(_parse(file.part(start, nbytes), inner=True), nbytes)
            found[name.removeprefix("./")] = [moved(entry, start) for entry in entries]
    named = {name: entries for name, entries in found.items() if entries}
    return [
        replace(entry, name=entry.name if len(named) == 1 else f"{name}.{entry.name}")
        for name, entries in named.items()
        for entry in entries
    ]
