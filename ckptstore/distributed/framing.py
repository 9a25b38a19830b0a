"""Several byte strings as one message, and back."""

import struct
from collections.abc import Sequence

from ckptstore.errors import Corrupt

_COUNT = struct.Struct("<I")


def join(frames: Sequence[bytes]) -> bytes:
    return b"".join(
        (_COUNT.pack(len(frames)), struct.pack(f"<{len(frames)}Q", *map(len, frames)), *frames)
    )


def split(data: bytes, count: int) -> list[bytes]:
    """The inverse of `join` for `count` frames; raises `Corrupt`."""
    at = _COUNT.size + 8 * count
    if len(data) < at or _COUNT.unpack_from(data)[0] != count:
        raise Corrupt(
            f"a rank's message of {len(data)} bytes does not have {count} parts; do all ranks run "
            "one version of ckptstore?"
        )
    sizes = struct.unpack_from(f"<{count}Q", data, _COUNT.size)
    if at + sum(sizes) != len(data):
        raise Corrupt("a rank's message is cut short; do all ranks run one version of ckptstore?")
    found = []
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found
