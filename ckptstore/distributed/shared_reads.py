"""How do ranks get chunks from slow storage that several of them need? One reads each, and sends it
to the others.

Rank 0 says which, by what all ranks need (`distributed.read_assignment`). A rank that cannot read
still sends placeholders, so that peers do not block.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, checksum, digest
from ckptstore.distributed.collective import Collective, DeferredErrors, RankBytes
from ckptstore.distributed.read_assignment import (
    Share,
    decode_edges,
    edges_of,
    encode_edges,
    plan_shares,
    shared_by,
    shares_of,
    tasks_of,
)
from ckptstore.restore.reader import ChunkRead, Reader, Reading
from ckptstore.restore.restore import Brought

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Numbering:
    """The numbers of a commit's chunks; `ids` are joined in the order in which the commit names
    them.
    """

    def __init__(self, ids: bytes) -> None:
        self._key = np.dtype("<u8")  # 8 bytes are compared in a quarter of the time that 32 take
        self._known, first, which = self._distinct(ids)
        words = np.frombuffer(ids, "<u8").reshape(-1, CHUNK_ID_BYTES // 8)
        again = np.flatnonzero(first[which] != np.arange(len(which)))
        if (words[again] != words[first[which[again]]]).any():
            self._key = np.dtype(f"V{CHUNK_ID_BYTES}")
            self._known, first, _ = self._distinct(ids)
        self._ids = np.frombuffer(ids, f"V{CHUNK_ID_BYTES}")[np.sort(first)]
        self._numbers = np.empty(len(first), np.int64)
        self._numbers[np.argsort(first)] = np.arange(len(first))

    def _distinct(self, ids: bytes) -> "tuple[NDArray[Any], NDArray[np.intp], NDArray[np.intp]]":
        """Each id once, the place of its first, and which of them each of `ids` is."""
        return np.unique(self._keys(ids), return_index=True, return_inverse=True)

    def _keys(self, ids: bytes) -> "NDArray[Any]":
        """How ids are told apart: by their first bytes, or by all where those do not suffice."""
        return np.frombuffer(ids, self._key)[:: CHUNK_ID_BYTES // self._key.itemsize]

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

    def ids_of(self, numbers: "NDArray[np.int64]") -> bytes:
        """The ids of chunks, joined."""
        return self._ids[numbers].tobytes()

    def id_of(self, number: int) -> ChunkId:
        return ChunkId(self._ids[number].tobytes())

    def numbers(self, ids: bytes) -> "NDArray[np.int64]":
        """The number of each of `ids`, which the commit must name."""
        return self._numbers[np.searchsorted(self._known, self._keys(ids))]


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
        self._lock = threading.Lock()
        self._read_bytes = self._received_bytes = 0

    def need(self) -> Any:
        """This rank's message to the coordinator: its numbering, its limit of bytes in transfer,
        and the chunks that it needs. None if it works alone.
        """
        if not len(self._numbering):
            return None
        needed = np.zeros(len(self._numbering), bool)
        needed[self._numbering.numbers(b"".join(self._left))] = True
        need = encode_edges(edges_of(needed))
        return self._numbering.digest, self._reading.room.shared_bytes, need

    def answer(self, handed_in: Sequence[Any]) -> list[Any]:
        """The coordinator's answer to each rank: the chunks that it shares. None if ranks number
        chunks differently, as when they restore different parts.
        """
        numberings, windows, needs = zip(*handed_in, strict=True)
        ranks = len(handed_in)
        if len(set(numberings)) > 1:
            return [None] * ranks
        shared = shared_by(list(map(decode_edges, needs)), len(self._numbering))
        where = self._reader.located(self._numbering.ids_of(shared.chunks.numbers))
        rows = plan_shares(shared, ranks, where["raw"].astype(np.int64), min(windows))
        rows["checksum"] = where["checksum"]
        return tasks_of(shared, rows, ranks)

    def run(self, peers: Collective, task: Any) -> Brought:
        """Carry out a task of `answer`. Raises a failure of this rank only after all exchanges."""
        windows = shares_of(peers.rank, task)
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
        if checksum(held.memory) == held.share.checksum and (
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
