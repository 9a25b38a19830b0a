"""How do many ranks restore one commit together?

Each rank reads what it needs. Of a chunk that several need, one reads it from slow storage and
sends it (`Broadcast`), or hashes it for others that read it from a fast disk too
(`SharedVerification`). A failure on one rank fails the restore on all. A rank that cannot read
still sends placeholders, so that peers do not block, and reports its failure in the next round.
"""

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from ckptstore.core.ids import QUICK_DIGEST_BYTES, CommitId, digest, quick_digest
from ckptstore.distributed.collective import Collective, DeferredErrors, Part
from ckptstore.distributed.rank_view import RankView, owners
from ckptstore.distributed.read_assignment import (
    ALONE,
    Need,
    Numbering,
    Share,
    decode_shares,
    encode_shares,
    plan_shares,
    plan_verifiers,
)
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput
from ckptstore.restore.reader import ChunkRead, Reader, Reading, Tree
from ckptstore.restore.restore import Brought, RestoreOperation
from ckptstore.state.shards import is_bound_to_world_size

if TYPE_CHECKING:
    from numpy.typing import NDArray


T = TypeVar("T")


def restore_together(
    peers: Collective,
    commit: CommitId,
    begin: Callable[[], RestoreOperation],
    common_of: Callable[[RestoreOperation], "Common"],
) -> RestoreOperation:
    """Restore `commit` on every rank of `peers`.

    No target changes before every rank has checked that the commit fits its state, and no result is
    returned before every rank has its part. `common_of` gives the way to share chunks that several
    ranks need.

    Raises one error on all ranks: `Conflict` if they restore different commits, otherwise the class
    that the causes share.
    """
    begun: list[tuple[RestoreOperation, Common]] = []

    def bind() -> Any:
        restoring = begin()
        common = common_of(restoring)
        begun.append((restoring, common))
        return commit, type(common).__name__, common.need()

    def share(handed_in: list[Any]) -> list[Any]:
        commits, kinds, needs = zip(*handed_in, strict=True)
        _check_same(commits)
        alike = len(set(kinds)) == 1 and all(needs)
        return begun[0][1].answer(needs) if alike else [None] * len(needs)

    task = peers.round("restore: bind", bind, share)
    restoring, common = begun[0]

    def read() -> None:
        restoring.read(common.run(peers, task) if task else None)

    peers.round("restore: read", read, lambda handed_in: handed_in)
    peers.round("restore: finish", restoring.finish, lambda handed_in: handed_in)
    return restoring


def agreed(peers: Collective, candidates: Sequence[CommitId]) -> list[CommitId]:
    """The coordinator's candidates, on every rank."""
    found: list[CommitId] = peers.round(
        "resume: choose", lambda: candidates, lambda handed_in: [handed_in[0]] * len(handed_in)
    )
    return found


def on_all(peers: Collective, act: Callable[[], T]) -> T:
    """The result of `act` on this rank; an error on any rank is raised on every rank."""
    found: list[T] = []

    peers.round("resume: open", lambda: found.append(act()), lambda handed_in: handed_in)
    return found[0]


def check_loaders(
    trees: Mapping[str, Tree], app_state: Mapping[str, Any], viewer: RankView
) -> None:
    """Raise `InvalidInput` for a data loader saved by another number of ranks."""
    for key, tree in trees.items():
        then = frozenset[int]().union(*owners(tree.schema.skeleton))
        other = then and then != frozenset(range(viewer.size)) and not viewer.private
        if other and key in app_state and is_bound_to_world_size(app_state[key]):
            raise InvalidInput(
                f"{key} is a data loader of {len(then)} ranks, and there are {viewer.size} now: "
                "places in the data would be lost. "
                f"Leave {key} out of the state and begin the epoch anew; or, for a loader that can "
                "go on from the states of others, set "
                f"any_world_size = True on it and pass private={{rank: rank whose to take}}"
            )


def _check_same(handed_in: Sequence[str]) -> None:
    if len(set(handed_in)) > 1:
        named = ", ".join(f"rank {rank}: {commit[:12]}" for rank, commit in enumerate(handed_in))
        raise Conflict(
            f"ranks restore different commits ({named}); name a commit by its step, its tag or its "
            "id on all of them"
        )


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


Common: TypeAlias = Broadcast | SharedVerification
"""How ranks share the work on chunks that several of them need. `need` is this rank's need for the
coordinator, None if it works alone; `answer` maps the needs of all ranks to a task for each, or to
None for all if any works alone; `run` carries out a task."""
