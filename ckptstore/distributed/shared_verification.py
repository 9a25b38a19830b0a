"""How do ranks that read the same chunks in place share the work of hashing them?

One rank of a group compares a chunk with its id and sends the others its quick digest; they compare
that with what they read. This serves disks as fast as memory, where hashing takes longer than
reading. Each rank still hashes what is in its own memory, by BLAKE3 or by XXH3
(docs/decisions/041-…). A chunk that does not match is read again and compared with its id.
"""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore.core.ids import QUICK_DIGEST_BYTES, digest, quick_digest
from ckptstore.distributed.collective import Collective, DeferredErrors, Part
from ckptstore.distributed.read_assignment import ALONE, Numbering, plan_verifiers
from ckptstore.errors import CkptStoreError
from ckptstore.restore.reader import Reader, Reading
from ckptstore.restore.restore import Brought

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 8
"""This many consecutive ranks verify for each other. They usually run on one host and share its
processors.
"""

LEAST_BYTES = 16 << 20
"""A smaller commit is hashed sooner than ranks could agree on a split."""

_UNREAD = bytes(QUICK_DIGEST_BYTES)


class SharedVerification:
    """The chunks of one restore that this rank and others of its group read in place."""

    def __init__(self, reader: Reader, reading: Reading, ids: bytes) -> None:
        """`ids` are the ids of all chunks of the commit, in its order."""
        self._reader, self._reading = reader, reading
        self._numbering = Numbering(ids)
        self._jobs = [job for job in reading.jobs if job.place is not None]
        self._unplaced = [job for job in reading.jobs if job.place is None]
        self._numbers = self._numbering.numbers(b"".join(job.piece.chunk for job in self._jobs))

    def need(self) -> Any:
        """This rank's need: its numbering, and a bit for each chunk that it reads in place. Empty
        if the commit is small.
        """
        if len(self._numbering) * self._reader.chunk_bytes < LEAST_BYTES:
            return None
        needed = np.zeros(len(self._numbering), bool)
        needed[self._numbers] = True
        return self._numbering.digest, zlib.compress(np.packbits(needed).tobytes(), 1)

    def answer(self, handed_in: Sequence[Any]) -> list[Any]:
        """The coordinator's answer: to each rank, the needs of its group. Empty if ranks number
        chunks differently, as when they restore different parts.
        """
        numberings, needs = zip(*handed_in, strict=True)
        if len(set(numberings)) > 1:
            return [None] * len(handed_in)
        return [needs[rank - rank % GROUP :][:GROUP] for rank in range(len(needs))]

    def run(self, peers: Collective, task: Sequence[bytes]) -> Brought:
        """Read the chunks shared with the group and exchange their digests.

        Chunks that could not be read, or do not match the verifier's digest, stay among the jobs.
        Other failures are raised after the exchange.
        """
        me, later = peers.rank % GROUP, DeferredErrors()
        needs = self._needs(task)
        verifiers = plan_verifiers(needs)
        verifier = verifiers[self._numbers]
        found = [_UNREAD] * len(self._jobs)
        with later.failing(), suppress(CkptStoreError):
            self._read(np.flatnonzero(verifier != ALONE).tolist(), verifier == me, found)
        digests = np.frombuffer(b"".join(found), np.uint8).reshape(-1, QUICK_DIGEST_BYTES)
        said = np.zeros((len(self._numbering), QUICK_DIGEST_BYTES), np.uint8)
        said[self._numbers[verifier == me]] = digests[verifier == me]
        with later.failing():
            _exchange(peers, needs, verifiers, said)
        later.settle()
        right = digests.any(axis=1) & (digests == said[self._numbers]).all(axis=1)
        left = [
            job for job, is_right in zip(self._jobs, right.tolist(), strict=True) if not is_right
        ]
        read_bytes = sum(job.piece.raw_bytes for job in self._jobs) - sum(
            job.piece.raw_bytes for job in left
        )
        return Brought([*left, *self._unplaced], read_bytes, 0)

    def _needs(self, packed: Sequence[bytes]) -> "NDArray[np.bool_]":
        """What the ranks of the group read in place: ranks × chunks."""
        count = len(self._numbering)
        bits = [zlib.decompressobj().decompress(each, -(-count // 8)) for each in packed]
        return np.array(
            [np.unpackbits(np.frombuffer(each, np.uint8), count=count) for each in bits], bool
        )

    def _read(self, which: Sequence[int], mine: "NDArray[np.bool_]", found: list[bytes]) -> None:
        """Read the jobs `which` and put their digests in `found`. Chunks of `mine` are compared
        with their ids.
        """
        jobs = [self._jobs[i] for i in which]
        places = [job.place or memoryview(b"") for job in jobs]

        def check(i: int) -> bool:
            if mine[which[i]] and digest(places[i]) != jobs[i].piece.chunk:
                return False
            found[which[i]] = quick_digest(places[i])
            return True

        self._reader.fetch(jobs, places, self._reading, check)


def _exchange(
    peers: Collective,
    needs: "NDArray[np.bool_]",
    verifiers: "NDArray[np.int32]",
    said: "NDArray[np.uint8]",
) -> None:
    """Send this rank's digests to the ranks that need them, and fill in those of the other
    verifiers.
    """
    me = peers.rank % GROUP
    first, others = peers.rank - me, [rank for rank in range(len(needs)) if rank != me]
    outgoing = [said[(verifiers == me) & needs[rank]] for rank in others]
    theirs = [(verifiers == rank) & needs[me] for rank in others]
    incoming = [np.zeros((np.count_nonzero(each), QUICK_DIGEST_BYTES), np.uint8) for each in theirs]
    peers.exchange(
        [
            Part(first + rank, _memory(each))
            for rank, each in zip(others, outgoing, strict=True)
            if len(each)
        ],
        [
            Part(first + rank, _memory(each))
            for rank, each in zip(others, incoming, strict=True)
            if len(each)
        ],
    )
    for which, each in zip(theirs, incoming, strict=True):
        said[which] = each


def _memory(rows: "NDArray[np.uint8]") -> memoryview:
    return rows.reshape(-1).data
