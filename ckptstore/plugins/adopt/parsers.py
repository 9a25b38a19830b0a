"""Where in a file do its tensors lie? A parser for each format, chosen by a file's first bytes.

A parser reads a window and returns entries, by their bytes in the window. It may raise anything for
a file of another format or a damaged one: such a file has no tensors.
"""

import ast
import io
import logging
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptstore.plugin.foreign import (
    GGUF_MAGIC,
    LEGACY_MAGIC,
    NPY_MAGIC,
    SAFETENSORS_HEADER_BYTES_MAX,
    ZIP_MAGIC,
    Entry,
    Window,
)
from ckptstore.plugin.model import WIDTHS, Shape, nbytes_of
from ckptstore.plugins.adopt.pickle_ops import TooLarge, attributes, counts_of, items_of, walk
from ckptstore.plugins.adopt.safetensors_header import (
    LENGTH_BYTES,
    parse_header,
)
from ckptstore.plugins.adopt.torch_files import (
    legacy_torch,
    torch_archive,
    zip_members,
)

logger = logging.getLogger("ckptstore")

ENTRIES_MAX = 1 << 20
_ELEMENTS_MAX = 1 << 53
"""The dimensions of an empty tensor have no bytes that would limit them: the manifest and torch do.
"""
_NAME_MAX = 2000
_NPY_HEADER_MAX = 1 << 16
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
_GGUF = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
"""Tensor types of GGUF that torch has; the others are quantized in blocks."""

_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY, _GGUF_UINT32 = 8, 9, 4
_GGUF_DIMENSIONS_MAX = 8


def entries_of(file: Window, where: str) -> list[Entry]:
    """The tensors in a file, in order of their bytes. Empty for a file of no known format, for one
    that is damaged, for one whose tensors overlap, and with a warning that names `where`, for one
    that is too large to look into."""
    try:
        return checked(_parse(file), file.size)
    except TooLarge as error:
        logger.warning("%s is kept as bytes, without tensors: %s", where, error)
        return []
    except Exception:  # a forged file may raise anything, and is kept as bytes
        return []


def _parse(file: Window) -> list[Entry]:
    head = file.read_at(0, min(file.size, 16))
    if head.startswith(ZIP_MAGIC):
        members = zip_members(file)
        if any(name.endswith("/data.pkl") for name in members):
            return torch_archive(file, members)
        return _npz(file, members)
    if head.startswith(LEGACY_MAGIC):
        return legacy_torch(file)
    if head.startswith(NPY_MAGIC):
        return _npy(file, "array")
    if head.startswith(GGUF_MAGIC):
        return _gguf(file)
    if head[8:9] == b"{":
        return _safetensors(file)
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
    return [_moved(entry, len(header.raw)) for entry in header.entries]


def _moved(entry: Entry, by: int, prefix: str = "") -> Entry:
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
            found += [_moved(entry, start) for entry in _npy(member, name.removesuffix(".npy"))]
    return found


