"""How does one rank read a chunk for all ranks that need it?

A chunk counts as verified only where it was hashed. So each receiver hashes what arrives, and reads
a chunk that does not match from the store. A rank that cannot read still sends placeholder bytes,
so that peers do not block, and reports its failure in the next round.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.core.ids import digest
from ckptstore.distributed.collective import Collective, DeferredErrors, Part
from ckptstore.distributed.read_assignment import (
    Need,
    Numbering,
    Share,
    decode_shares,
    encode_shares,
    plan_shares,
)
from ckptstore.restore.reader import ChunkRead, Reader, Reading
from ckptstore.restore.restore import Brought

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Held:
    """A chunk in transfer: its memory, the reads that need it, and the read whose target holds that
    memory.
    """

    share: Share
    memory: memoryview
    jobs: Sequence[ChunkRead]
    at_home: ChunkRead | None


class Broadcast:
    """The chunks of one restore that this rank shares with others."""

    def __init__(self, reader: Reader, reading: Reading, ids: bytes) -> None:
        """`ids` are the ids of all chunks of the commit, in its order."""
        self._reader, self._reading = reader, reading
        self._numbering = Numbering(ids)
        numbers = self._numbering.numbers(
            b"".join(job.piece.chunk for job in reading.jobs)
        ).tolist()
        self._jobs: dict[int, list[ChunkRead]] = {}
        for number, job in zip(numbers, reading.jobs, strict=True):
            self._jobs.setdefault(number, []).append(job)
        self._later = DeferredErrors()
        self._lock = threading.Lock()
        self._read_bytes = self._received_bytes = 0

    def need(self) -> Any:
        """This rank's need, for the coordinator."""
        numbers = np.fromiter(self._jobs, np.int64, len(self._jobs))
        return Need.of(self._numbering, self._reading.room.shared_bytes, numbers)

    def answer(self, handed_in: Sequence[Any]) -> list[Any]:
        """The coordinator's answer to the ranks' needs. Empty if ranks number chunks differently,
        as when they restore different parts.
        """
        needs = [Need(*each) for each in handed_in]
        if any(need.digest != self._numbering.digest for need in needs):
            return [None] * len(handed_in)
        bits, nbytes = self._bits(needs), self._reader.raw_bytes_of(self._numbering.ids)
        shares = plan_shares(bits, nbytes, min(need.window_bytes for need in needs))
        return [encode_shares(shares, bits, nbytes, rank) for rank in range(len(handed_in))]

    def run(self, peers: Collective, task: Any) -> Brought:
        """Read, send and receive as `task` says. Raises a failure of this rank only after the whole
        exchange.
        """
        windows = decode_shares(task, peers.rank, peers.size) if task else []
        ahead = self._begin(windows[0], peers.rank) if windows else None
        for window, following in zip(windows, [*windows[1:], ()], strict=True):
            assert ahead is not None
            own = self._awaited(ahead)
            ahead = self._begin(following, peers.rank)
            self._exchange(
                peers, [self._hold(share) for share in window if share.reader != peers.rank], own
            )
        self._later.settle()
        left = [job for jobs in self._jobs.values() for job in jobs]
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
                self._reader.fetch(
                    [each.jobs[0] for each in held], [each.memory for each in held], self._reading
                )
                self._read_bytes += sum(each.share.nbytes for each in held)
        return held

    def _exchange(self, peers: Collective, incoming: Sequence[_Held], own: Sequence[_Held]) -> None:
        outgoing = [Part(rank, each.memory) for each in own for rank in each.share.receivers]
        with self._later.failing():
            peers.exchange(outgoing, [Part(each.share.reader, each.memory) for each in incoming])
        if not self._later.failed:
            with self._later.failing():
                for each in own:
                    self._land(each)
                self._reader.threads.spread(self._receive, incoming)

    def _receive(self, held: _Held) -> None:
        """Verify what arrived. A chunk that does not match stays among the jobs and is read from
        the store, which raises the error if it is damaged there too.
        """
        if digest(held.memory) == held.jobs[0].piece.chunk:
            self._land(held)
            with self._lock:
                self._received_bytes += held.share.nbytes

    def _land(self, held: _Held) -> None:
        for job in held.jobs:
            if job is not held.at_home:
                job.land(held.memory)
        del self._jobs[held.share.number]

    def _hold(self, share: Share) -> _Held:
        """Memory for a chunk: its place in the target, if it has one."""
        jobs = self._jobs[share.number]
        for job in jobs:
            if (place := job.place) is not None and len(place) == share.nbytes:
                return _Held(share, place, jobs, job)
        return _Held(share, memoryview(bytearray(share.nbytes)), jobs, None)

    def _bits(self, needs: Sequence[Need]) -> "NDArray[np.bool_]":
        rows = [
            np.unpackbits(np.frombuffer(need.bits, np.uint8), count=len(self._numbering))
            for need in needs
        ]
        return np.array(rows, bool)
