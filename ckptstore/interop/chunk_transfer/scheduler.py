"""Which chunk is asked of which peer? Does no I/O.

Threads take chunks, land them or give them back, until all have landed or no peer is left. A
failing peer is asked again a few times; each chunk from it resets the count. Connections that break
together are one failure. A slow peer is asked until the deadline if no other peer has the missing
chunks. A peer is not asked twice for a chunk that it lacks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore.core.config import MIB, RUN_BYTES
from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.interop.chunk_transfer.connection import Deadline
from ckptstore.interop.chunk_transfer.protocol import IDS_PER_REQUEST

FAILURES_MAX = 4
"""A peer is dropped after this many consecutive failures."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk to fetch. It is received into `memory`, or into temporary memory. `land` is called
    with the verified bytes and must copy temporary ones.

    With `numbered`, `chunk` is a number: `land` gets any bytes, and a peer need not have the chunk.
    """

    chunk: bytes
    nbytes: int
    memory: memoryview | None
    land: Callable[[memoryview], object]
    numbered: bool = False


class Work:
    """The chunks of one fetch, shared by the threads that ask the numbered `peers`."""

    def __init__(
        self, wanted: Sequence[Wanted], peers: int, max_workers: int, deadline: Deadline
    ) -> None:
        self._todo = deque(wanted)
        # Few chunks are divided evenly; many are taken at each thread's own speed.
        self._batch_bytes = min(
            RUN_BYTES, max(MIB, sum(each.nbytes for each in wanted) // max_workers)
        )
        self._missing = len(wanted)
        self._deadline = deadline
        self._failures = [0] * peers
        self._struck_at = [float("-inf")] * peers
        self._slow: set[int] = set()
        self._lacks: list[set[bytes]] = [set() for _ in range(peers)]
        self._lost: dict[int, CkptStoreError] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def take(self, peer: int) -> list[Wanted]:
        """The next chunks to ask of `peer`; empty when nothing is left. Waits while other peers are
        asked for chunks that this one could supply.
        """
        with self._changed:
            while not self._over(peer):
                if batch := self._batch(peer):
                    return batch
                self._wait()
            return []

    def landed(self, peer: int) -> None:
        """Mark a chunk from `peer` as complete, or as no longer needed."""
        with self._changed:
            self._failures[peer] = 0
            self._slow.discard(peer)
            self._missing -= 1
            if not self._missing:
                self._changed.notify_all()

    def back(self, peer: int, wanted: Sequence[Wanted], *, lacked: bool = False) -> None:
        """Give back chunks that `peer` did not deliver; with `lacked`, it does not have them."""
        with self._changed:
            self._todo.extendleft(reversed(wanted))
            if lacked:
                self._lacks[peer].update(each.chunk for each in wanted)
                self._check()
            self._changed.notify_all()

    def count_failure(
        self,
        peer: int,
        error: CkptStoreError,
        *,
        final: bool = False,
        slow: bool = False,
        since: float = float("inf"),
    ) -> None:
        """Count a failure of `peer`, on a connection begun at `since`. A `slow` peer is no failure:
        others are asked first.
        """
        with self._changed:
            if slow:
                self._slow.add(peer)
            elif since > self._struck_at[peer]:
                self._failures[peer] += 1
                self._struck_at[peer] = time.monotonic()
            if final or self._failures[peer] >= FAILURES_MAX:
                self._lost[peer] = error
                self._check()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop: `finish` raises `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def finish(self) -> None:
        """Return when all chunks have landed; raises the error that prevents it."""
        with self._changed:
            while self._missing and not self._error:
                self._wait()
            if self._error:
                raise self._error

    @property
    def lost(self) -> dict[int, CkptStoreError]:
        """The dropped peers, and why."""
        return self._lost

    def _over(self, peer: int) -> bool:
        return self._error is not None or not self._missing or peer in self._lost

    def _batch(self, peer: int) -> list[Wanted]:
        batch: list[Wanted] = []
        passed: list[Wanted] = []
        size = 0
        while (
            self._todo and len(batch) < IDS_PER_REQUEST and (not batch or size < self._batch_bytes)
        ):
            each = self._todo.popleft()
            if each.chunk in self._lacks[peer] or (peer in self._slow and self._faster(each)):
                passed.append(each)
                continue
            batch.append(each)
            size += each.nbytes
        self._todo.extendleft(reversed(passed))
        return batch

    def _faster(self, each: Wanted) -> bool:
        """Whether a peer that is not slow may have this chunk."""
        peers = set(range(len(self._failures))) - self._slow - self._lost.keys()
        return any(each.chunk not in self._lacks[peer] for peer in peers)

    def _wait(self) -> None:
        try:
            self._changed.wait(self._deadline.left())
        except TimeoutError as error:
            self._error = self._error or error

    def _check(self) -> None:
        """Fail if no peer is left, or none has a missing chunk."""
        living = [peer for peer in range(len(self._failures)) if peer not in self._lost]
        if not living:
            self._error = self._error or all_lost(list(self._lost.values()))
            return
        gone = next(
            (
                each
                for each in self._todo
                if all(each.chunk in self._lacks[peer] for peer in living)
            ),
            None,
        )
        if gone and not self._error:
            self._error = Unavailable(
                f"no peer has chunk {gone.chunk.hex()[:12]} any more; receive again"
            )


def all_lost(errors: Sequence[CkptStoreError]) -> CkptStoreError:
    """The error when no peer is left: the one peer's error, or a summary of all."""
    if len({type(error) for error in errors}) == 1:
        return type(errors[0])("; ".join(dict.fromkeys(map(str, errors))))
    return Unavailable("no peer could be received from: " + "; ".join(map(str, errors)))
