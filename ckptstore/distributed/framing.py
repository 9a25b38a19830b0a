"""How are several byte strings, or errors by rank, sent as one message? Bytes only; nothing is
pickled.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptstore import errors
from ckptstore.errors import CkptStoreError, Corrupt, Unavailable
from ckptstore.objects import canonical

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


MAX_BYTES = 1 << 31
"""A longer message does not come from ckptstore."""

_SHOWN = 8
_TEXT_CHARACTERS = 4000


class Cause(NamedTuple):
    """Why a rank failed: the exception's class name and its message."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def cause_of(error: BaseException) -> Cause:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    # A lone surrogate, as in the name of a file, has no UTF-8 encoding.
    text = f"{error}{notes}"[:_TEXT_CHARACTERS].encode(errors="replace").decode()
    return Cause(type(error).__name__, text)


def encode_causes(causes: Mapping[int, Cause]) -> bytes:
    return canonical.encode({str(rank): list(cause) for rank, cause in causes.items()})


def decode_causes(data: bytes) -> dict[int, Cause]:
    """The inverse of `encode_causes`; raises `Corrupt`."""
    try:
        return {
            int(rank): Cause(str(kind), str(text))
            for rank, (kind, text) in canonical.decode(data).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise Corrupt(
            f"a rank's message is damaged: {error}; do all ranks run one version of ckptstore?"
        ) from error


def failure(what: str, causes: Mapping[int, Cause], size: int) -> CkptStoreError:
    """One exception for the causes on some of `size` ranks, of the class that they share."""
    lines = [f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    if len(causes) == size > 1 and len(set(causes.values())) == 1:
        said = f"{what} failed on all {size} ranks: {causes[0]}"
    else:
        said = (
            f"{what} failed on {len(causes)} of {size} ranks:\n  "
            + "\n  ".join(lines[:_SHOWN])
            + more
        )
    error = _class_of(causes)(said)
    error.causes = {rank: str(cause) for rank, cause in sorted(causes.items())}
    return error


def _class_of(causes: Mapping[int, Cause]) -> type[CkptStoreError]:
    found = {getattr(errors, cause.kind, None) for cause in causes.values()}
    if len(found) == 1:
        (cls,) = found
        if isinstance(cls, type) and issubclass(cls, CkptStoreError):
            return cls
    if all(isinstance(cls, type) and issubclass(cls, Unavailable) for cls in found):
        return Unavailable
    return CkptStoreError
