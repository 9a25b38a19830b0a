"""How does a pack describe its content: a footer of one record per chunk, and a trailer
(docs/format.md §4)? Pure.

The records of a pack with patches are longer: each names the bases of its patch by chunk id.

`parse_footer` checks the hash, and that the records are ordered, disjoint and within the data.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, digest
from ckptstore.core.model import NO_BASE, PackEntry
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.codecs import DELTA, KNOWN_CODECS, PATCH, RAW
from ckptstore.objects.patches import BASES_MAX
from ckptstore.storage.contract import CHUNK_BYTES_MAX, FOOTERS_BYTES_MAX

TENSOR, SCHEMA, PAGE, LAYOUT = range(4)
"""Kinds of chunk. Only the first lies in data packs, only the others in metadata packs."""

TRAILER_BYTES = 72
LARGE_RUN_BYTES = 65536
"""A run of at least so many bytes starts on a page of memory, a smaller one on a line of cache."""

FOOTER_DTYPE = np.dtype(
    [
        ("chunk", "V32"),
        ("checksum", "V16"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("base", "<u4"),
        ("codec", "u1"),
        ("width", "u1"),
        ("kind", "u1"),
        ("depth", "u1"),
        ("zero", "V8"),
    ]
)
PATCHED_DTYPE = np.dtype([*FOOTER_DTYPE.descr, ("patch_of", "V32", (BASES_MAX,))])
"""The records of a pack that has patches. The last field is zeros for any other chunk, and where a
patch has fewer bases."""

FooterTable: TypeAlias = npt.NDArray[np.void]
"""Records of `FOOTER_DTYPE` or `PATCHED_DTYPE`, in order of offset."""

_COLUMNS = ("chunk", "checksum", "offset", "stored", "raw", "codec", "width", "kind", "base")
"""The fields of a `PackEntry`, in its order, but for the last, `patch_of` and `depth`."""

_MAGIC, _MAGIC_AT_END = b"CKPTPACK", b"KCAPTPKC"
_VERSION, _VERSION_PATCHED = 2, 4
_HEAD = struct.Struct("<8sIIQQ")
_NO_CHUNK = bytes(32)
_IS_KNOWN = np.isin(np.arange(256), KNOWN_CODECS)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The position of a pack's footer, and its hash."""

    footer_offset: int
    footer_bytes: int
    metadata: bool
    patched: bool
    head: bytes
    footer_hash: bytes

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The records of the footer."""
        return PATCHED_DTYPE if self.patched else FOOTER_DTYPE


def align(offset: int, run_bytes: int) -> int:
    """The first offset from `offset` on where a run of `run_bytes` may start."""
    step = 4096 if run_bytes >= LARGE_RUN_BYTES else 64
    return -(-offset // step) * step


def encode_tail(
    entries: Sequence[PackEntry], data_bytes: int, metadata: bool
) -> tuple[bytes, FooterTable]:
    """Footer and trailer of a pack with `data_bytes` of data, and its records as a reader parses
    them. `entries` in any order. Raises `InvalidInput` for impossible entries."""
    return encode_table(_table(entries), data_bytes, metadata)


def encode_table(table: FooterTable, data_bytes: int, metadata: bool) -> tuple[bytes, FooterTable]:
    """As `encode_tail`, for records in any order."""
    footer = table[np.argsort(table["offset"], kind="stable")].tobytes()
    version = _VERSION_PATCHED if table.dtype == PATCHED_DTYPE else _VERSION
    head = _HEAD.pack(_MAGIC, version, metadata, data_bytes, len(footer))
    trailer = head + digest(footer + head) + _MAGIC_AT_END
    try:
        parsed = parse_trailer(trailer, data_bytes + len(footer) + TRAILER_BYTES)
        return footer + trailer, parse_footer(footer, parsed)
    except Corrupt as error:
        raise InvalidInput(f"these entries make no pack: {error}") from error


def parse_trailer(data: bytes, pack_bytes: int) -> Trailer:
    """The trailer from the last bytes of a pack of `pack_bytes`; raises `Corrupt`."""
    if len(data) != TRAILER_BYTES:
        raise _corrupt("trailer", f"{TRAILER_BYTES} bytes", len(data))
    magic, version, kind, offset, nbytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or data[64:] != _MAGIC_AT_END:
        raise _corrupt("trailer", f"{_MAGIC!r} and {_MAGIC_AT_END!r}", (magic, data[64:]))
    if version not in (_VERSION, _VERSION_PATCHED):
        raise _corrupt("version", f"{_VERSION} or {_VERSION_PATCHED}", version)
    if kind not in (0, 1):
        raise _corrupt("kind", "0 or 1", kind)
    if nbytes > FOOTERS_BYTES_MAX:
        raise _corrupt("footer", f"at most {FOOTERS_BYTES_MAX} bytes", nbytes)
    patched = version == _VERSION_PATCHED
    record = (PATCHED_DTYPE if patched else FOOTER_DTYPE).itemsize
    if nbytes % record or offset + nbytes + TRAILER_BYTES != pack_bytes:
        raise _corrupt(
            "size",
            f"{offset} bytes of data, {nbytes} of footer and {TRAILER_BYTES} more",
            pack_bytes,
        )
    head, footer_hash = data[: _HEAD.size], data[_HEAD.size : 64]
    return Trailer(offset, nbytes, bool(kind), patched, head, footer_hash)


def parse_footer(footer: bytes | memoryview, trailer: Trailer) -> FooterTable:
    """The records of a footer, read-only; `footer` is not copied. Raises `Corrupt`."""
    if len(footer) != trailer.footer_bytes:
        raise _corrupt("footer", f"{trailer.footer_bytes} bytes", len(footer))
    # Joined, not hashed in two parts: a footer is small, and one call keeps the GIL for less time.
    if (got := digest(b"".join((footer, trailer.head)))) != trailer.footer_hash:
        raise _corrupt("footer's hash", trailer.footer_hash.hex(), got.hex())
    table = np.frombuffer(footer, trailer.dtype)
    _check_extents(table, trailer.footer_offset)
    _check_columns(table, trailer.metadata)
    return table


def entries(table: FooterTable) -> list[PackEntry]:
    """The records as tuples, for the few callers that need them one by one."""
    columns = [table[name].tolist() for name in _COLUMNS]
    if table.dtype == PATCHED_DTYPE:
        named = table["patch_of"].tolist()
        columns.append([b"".join(base for base in row if base != _NO_CHUNK) for row in named])
        columns.append(table["depth"].tolist())
    return [PackEntry(ChunkId(chunk), *rest) for chunk, *rest in zip(*columns, strict=True)]


def bases_of(table: FooterTable) -> npt.NDArray[np.void]:
    """The ids of the bases of each record's patch, zeros if it is none: of one that has a single
    base, that comes twice. `table` has `PATCHED_DTYPE`."""
    named = table["patch_of"].copy()
    named[:, 1:] = np.where(named[:, 1:] == np.void(_NO_CHUNK), named[:, :1], named[:, 1:])
    return named


def bases_named(table: FooterTable) -> npt.NDArray[np.void]:
    """The different chunks of any pack that are the bases of patches among the records."""
    if table.dtype != PATCHED_DTYPE:
        return np.empty(0, "V32")
    return np.unique(bases_of(table[table["codec"] == PATCH]))


def _table(entries: Sequence[PackEntry]) -> FooterTable:
    patched = any(entry.patch_of for entry in entries)
    table = np.zeros(len(entries), PATCHED_DTYPE if patched else FOOTER_DTYPE)
    if not entries:
        return table
    chunk, checksum, *rest, named, depth = zip(*entries, strict=True)
    try:
        table["chunk"] = np.frombuffer(b"".join(chunk), "V32")
        table["checksum"] = np.frombuffer(b"".join(checksum), "V16")
        for name, column in zip(_COLUMNS[2:], rest, strict=True):
            table[name] = column
        if patched:
            padded = (bases.ljust(CHUNK_ID_BYTES * BASES_MAX, b"\0") for bases in named)
            table["patch_of"] = np.frombuffer(b"".join(padded), "V32").reshape(-1, BASES_MAX)
            table["depth"] = depth
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"these entries make no pack: {error}") from error
    return table


def _check_extents(table: FooterTable, data_bytes: int) -> None:
    """Check that every record lies within the data and after the previous one."""
    start = table["offset"]
    # Compared before it is added to, so that a sum cannot wrap around.
    if not (start <= data_bytes).all():
        raise _corrupt("offset", f"at most {data_bytes}", int(start.max()))
    stop = start + table["stored"]
    if not (stop[:-1] <= start[1:]).all() or (len(stop) and stop[-1] > data_bytes):
        raise _corrupt("records", f"in order, apart and within {data_bytes} bytes", "others")


def _check_columns(table: FooterTable, metadata: bool) -> None:
    raw = table["codec"] == RAW
    for ok, what in (
        (_IS_KNOWN[table["codec"]], "a known codec"),
        (table["kind"] <= LAYOUT, "a known kind of chunk"),
        (
            (table["kind"] != TENSOR) == metadata,
            "tensor bytes in data packs only and all else in metadata packs only",
        ),
        (table["stored"] <= CHUNK_BYTES_MAX, f"at most {CHUNK_BYTES_MAX} stored bytes"),
        (table["width"] > 0, "an element width"),
        (
            _sound_bases(table),
            "a base if it is a delta: an earlier record as long and wide, no delta and no patch",
        ),
        (_sound_names(table), "the ids of bases if it is a patch, else none"),
        (
            (table["depth"] > 0) == (table["codec"] == PATCH),
            "how many patches it is from a whole chunk, which is none if it is no patch",
        ),
        (table["zero"] == np.void(bytes(8)), "zeros at the end"),
        (~raw | (table["stored"] == table["raw"]), "as many stored as raw bytes for a raw chunk"),
    ):
        if not ok.all():
            i = int(np.argmin(ok))
            raise _corrupt(f"record {i}", what, table[i].tobytes().hex())


def _sound_bases(table: FooterTable) -> npt.NDArray[np.bool_]:
    based = table["base"] != NO_BASE
    ok: npt.NDArray[np.bool_] = based == (table["codec"] == DELTA)
    if not based.any():
        return ok
    ok &= ~based | (table["base"] < np.arange(len(table)))
    rows = np.flatnonzero(ok & based)
    bases = table[table["base"][rows]]
    ok[rows] = (bases["codec"] != DELTA) & (bases["codec"] != PATCH)
    for field in ("raw", "width", "kind"):
        ok[rows] &= bases[field] == table[field][rows]
    return ok


def _sound_names(table: FooterTable) -> npt.NDArray[np.bool_]:
    """For each record, whether it names bases of its patch, which are other chunks of tensor
    bytes, or is none and names none."""
    is_patch: npt.NDArray[np.bool_] = table["codec"] == PATCH
    if table.dtype != PATCHED_DTYPE:
        return ~is_patch
    named = table["patch_of"]
    ok: npt.NDArray[np.bool_] = is_patch == (named[:, 0] != np.void(_NO_CHUNK))
    ok &= is_patch | (named == np.void(_NO_CHUNK)).all(axis=1)
    others = (named != table["chunk"][:, np.newaxis]).all(axis=1)
    ok &= ~is_patch | (others & (table["kind"] == TENSOR))
    return ok


def _corrupt(part: str, wanted: Any, got: Any) -> Corrupt:
    return Corrupt(
        f"the {part} of a pack is damaged: wanted {wanted}, got {got}; run `ckptstore fsck`"
    )
