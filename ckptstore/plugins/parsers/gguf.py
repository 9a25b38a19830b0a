"""Where in a GGUF file do its tensors lie?"""

import io
import struct

from ckptstore.plugin.model import nbytes_of
from ckptstore.plugins.foreign.magic import SAFETENSORS_HEADER_BYTES_MAX
from ckptstore.plugins.foreign.sources import Entry, Window

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


def gguf_entries(file: Window) -> list[Entry]:
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
