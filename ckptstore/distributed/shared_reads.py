"""Which rank reads a chunk from slow storage that several ranks need, and sends it to the others?

Every rank learns what all others need and computes the same assignment.

A chunk is known by its number in the order in which the commit names them, equal on all ranks. A
rank's need is one bit a chunk. A rank that cannot read still sends placeholders, so that peers do
not block.
"""

import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptstore.core.ids import CHECKSUM_BYTES, CHUNK_ID_BYTES, ChunkId, checksum, digest
from ckptstore.distributed.collective import Collective, DeferredErrors, RankBytes
from ckptstore.restore.reader import ChunkRead, Reader, Reading
from ckptstore.restore.restore import Brought

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNPACKED_BYTES = 512
"""So many bytes of each rank's bits are unpacked at a time."""

ALONE = -1
"""Instead of a reader: only one rank needs the chunk, or none."""


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

    def id_of(self, number: int) -> ChunkId:
        return ChunkId(self._ids[number].tobytes())

    def numbers(self, ids: bytes) -> "NDArray[np.int64]":
        """The number of each of `ids`, which the commit must name."""
        return self._numbers[np.searchsorted(self._known, np.frombuffer(ids, f"V{CHUNK_ID_BYTES}"))]


class Needs:
    """Which ranks need which chunks: `bits` has a row for each rank, a bit for each of `chunks`.

    They stay packed: of a thousand ranks and as many GiB, each rank holds 128 MiB of them.
    """

    def __init__(self, bits: "NDArray[np.uint8]", chunks: int) -> None:
        self.bits, self.chunks = bits, chunks

    @classmethod
    def unpacked(cls, packed: Sequence[bytes], chunks: int) -> "Needs":
        """From what each rank sent, in their order."""
        bits = np.empty((len(packed), -(-chunks // 8)), np.uint8)
        for rank, sent in enumerate(packed):
            bits[rank] = np.frombuffer(zlib.decompress(sent), np.uint8)
        return cls(bits, chunks)

    def __len__(self) -> int:
        return len(self.bits)

    def of(self, rank: int) -> "NDArray[np.bool_]":
        """By chunk number, whether `rank` needs it."""
        return np.unpackbits(self.bits[rank], count=self.chunks).astype(bool)

    def ranks_of(self, number: int) -> list[int]:
        """The ranks that need a chunk."""
        return np.flatnonzero(self.bits[:, number // 8] & (128 >> number % 8)).tolist()

    def groups(self) -> Iterator[tuple[list[int], "NDArray[np.int64]"]]:
        """Chunks that the same several ranks need: those ranks, and the chunk numbers in order."""
        once, again = np.zeros((2, self.bits.shape[1]), np.uint8)
        for row in self.bits:  # packed: of a sharded state, one rank alone needs most chunks
            again |= once & row
            once |= row
        columns = np.flatnonzero(again)
        if not len(columns):
            return
        numbers, holders = [], []
        for at in range(0, len(columns), UNPACKED_BYTES):
            block = columns[at : at + UNPACKED_BYTES]
            needed = np.unpackbits(self.bits[:, block], axis=1)
            several = np.flatnonzero(needed.sum(axis=0, dtype=np.int32) > 1)
            numbers.append(8 * block[several // 8] + several % 8)
            holders.append(np.packbits(needed[:, several], axis=0).T)
        found = np.concatenate(numbers)
        rows = np.ascontiguousarray(np.concatenate(holders))
        _, which = np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_inverse=True)
        order = np.argsort(which, kind="stable")
        for group in np.split(found[order], np.flatnonzero(np.diff(which[order])) + 1):
            yield self.ranks_of(int(group[0])), group


class Shares(NamedTuple):
    """By chunk number: the reader or `ALONE`, and the window of the exchange."""

    readers: "NDArray[np.int32]"
    windows: "NDArray[np.int32]"


def plan_shares(needs: Needs, nbytes: "NDArray[np.int64]", window_bytes: int) -> Shares:
    """Assign readers to the chunks that several ranks need. `nbytes` is by chunk.

    One of the ranks that need a chunk reads it. Load is balanced by bytes, in runs of chunks. In a
    window no rank has more than `window_bytes` and a chunk in transfer.
    """
    shares = Shares(np.full(needs.chunks, ALONE, np.int32), np.zeros(needs.chunks, np.int32))
    read_bytes = [0] * len(needs)
    pace = _Pace(len(needs), window_bytes)
    for holders, numbers in needs.groups():
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


@dataclass(frozen=True, slots=True)
class Share:
    """A chunk in transfer: number `number`, of `nbytes`, read by `reader`. Only the reader knows
    its `receivers`.
    """

    number: int
    nbytes: int
    reader: int
    receivers: tuple[int, ...]


def shares_of(
    rank: int, shares: Shares, needs: Needs, nbytes: "NDArray[np.int64]"
) -> list[list[Share]]:
    """The shares that concern rank `rank`, window by window, in the order of chunk numbers."""
    found: dict[int, list[Share]] = {}
    for number in np.flatnonzero(needs.of(rank) & (shares.readers != ALONE)).tolist():
        reader = int(shares.readers[number])
        holders = needs.ranks_of(number) if reader == rank else ()
        found.setdefault(int(shares.windows[number]), []).append(
            Share(number, int(nbytes[number]), reader, tuple(n for n in holders if n != rank))
        )
    return [found[window] for window in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Held:
    """A chunk in transfer: its memory, the reads that need it, and the read whose target holds that
    memory.
    """

    share: Share
    memory: memoryview
    jobs: Sequence[ChunkRead]
    at_home: ChunkRead | None

    @property
    def chunk(self) -> ChunkId:
        return self.jobs[0].piece.chunk


class Broadcast:
    """The chunks of one restore that this rank shares with others: one rank reads a chunk and sends
    it to those that need it too."""

    def __init__(self, reader: Reader, reading: Reading, ids: bytes) -> None:
        """`ids` are the ids of all chunks of the commit, in its order."""
        self._reader, self._reading = reader, reading
        self._numbering = Numbering(ids)
        self._later = DeferredErrors()
        self._left: dict[ChunkId, list[ChunkRead]] = {}
        for job in reading.jobs:
            self._left.setdefault(job.piece.chunk, []).append(job)
        self._checksums = b""
        self._lock = threading.Lock()
        self._read_bytes = self._received_bytes = 0

    def need(self) -> Any:
        """This rank's message to the coordinator: its numbering, its limit of bytes in transfer,
        and a bit for each chunk that it needs. None if it works alone.
        """
        if not len(self._numbering):
            return None
        needed = np.zeros(len(self._numbering), bool)
        needed[self._numbering.numbers(b"".join(self._left))] = True
        bits = zlib.compress(np.packbits(needed).tobytes(), 1)
        return self._numbering.digest, self._reading.room.shared_bytes, bits

    def answer(self, handed_in: Sequence[Any]) -> list[Any]:
        """The coordinator's answer to every rank: the needs of all, the chunks' sizes, by which
        load is balanced, and their checksums. Empty if ranks number chunks differently, as when
        they restore different parts.
        """
        numberings, windows, needs = zip(*handed_in, strict=True)
        if len(set(numberings)) > 1:
            return [None] * len(needs)
        where = self._reader.located(self._numbering.ids)
        nbytes = zlib.compress(where["raw"].astype("<i8").tobytes(), 1)
        return [(min(windows), nbytes, where["checksum"].tobytes(), needs)] * len(needs)

    def run(self, peers: Collective, task: Any) -> Brought:
        """Carry out a task of `answer`. Raises a failure of this rank only after all exchanges."""
        needs, nbytes, shares = self._assigned(task)
        windows = shares_of(peers.rank, shares, needs, nbytes)
        ahead = self._begin(windows[0], peers.rank) if windows else None
        for window, following in pairwise([*windows, ()]):
            assert ahead is not None
            own = self._awaited(ahead)
            ahead = self._begin(following, peers.rank)
            self._exchange(
                peers, [self._hold(share) for share in window if share.reader != peers.rank], own
            )
        self._later.settle()
        left = [job for jobs in self._left.values() for job in jobs]
        return Brought(left, self._read_bytes, self._received_bytes)

    def _assigned(self, task: Any) -> tuple[Needs, "NDArray[np.int64]", Shares]:
        """Needs of the ranks, sizes of the chunks, and what each rank does."""
        window_bytes, packed_sizes, self._checksums, packed_needs = task
        count = len(self._numbering)
        nbytes = np.frombuffer(zlib.decompress(packed_sizes), "<i8")
        needs = Needs.unpacked(packed_needs, count)
        return needs, nbytes, plan_shares(needs, nbytes, window_bytes)

    def _begin(self, window: Sequence[Share], rank: int) -> "Future[list[_Held]]":
        """Read this rank's part of a window while the previous window is exchanged."""
        held = [self._hold(share) for share in window if share.reader == rank]
        return self._reader.threads.submit(lambda: self._read(held))

    def _awaited(self, reading: "Future[list[_Held]]") -> list[_Held]:
        """Wait for the read-ahead, also if this process is interrupted meanwhile."""
        while True:
            with self._later.failing():
                return reading.result()

    def _read(self, held: list[_Held]) -> list[_Held]:
        with self._later.failing():
            if held and not self._later.failed:
                self._reader.fetch([(each.jobs[0], each.memory) for each in held], self._reading)
                self._read_bytes += sum(each.share.nbytes for each in held)
        return held

    def _exchange(self, peers: Collective, incoming: Sequence[_Held], own: Sequence[_Held]) -> None:
        outgoing = [RankBytes(rank, each.memory) for each in own for rank in each.share.receivers]
        with self._later.failing():
            peers.exchange(
                outgoing, [RankBytes(each.share.reader, each.memory) for each in incoming]
            )
        if not self._later.failed:
            with self._later.failing():
                for each in own:
                    self._land(each)
                self._reader.threads.spread(self._receive, incoming)

    def _receive(self, held: _Held) -> None:
        """Verify what arrived. A chunk that does not match stays among the jobs and is read from
        the store, which raises the error if it is damaged there too.
        """
        at = held.share.number * CHECKSUM_BYTES
        if checksum(held.memory) == self._checksums[at : at + CHECKSUM_BYTES] and (
            not self._reader.verify_ids or digest(held.memory) == held.chunk
        ):
            self._land(held)
            with self._lock:
                self._received_bytes += held.share.nbytes

    def _land(self, held: _Held) -> None:
        for job in held.jobs:
            if job is not held.at_home:
                job.land(held.memory)
        del self._left[held.chunk]

    def _hold(self, share: Share) -> _Held:
        """Memory for a chunk: its place in the target, if it has one."""
        jobs = self._left[self._numbering.id_of(share.number)]
        for job in jobs:
            if (place := job.place) is not None and len(place) == share.nbytes:
                return _Held(share, place, jobs, job)
        return _Held(share, memoryview(bytearray(share.nbytes)), jobs, None)