def _gguf(file: Window) -> list[Entry]:
    reader = file.reader()
    version, tensors, pairs = struct.unpack("<4xIQQ", _exactly(reader, 24))
    if version not in (2, 3) or max(tensors, pairs) > file.size:
        return []
    alignment = 32
    for _ in range(pairs):
        key, kind = _gguf_string(reader), _number(reader, 4)
        if key == "general.alignment" and kind == _GGUF_UINT32:
            alignment = _number(reader, 4)
        else:
            _skip_gguf(reader, kind, file.size)
    infos = []
    for _ in range(tensors):
        name, dimensions = _gguf_string(reader), _number(reader, 4)
        if dimensions > _GGUF_DIMENSIONS_MAX:
            return []
        shape = tuple(reversed([_number(reader, 8) for _ in range(dimensions)]))
        infos.append((name, shape, _number(reader, 4), _number(reader, 8)))
    base = -(-reader.tell() // alignment) * alignment
    infos.sort(key=lambda info: info[3])
    ends = [*(info[3] for info in infos[1:]), file.size - base]
    found = []
    for (name, shape, kind, offset), end in zip(infos, ends, strict=True):
        if dtype := _GGUF.get(kind):
            stop = offset + nbytes_of(dtype, shape)
        else:  # blocks of a quantized tensor, with the padding behind them
            dtype, stop = "uint8", end
            shape = (max(stop - offset, 0),)
        found.append(Entry(name, dtype, shape, base + offset, base + stop))
    return found


def _skip_gguf(reader: io.BufferedReader, kind: int, size: int) -> None:
    """Read past a value of GGUF."""
    count = 1
    if kind == _GGUF_ARRAY:
        kind, count = _number(reader, 4), _number(reader, 8)
    if kind == _GGUF_STRING and count <= size:
        for _ in range(count):
            _gguf_string(reader)
    elif kind in _GGUF_SCALARS and count <= size:
        reader.seek(_GGUF_SCALARS[kind] * count, io.SEEK_CUR)
    else:
        raise ValueError(f"a value of type {kind} is not known")


def _gguf_string(reader: io.BufferedReader) -> str:
    length = _number(reader, 8)
    if length > SAFETENSORS_HEADER_BYTES_MAX:
        raise ValueError("a text is too long")
    return _exactly(reader, length).decode("utf-8", "replace")


def _number(reader: io.BufferedReader, nbytes: int) -> int:
    return int.from_bytes(_exactly(reader, nbytes), "little")


def _exactly(reader: io.BufferedReader, nbytes: int) -> bytes:
    data = reader.read(nbytes)
    if len(data) != nbytes:
        raise ValueError("the file ends too early")
    return data


def dcp_entries(metadata: Window, files: Mapping[str, Window]) -> dict[str, list[Entry]]:
    """The tensors in the files of a DCP directory, by file, each with its place in its global
    tensor. `files` are by their names relative to `metadata`."""
    try:
        found = attributes(walk(metadata.reader()))
        shapes: dict[str, list[tuple[Any, Any]]] = {}
        for name, item in items_of(found["state_dict_metadata"]):
            if not isinstance(name, str):
                continue
            chunks = [attributes(chunk) for chunk in attributes(item).get("chunks") or ()]
            shapes[name] = [
                (counts_of(chunk["offsets"]), counts_of(chunk["sizes"])) for chunk in chunks
            ]
        pieces = [(attributes(i), attributes(p)) for i, p in items_of(found["storage_data"])]
    except TooLarge as error:
        logger.warning(
            "%s are kept as bytes, without tensors: of their metadata, %s",
            ", ".join(sorted(files)[:5]),
            error,
        )
        return {}
    except Exception:  # a forged file may raise anything
        return {}
    entries: dict[str, list[Entry]] = {}
    for index, place in pieces:
        path, name = place.get("relative_path"), index.get("fqn")
        if not isinstance(path, str) or not isinstance(name, str) or path not in files:
            continue
        if place.get("transform_descriptors"):
            continue
        try:
            boxes = dict(shapes.get(name, ()))
            offset = None if index.get("offset") is None else counts_of(index["offset"])
            start = place["offset"]
            inner = _dcp_piece(files[path].part(start, place["length"]), name, offset, boxes)
        except Exception:
            continue
        mine = entries.setdefault(path, [])
        mine += [_moved(entry, start) for entry in inner]
    return {name: _checked_or_none(found, files[name].size) for name, found in entries.items()}


def _dcp_piece(
    piece: Window, name: str, offset: tuple[int, ...] | None, boxes: Mapping[Any, Any]
) -> list[Entry]:
    """The tensors of one item: that of a piece of a tensor, or those of an object."""
    inner = entries_of(piece, name)
    if offset is None:
        return [replace(entry, name=f"{name}.{entry.name}") for entry in inner]
    if len(inner) == 1 and inner[0].shape == boxes.get(offset):
        return [replace(inner[0], name=name, saved_offsets=offset)]
    return []


def _checked_or_none(entries: list[Entry], size: int) -> list[Entry]:
    try:
        return checked(entries, size)
    except ValueError:
        return []
