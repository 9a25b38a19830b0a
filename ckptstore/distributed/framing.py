"""How are values, or errors by rank, sent as one message? Nothing is pickled."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptstore import errors
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.errors import CkptStoreError, Corrupt, Unavailable

_TEXT_BYTES = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """A message of None, bools, numbers, text, bytes, and lists, tuples and dicts of them: JSON, in
    which an object of one nameless length stands for bytes, and the bytes after it. So no dict may
    have `""` as its only key."""
    parts: list[bytes | memoryview] = []

    def put(data: bytes | memoryview) -> dict[str, int]:
        parts.append(data)
        return {"": len(data)}

    text = json.dumps(value, default=put, separators=(",", ":")).encode()
    return b"".join((_TEXT_BYTES.pack(len(text)), text, *parts))


def unpack(data: bytes) -> Any:
    """The inverse of `pack`, with tuples as lists; raises `Corrupt`."""

    at = 0

    def take(found: dict[str, Any]) -> Any:
        nonlocal at
        if found.keys() != {""}:
            return found
        start, at = at, at + found[""]
        return data[start:at]

    try:
        at = _TEXT_BYTES.size + _TEXT_BYTES.unpack_from(data)[0]
        value = json.loads(data[_TEXT_BYTES.size : at], object_hook=take)
    except (ValueError, TypeError, struct.error) as error:
        raise damaged(error) from error
    if at != len(data):
        raise damaged(f"{len(data)} bytes in place of {at}")
    return value


def tuples(said: Any) -> Any:
    """A value of a message with tuples in place of lists."""
    return tuple(map(tuples, said)) if isinstance(said, list) else said


def table(numbers: Sequence[int] | NDArray[Any]) -> bytes:
    """Rows of numbers, one after the other, for a message: much shorter and faster than as text."""
    wide = np.asarray(numbers, "<i8")
    for width in _WIDTHS[:-1]:
        narrow = wide.astype(f"<i{width}")
        if np.array_equal(narrow, wide):
            return b"%d" % width + narrow.tobytes()
    return b"8" + wide.tobytes()


def columns_of(data: bytes, width: int) -> NDArray[np.int64]:
    """The columns of a `table` whose rows have `width` numbers each; raises `ValueError` for a part
    of a row."""
    if (each := int(data[:1] or b"0")) not in _WIDTHS:
        raise ValueError(f"numbers of {each} bytes")
    return np.frombuffer(data, f"<i{each}", offset=1).reshape(-1, width).T.astype(np.int64)


def rows_of(data: bytes, width: int) -> list[list[int]]:
    """The rows of a `table`, of `width` numbers each; raises `ValueError` for a part of a row."""
    rows: list[list[int]] = columns_of(data, width).T.tolist()
    return rows


def numbers_of(data: bytes) -> list[int]:
    """The numbers of a `table`."""
    numbers: list[int] = columns_of(data, 1)[0].tolist()
    return numbers


_WIDTHS = 2, 4, 8


def damaged(why: object) -> Corrupt:
    said = f"a rank's message is damaged: {why}"
    return Corrupt(f"{said}; do all ranks run one version of ckptstore?")


_NUMBERED = np.dtype([("number", "<u4"), ("id", f"V{CHUNK_ID_BYTES}")])


def numbered(found: Mapping[int, bytes]) -> bytes:
    """A message of rows, each a number and a chunk id. `found` has the ids of consecutive chunks by
    the number of the first.
    """
    numbers = [
        n for first, ids in found.items() for n in range(first, first + len(ids) // CHUNK_ID_BYTES)
    ]
    rows = np.empty(len(numbers), _NUMBERED)
    rows["number"] = numbers
    rows["id"] = np.frombuffer(b"".join(found.values()), _NUMBERED["id"])
    return rows.tobytes()


def numbers_and_ids(data: bytes) -> tuple[Any, Any]:
    """The columns of a message of `numbered`, as arrays. Raises `Corrupt`."""
    try:
        rows = np.frombuffer(data, _NUMBERED)
    except ValueError as error:
        raise damaged(error) from error
    return rows["number"], rows["id"]


def check_keys(rank: int, what: str, found: Iterable[Any], asked: Iterable[Any]) -> None:
    """Raise `Corrupt` unless the keys of a message from `rank` are those that it was asked for,
    each once.
    """
    if (got := sorted(found)) != (wanted := sorted(asked)):
        lacking, strange = set(wanted) - set(got), set(got) - set(wanted)
        raise damaged(
            f"rank {rank} sends {len(got)} {what}, wanted {len(wanted)}: {len(lacking)} are "
            f"missing, {len(strange)} were not asked for"
        )


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

    @property
    def own_class(self) -> type[CkptStoreError] | None:
        """Its class, if it is one of our errors."""
        cls = getattr(errors, self.kind, None)
        return cls if isinstance(cls, type) and issubclass(cls, CkptStoreError) else None

    def error(self) -> CkptStoreError:
        """The failure as one of our errors."""
        return self.own_class(self.text) if self.own_class else CkptStoreError(str(self))


def cause_of(error: BaseException) -> Cause:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    # A lone surrogate, as in the name of a file, has no UTF-8 encoding.
    text = f"{error}{notes}"[:_TEXT_CHARACTERS].encode(errors="replace").decode()
    return Cause(type(error).__name__, text)


def causes_from(said: Mapping[str, Sequence[str]]) -> dict[int, Cause]:
    """The causes of a message that has them by rank."""
    return {int(rank): Cause(*cause) for rank, cause in said.items()}


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
    found = {cause.own_class or CkptStoreError for cause in causes.values()}
    if len(found) == 1:
        return found.pop()
    return Unavailable if all(issubclass(cls, Unavailable) for cls in found) else CkptStoreError
