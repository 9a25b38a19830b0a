"""Which rank reads a chunk that several ranks need, which others get it, and in which window? Pure.

Rank 0 decides. A rank's need is runs of chunk numbers, so the work and the messages grow with the
runs and with the chunks that are shared, and not with ranks times chunks. Ranks that share the same
chunks get the same task.

A chunk is known by its number in the order in which the commit names them, equal on all ranks.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ckptstore.core.ids import CHECKSUM_BYTES
from ckptstore.distributed.framing import columns_of, table

if TYPE_CHECKING:
    from numpy.typing import NDArray

Edges: TypeAlias = "NDArray[np.int64]"
"""Chunk numbers as runs: the first of each and the one behind its last, in ascending order."""

ROW = np.dtype(
    [
        ("number", "<u4"),
        ("group", "<u4"),
        ("reader", "<u4"),
        ("window", "<u4"),
        ("nbytes", "<u4"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
    ]
)
"""A shared chunk in a task. `group` numbers the set of ranks that need it."""

_HOLDER = np.dtype([("group", "<u4"), ("rank", "<u4")])


def edges_of(needed: "NDArray[np.bool_]") -> Edges:
    """The runs of the chunks that are `needed`, which is by chunk number."""
    return np.flatnonzero(np.diff(needed.astype(np.int8), prepend=0, append=0))


def encode_edges(edges: Edges) -> bytes:
    """A rank's need as a message."""
    return zlib.compress(table(np.diff(edges, prepend=0)), 1)


def decode_edges(data: bytes) -> Edges:
    """The inverse of `encode_edges`."""
    return np.cumsum(columns_of(zlib.decompress(data), 1)[0])


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists of numbers, one behind the other: list `i` ends before `ends[i]`."""

    numbers: "NDArray[np.int64]"
    ends: "NDArray[np.int64]"

    @classmethod
    def of(cls, lists: "NDArray[np.int64]", numbers: "NDArray[np.int64]", count: int) -> "Lists":
        """Each of `numbers` in the list named beside it, in the same order; `count` lists."""
        order = np.argsort(lists, kind="stable")
        return cls(numbers[order], np.cumsum(np.bincount(lists, minlength=count)))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> "NDArray[np.int64]":
        return self.numbers[self.ends[i - 1] if i else 0 : self.ends[i]]

    def places(self, lists: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """Where the numbers of some `lists` are."""
        lengths = np.diff(self.ends, prepend=0)[lists]
        return _ranges(self.ends[lists] - lengths, lengths)


class Shared(NamedTuple):
    """The chunks that several ranks need, by groups that the same ranks need: `chunks` and
    `holders` of each."""

    chunks: Lists
    holders: Lists


def shared_by(needs: Sequence[Edges], chunks: int) -> Shared:
    """What several of the ranks need, by their `needs`, of so many chunks.

    The set of ranks that need a chunk is known by the sum of their random numbers of 128 bits:
    where a run begins, its rank's is added, and subtracted where it ends. So no set is looked at
    twice, and each is listed once for all its chunks.
    """
    ranks = np.repeat(np.arange(len(needs)), [len(edges) // 2 for edges in needs])
    starts, stops = np.concatenate([*needs, np.zeros(0, np.int64)]).reshape(-1, 2).T
    steps = (np.bincount(edges, minlength=chunks + 1) for edges in (starts, stops))
    several = np.cumsum(np.subtract(*steps)) > 1
    # From here on, only shared chunks are counted: each lies in two runs or more.
    numbers, before = np.flatnonzero(several), np.append(0, np.cumsum(several))
    starts, stops = before[starts], before[stops]
    shares = stops > starts
    ranks, starts, stops = ranks[shares], starts[shares], stops[shares]
    if not len(numbers):
        return Shared(Lists(numbers, numbers), Lists(numbers, numbers))
    events = np.concatenate([starts, stops])
    order = np.argsort(events, kind="stable")
    events = events[order]
    lasts = np.flatnonzero(np.diff(events, append=-1))
    marks = np.random.default_rng(0).integers(1 << 64, size=(2, len(needs)), dtype=np.uint64)
    changes = (np.concatenate([each[ranks], -each[ranks]])[order] for each in marks)
    sets = np.stack([np.cumsum(each)[lasts[:-1]] for each in changes], axis=1).view("V16").ravel()
    _, firsts, which = np.unique(sets, return_index=True, return_inverse=True)
    place = np.empty(len(firsts), np.int64)  # groups in the order of their first chunks
    place[np.argsort(firsts)] = np.arange(len(firsts))
    group_of = np.repeat(place[which], np.diff(events[lasts]))
    first_chunks = events[lasts][np.sort(firsts)]
    low, high = (np.searchsorted(first_chunks, edges) for edges in (starts, stops))
    groups = _ranges(low, high - low)
    holders = np.repeat(ranks, high - low)
    count = len(firsts)
    return Shared(Lists.of(group_of, numbers, count), Lists.of(groups, holders, count))


def _ranges(starts: "NDArray[np.int64]", lengths: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The numbers of several ranges, one behind the other."""
    skipped = starts - (np.cumsum(lengths) - lengths)
    return np.repeat(skipped, lengths) + np.arange(lengths.sum())


