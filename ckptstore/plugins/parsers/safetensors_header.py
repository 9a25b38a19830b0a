"""How is the header of a safetensors file read and written? Pure but for `read_header`.

A safetensors file (https://huggingface.co/docs/safetensors) is eight bytes with the header's
length, little-endian; the header, a JSON object of names with `dtype`, `shape` and `data_offsets`;
and the tensors' bytes, without gaps or overlaps. Sizes are checked before anything is allocated.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import Shape, nbytes_of, width_of
from ckptstore.plugins.foreign.magic import SAFETENSORS_HEADER_BYTES_MAX
from ckptstore.plugins.foreign.sources import Entry, read_range

LENGTH_BYTES = 8
_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
"""The metadata in which `torch.distributed.checkpoint.HuggingFaceStorageWriter` places each tensor
of a file in its global tensor: a JSON object of names with `saved_offsets`
(torch/distributed/checkpoint/filesystem.py).
"""

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PACKED = {"float4_e2m1fn_x2": 2}
"""Published elements in one of torch's, which make its last dimension smaller."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: `raw` are the bytes before the data, `entries` the tensors in order of
    offset.

    With `sharded`, every entry has a position in a global tensor.
    """

    raw: bytes
    entries: tuple[Entry, ...]
    sharded: bool = False

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0


def read_header(path: Path) -> Header:
    """The header of a file. Raises `InvalidInput` for any other file, after at most
    `SAFETENSORS_HEADER_BYTES_MAX` bytes.
    """
    size = path.stat().st_size
    length = bytearray(LENGTH_BYTES)
    if size < LENGTH_BYTES:
        _refuse(path, f"it has {size} bytes")
    read_range(path, 0, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(SAFETENSORS_HEADER_BYTES_MAX, size - LENGTH_BYTES):
        _refuse(
            path,
            f"its header claims {header_bytes} bytes of {size}; wanted at most "
            f"{SAFETENSORS_HEADER_BYTES_MAX}",
        )
    raw = bytearray(LENGTH_BYTES + header_bytes)
    read_range(path, 0, memoryview(raw))
    header = parse_header(bytes(raw), str(path))
    if header.data_bytes != size - len(raw):
        _refuse(
            path, f"its tensors take {header.data_bytes} bytes, and {size - len(raw)} are there"
        )
    return header


def parse_header(raw: bytes, where: str) -> Header:
    """Parse the bytes `raw` of a header. Raises `InvalidInput` for overlaps, gaps, wrong sizes,
    unknown dtypes and duplicate names.
    """
    try:
        document = json.loads(raw[LENGTH_BYTES:].decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{where} is not a safetensors file: its header is not a JSON object: {error}"
        ) from error
    if not isinstance(document, dict):
        _refuse(where, "its header is not a JSON object")
    offsets = _saved_offsets(where, document.pop(_METADATA, None))
    entries = sorted(
        (_entry(where, name, found, offsets) for name, found in document.items()),
        key=lambda entry: (entry.start, entry.stop),
    )
    end = 0
    for entry in entries:
        if entry.start != end:
            _refuse(
                where,
                f"the bytes of {entry.name!r} begin at {entry.start}; wanted {end}, where those "
                "before end",
            )
        end = entry.stop
    return Header(raw, tuple(entries), offsets is not None)


def encode_header(
    tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str] | None = None
) -> Header:
    """A header for tensors (name, dtype, shape), wide elements first so that all are aligned.
    Raises `InvalidInput` for an unsupported dtype or name.
    """
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -width_of(tensor[1])):
        if name in document or name == _METADATA:
            raise InvalidInput(
                f"two tensors would be called {name!r} in one safetensors file; export fewer with "
                "--select"
            )
        start, end = end, end + nbytes_of(dtype, shape)
        document[name] = {
            "dtype": _code(name, dtype, shape),
            "shape": [*shape[:-1], *(n * _PACKED.get(dtype, 1) for n in shape[-1:])],
            "data_offsets": [start, end],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return parse_header(len(text).to_bytes(LENGTH_BYTES, "little") + text, "the new file")


def _saved_offsets(where: str, metadata: Any) -> dict[str, Any] | None:
    """The position of each tensor of a DCP shard, by name; None for any other file."""
    text = metadata.get(_SHARDING) if isinstance(metadata, dict) else None
    if text is None:
        return None
    try:
        return {
            name: found["saved_offsets"]
            for name, found in json.loads(text, object_pairs_hook=_without_repeats).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{where} is a damaged shard of DCP: its {_SHARDING} has no saved_offsets by names: "
            f"{error!r:.200}"
        ) from error


def _entry(where: str, name: str, found: Any, saved_offsets: Mapping[str, Any] | None) -> Entry:
    if not isinstance(found, dict) or found.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(where, f"{name[:80]!r} has not dtype, shape and data_offsets")
    code, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        _refuse(where, f"the shape or the offsets of {name[:80]!r} are not counts")
    dtype = _DTYPES.get(str(code), "")
    torch_shape = _packed(dtype, shape)
    if not dtype or torch_shape is None:
        _refuse(
            where,
            f"{name[:80]!r} is {str(code)[:40]!r} of shape {shape}, for which torch has no dtype",
        )
    if offsets[1] - offsets[0] != nbytes_of(dtype, torch_shape):
        _refuse(
            where,
            f"{name[:80]!r}, {code} {shape}, takes {offsets[1] - offsets[0]} bytes; wanted "
            f"{nbytes_of(dtype, torch_shape)}",
        )
    if saved_offsets is None:
        return Entry(name, dtype, torch_shape, offsets[0], offsets[1])
    saved: Any = saved_offsets.get(name)
    if not _are_counts(saved) or len(saved) != len(shape):
        got = f"its {_SHARDING} has {str(saved)[:80]} for {name[:80]!r}, of shape {shape}"
        _refuse(where, f"{got}; wanted an offset in each dimension")
    start = _packed(dtype, saved)
    if start is None:
        _refuse(where, f"{name[:80]!r} begins at {saved}, within one of torch's elements")
    return Entry(name, dtype, torch_shape, offsets[0], offsets[1], start)


def _packed(dtype: str, counts: list[int]) -> Shape | None:
    """A published shape or its first indices, in torch's elements; None if they cut one."""
    per = _PACKED.get(dtype, 1)
    if per == 1:
        return tuple(counts)
    return (*counts[:-1], counts[-1] // per) if counts and counts[-1] % per == 0 else None


def _code(name: str, dtype: str, shape: Shape) -> str:
    if dtype in _CODES and (shape or dtype not in _PACKED):
        return _CODES[dtype]
    kind = dtype if shape else f"a scalar of {dtype}"
    raise InvalidInput(
        f"{name} is {kind}, which safetensors files cannot hold; export it as torch, or leave it "
        "out with --select"
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _refuse(where: object, why: str) -> NoReturn:
    raise InvalidInput(f"{where} is not a valid safetensors file: {why}")
