"""What a rank says it has of leaves that ranks hold for reasons unknown, before anybody knows who
writes them. Pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.errors import Corrupt

_HEAD = struct.Struct("<BQQ")
_INLINE, _IDS = range(2)


class Report(NamedTuple):
    """What a rank has of a leaf: its bytes, or the ids of its chunks. `raw_bytes` is the length."""

    inline: bytes | None
    ids: bytes
    raw_bytes: int


def encode_reports(reports: Sequence[Report]) -> bytes:
    heads = [
        _HEAD.pack(_INLINE, report.raw_bytes, len(report.inline))
        if report.inline is not None
        else _HEAD.pack(_IDS, report.raw_bytes, len(report.ids))
        for report in reports
    ]
    return b"".join(
        (*heads, *(report.ids if report.inline is None else report.inline for report in reports))
    )


def decode_reports(data: bytes, count: int) -> list[Report]:
    """The inverse of `encode_reports` for `count` reports; raises `Corrupt`."""
    at = count * _HEAD.size
    heads = list(_HEAD.iter_unpack(data[:at])) if len(data) >= at else []
    if len(heads) != count or at + sum(size for _, _, size in heads) != len(data):
        raise Corrupt(
            f"a rank's {count} reports do not fit {len(data)} bytes; do all ranks run one version "
            "of ckptstore?"
        )
    found = []
    for kind, raw_bytes, size in heads:
        part, at = data[at : at + size], at + size
        found.append(
            Report(part, b"", raw_bytes) if kind == _INLINE else Report(None, part, raw_bytes)
        )
    return found


def split_ids(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_ID_BYTES] for i in range(0, len(data), CHUNK_ID_BYTES)]
