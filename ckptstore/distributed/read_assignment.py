"""Which rank reads or hashes a chunk that several ranks need, and in which window does it travel?
Pure.

A chunk is known by its number in the order in which the commit names them, equal on all ranks. A
rank's need is one bit a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALONE = -1
"""Instead of a reader: every rank that needs the chunk reads and hashes it."""


class Numbering:
    """The numbers of a commit's chunks; `ids` are joined in the order in which the commit names
    them.
    """

    def __init__(self, ids: bytes) -> None:
        self._known, first = np.unique(np.frombuffer(ids, f"V{CHUNK_ID_BYTES}"), return_index=True)
        self._ids = np.frombuffer(ids, f"V{CHUNK_ID_BYTES}")[np.sort(first)]
        self._numbers = np.empty(len(first), np.int64)
        self._numbers[np.argsort(first)] = np.arange(len(first))

    def __len__(self) -> int:
        return len(self._known)

    @property
    def digest(self) -> bytes:
        """Equal on ranks with the same numbering."""
        return digest(self.ids)

    @property
    def ids(self) -> bytes:
        """The ids by number."""
        return self._ids.tobytes()

    def numbers(self, ids: bytes) -> "NDArray[np.int64]":
        """The number of each of `ids`, which the commit must name."""
        return self._numbers[np.searchsorted(self._known, np.frombuffer(ids, f"V{CHUNK_ID_BYTES}"))]


class Need(NamedTuple):
    """What a rank tells the coordinator: its numbering, its limit of bytes in transfer, and a bit
    for each chunk that it needs.
    """

    digest: bytes
    window_bytes: int
    bits: bytes

    @classmethod
    def of(cls, numbering: Numbering, window_bytes: int, numbers: "NDArray[np.int64]") -> "Need":
        needed = np.zeros(len(numbering), bool)
        needed[numbers] = True
        return cls(numbering.digest, window_bytes, np.packbits(needed).tobytes())


class Shares(NamedTuple):
    """By chunk number: the reader or `ALONE`, and the window of the exchange."""

    readers: "NDArray[np.int32]"
    windows: "NDArray[np.int32]"


def plan_shares(
    needs: "NDArray[np.bool_]", nbytes: "NDArray[np.int64]", window_bytes: int
) -> Shares:
    """Assign readers to the chunks that several ranks need. `needs` is ranks × chunks, `nbytes` by
    chunk.

    One of the ranks that need a chunk reads it. Load is balanced by bytes, in runs of chunks. In a
    window no rank has more than `window_bytes` and a chunk in transfer.
    """
    ranks, chunks = needs.shape
    shares = Shares(np.full(chunks, ALONE, np.int32), np.zeros(chunks, np.int32))
    read_bytes = [0] * ranks
    pace = _Pace(ranks, window_bytes)
    for holders, numbers in _groups(needs):
        ends = np.cumsum(nbytes[numbers])
        for block in np.split(numbers, np.flatnonzero(np.diff((ends - 1) // window_bytes)) + 1):
            size = int(nbytes[block].sum())
            shares.windows[block] = pace.window(holders, size)
            turn = sorted(holders, key=lambda rank: (read_bytes[rank], rank))
            middles = np.cumsum(nbytes[block]) - nbytes[block] // 2
            parts = np.minimum(middles * len(turn) // max(size, 1), len(turn) - 1)
            shares.readers[block] = np.array(turn, np.int32)[parts]
            for part, rank in enumerate(turn):
                read_bytes[rank] += int(nbytes[block[parts == part]].sum())
    return shares


def plan_verifiers(needs: "NDArray[np.bool_]") -> "NDArray[np.int32]":
    """By chunk number, the rank that hashes it, or `ALONE`. Ranks that need the same chunks
    (`needs`: ranks × chunks) hash an even part each, in runs.
    """
    verifiers = np.full(needs.shape[1], ALONE, np.int32)
    for holders, numbers in _groups(needs):
        verifiers[numbers] = np.array(holders, np.int32)[
            np.arange(len(numbers)) * len(holders) // len(numbers)
        ]
    return verifiers


class _Pace:
    """The current window of each rank, and its bytes in transfer there."""

    def __init__(self, ranks: int, window_bytes: int) -> None:
        self._windows, self._filled, self._most = [0] * ranks, [0] * ranks, window_bytes

    def window(self, holders: Sequence[int], nbytes: int) -> int:
        """The first window in which all `holders` have room for `nbytes` more."""
        found = max(self._windows[rank] for rank in holders)
        if any(
            self._windows[rank] == found
            and self._filled[rank]
            and self._filled[rank] + nbytes > self._most
            for rank in holders
        ):
            found += 1
        for rank in holders:
            filled = self._filled[rank] if self._windows[rank] == found else 0
            self._windows[rank], self._filled[rank] = found, filled + nbytes
        return found


def _groups(needs: "NDArray[np.bool_]") -> Iterator[tuple[list[int], "NDArray[np.int64]"]]:
    """Chunks that the same set of ranks needs: those ranks, and the chunk numbers in order."""
    numbers = np.flatnonzero(needs.sum(axis=0) > 1)
    if not len(numbers):
        return
    packed = np.ascontiguousarray(np.packbits(needs[:, numbers], axis=0).T)
    _, which = np.unique(packed.view(f"V{packed.shape[1]}").ravel(), return_inverse=True)
    order = np.argsort(which, kind="stable")
    for group in np.split(numbers[order], np.flatnonzero(np.diff(which[order])) + 1):
        yield np.flatnonzero(needs[:, group[0]]).tolist(), group


@dataclass(frozen=True, slots=True)
class Share:
    """A chunk in transfer: number `number`, of `nbytes`, read by `reader`. Only the reader knows
    its `receivers`.
    """

    number: int
    nbytes: int
    reader: int
    receivers: tuple[int, ...]


def encode_shares(
    shares: Shares, needs: "NDArray[np.bool_]", nbytes: "NDArray[np.int64]", rank: int
) -> list[bytes]:
    """The part of `shares` that concerns rank `rank`."""
    mine = np.flatnonzero(needs[rank] & (shares.readers != ALONE))
    read = mine[shares.readers[mine] == rank]
    columns = (
        mine.astype("<i8"),
        nbytes[mine].astype("<i8"),
        shares.readers[mine].astype("<i4"),
        shares.windows[mine].astype("<i4"),
    )
    receivers = np.packbits(needs[:, read], axis=0).T
    return [*(column.tobytes() for column in columns), receivers.tobytes()]


def decode_shares(said: Sequence[bytes], rank: int, size: int) -> list[list[Share]]:
    """The shares of rank `rank` of `size`, window by window, in the order of chunk numbers."""
    *columns, bits = said
    numbers, nbytes, readers, windows = (
        np.frombuffer(column, kind).tolist()
        for column, kind in zip(columns, ("<i8", "<i8", "<i4", "<i4"), strict=True)
    )
    width = -(-size // 8)
    receivers = iter(
        np.unpackbits(np.frombuffer(bits, np.uint8).reshape(-1, width), axis=1, count=size)
    )
    found: dict[int, list[Share]] = {}
    for number, length, reader, window in zip(numbers, nbytes, readers, windows, strict=True):
        others = (
            tuple(each for each in np.flatnonzero(next(receivers)).tolist() if each != rank)
            if reader == rank
            else ()
        )
        found.setdefault(window, []).append(Share(number, length, reader, others))
    return [found[window] for window in sorted(found)]