def plan_shares(
    shared: Shared, ranks: int, nbytes: "NDArray[np.int64]", window_bytes: int
) -> "NDArray[np.void]":
    """Assign readers and windows: a `ROW` for each of `shared.chunks.numbers`, without checksums.
    `nbytes` has their sizes.

    One of the ranks that need a chunk reads it. Load is balanced by bytes, in runs of chunks. In a
    window no rank has more than `window_bytes` and a chunk in transfer.
    """
    rows = np.zeros(len(nbytes), ROW)
    rows["number"], rows["nbytes"] = shared.chunks.numbers, nbytes
    read_bytes = np.zeros(ranks, np.int64)
    pace = _Pace(ranks, window_bytes)
    end = 0
    for group in range(len(shared.chunks)):
        holders = shared.holders[group]
        begin, end = end, int(shared.chunks.ends[group])
        rows["group"][begin:end] = group
        ends = np.cumsum(nbytes[begin:end])
        cuts = np.flatnonzero(np.diff((ends - 1) // window_bytes)) + 1
        for first, stop in pairwise([begin, *(begin + cuts), end]):
            block = slice(first, stop)
            sizes = nbytes[block]
            size = int(sizes.sum())
            turn = holders[np.argsort(read_bytes[holders], kind="stable")]
            middles = np.cumsum(sizes) - sizes // 2
            parts = np.minimum(middles * len(turn) // max(size, 1), len(turn) - 1)
            rows["window"][block] = pace.window(holders, size)
            rows["reader"][block] = turn[parts]
            read_bytes[turn] += np.bincount(parts, sizes, len(turn)).astype(np.int64)
    return rows


class _Pace:
    """The current window of each rank, and its bytes in transfer there."""

    def __init__(self, ranks: int, window_bytes: int) -> None:
        self._windows, self._filled = np.zeros((2, ranks), np.int64)
        self._most = window_bytes

    def window(self, holders: "NDArray[np.int64]", nbytes: int) -> int:
        """The first window in which all `holders` have room for `nbytes` more."""
        windows, filled = self._windows[holders], self._filled[holders]
        found = int(windows.max())
        here = windows == found
        if (here & (filled > 0) & (filled + nbytes > self._most)).any():
            found += 1
        self._filled[holders] = np.where(windows == found, filled, 0) + nbytes
        self._windows[holders] = found
        return found


def tasks_of(shared: Shared, rows: "NDArray[np.void]", ranks: int) -> list[Any]:
    """A message for each rank: its rows, window by window, and who needs the chunks of each group.
    The same object for ranks that share the same chunks; None for a rank that shares none."""
    lengths = np.diff(shared.holders.ends, prepend=0)
    groups_of = Lists.of(shared.holders.numbers, np.repeat(np.arange(len(lengths)), lengths), ranks)
    rows = rows.copy()
    made: dict[bytes, Any] = {b"": None}
    found: list[Any] = []
    for rank in range(ranks):
        groups = groups_of[rank]
        name = groups.tobytes()
        if name not in made:
            mine = rows[shared.chunks.places(groups)]
            mine = mine[np.lexsort((mine["number"], mine["window"]))]
            holders = np.empty(int(lengths[groups].sum()), _HOLDER)
            holders["group"] = np.repeat(groups, lengths[groups])
            holders["rank"] = shared.holders.numbers[shared.holders.places(groups)]
            made[name] = mine.tobytes(), holders.tobytes()
        found.append(made[name])
    return found


@dataclass(frozen=True, slots=True)
class Share:
    """A chunk in transfer: number `number`, of `nbytes` and this `checksum`, read by `reader`. Only
    the reader knows its `receivers`.
    """

    number: int
    nbytes: int
    checksum: bytes
    reader: int
    receivers: tuple[int, ...]


def shares_of(rank: int, task: Any) -> list[list[Share]]:
    """The shares of a task of `tasks_of`, window by window, in the order of chunk numbers."""
    if task is None:
        return []
    rows, holders = (np.frombuffer(*each) for each in zip(task, (ROW, _HOLDER), strict=True))
    others: dict[int, list[int]] = {}
    for group, holder in holders.tolist():
        if holder != rank:
            others.setdefault(group, []).append(holder)
    receivers = {group: tuple(ranks) for group, ranks in others.items()}
    return [
        list(_shares(rank, each, receivers))
        for _, each in groupby(rows.tolist(), key=lambda row: row[3])
    ]


def _shares(
    rank: int, rows: Iterator[tuple[int, int, int, int, int, bytes]], receivers: dict[int, Any]
) -> Iterator[Share]:
    for number, group, reader, _, nbytes, checksum in rows:
        to = receivers[group] if reader == rank else ()
        yield Share(number, nbytes, checksum, reader, to)
