"""How do the ranks of one commit or restore act together?

In a round every rank hands in bytes or an error, and the coordinator (rank 0) answers each rank. An
error on any rank is raised on every rank. A rank that failed still takes part in the round, so that
the ranks stay in step for the next operation. Only a rank that is gone, or silent for longer than
the timeout, breaks the connections.

A `Link` carries the bytes: gloo between trainers (`distributed.gloo`), sockets between their
workers (`distributed.sockets`). This module needs no torch.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ckptstore.commit.pending import WhyNot
from ckptstore.distributed.framing import (
    MAX_BYTES,
    Cause,
    cause_of,
    causes_from,
    failure,
    pack,
    unpack,
)
from ckptstore.distributed.waiting import EVERY_RANK, MEETINGS, silent, told, warning_when_slow
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, Unavailable
from ckptstore.repository.thread_pool import wholly

T = TypeVar("T")

GRACE_S = 5.0
"""How long a disconnected rank waits for the coordinator's report of the rank that failed."""

REGROUP = "go on with a group of those left, or restart"
"""The advice in errors about a lost trainer."""

ROUND, DATA = range(2)
"""Lanes. Between two ranks, messages on one lane do not wait for messages on the other."""

_HEAD = struct.Struct("<16sIBxxxQ")
_OK, _FAILED = range(2)
_MARGIN = 1.1
_GONE = "gone"


Transfer: TypeAlias = Callable[[float], object]
"""A send or a receive in progress: waits for its end, for at most so many seconds. Raises
`RuntimeError` if the other rank is gone, or silent for that time."""


class Link(Protocol):
    """Connections to all other ranks. The bytes of a lane arrive in order, and both ends know the
    count in advance. Raises `RuntimeError` for a lost rank.
    """

    def send(self, rank: int, lane: int, memory: memoryview) -> Transfer: ...

    def receive(self, rank: int, lane: int, memory: memoryview) -> Transfer: ...

    def leave(self, name: str, data: bytes) -> None:
        """Leave `data` under `name` for ranks that can no longer be reached, if the link has a
        place for it.
        """

    def left(self, name: str, timeout_s: float) -> bytes | None:
        """The data left under `name`, waited for if the link has such a place."""


class RankBytes(NamedTuple):
    """Bytes to or from rank `rank`; a receive fills `memory`."""

    rank: int
    memory: memoryview


class Collective:
    """The ranks of one group, numbered as in that group. One operation at a time; rank 0 is the
    coordinator. Errors about a lost rank end with `advice`. With `called`, the callers' own threads
    take part, so a rank may be missing because it never made the call.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        size: int,
        timeout_s: float,
        advice: str = REGROUP,
        *,
        called: bool = False,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._link, self._advice = link, advice
        self._meetings = MEETINGS if called else {}
        self._was_late = False
        self._sequence = 0
        self._lost: dict[int, Cause] = {}
        self._announced = False  # whether the other ranks know of the lost ones
        self._unreached: set[int] = set()  # ranks with which an exchange failed
        self._lock = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.rank == 0

    @property
    def turn(self) -> int:
        """The number of the last round, which is equal on all ranks."""
        return self._sequence

    @property
    def lost(self) -> bool:
        """Whether a rank is lost, which rules out further collective operations."""
        return bool(self._lost)

    def check_reached(self, what: str = "commit: plan") -> None:
        """Raise `Unavailable` if a rank is lost and all remaining ranks know it."""
        if self._lost and (self._announced or not self.leads):
            raise self._incomplete(what)

    def round(
        self,
        what: str,
        mine: Callable[[], Any],
        answer: Callable[[list[Any]], Sequence[Any]],
        then: Callable[[Any], object] = lambda answer: None,
    ) -> Any:
        """Hand in the result of `mine` and return the coordinator's `answer` for this rank: values
        for `framing.pack`.

        `answer` runs on the coordinator only. It maps the values of all ranks, by rank, to one
        answer per rank. All ranks must call the same round `what` (at most 16 ASCII characters).
        `then` gets the answer on every rank.

        An interrupt of this process in `mine` is handed in as its failure. One that comes later is
        raised after the round: `answer` and `then` run to their end, on another thread.

        If anything fails on any rank, raises the same error on every rank: of the class that the
        causes share, with `causes` by rank.
        """
        with self._lock:
            self.check_reached(what)
            before, payload, own = self._sequence, b"", None
            try:
                payload = pack(mine())
                return wholly(partial(self._take_part, what, payload, None, answer, then))
            except BaseException as error:
                if self._sequence != before:
                    raise
                own = error
            return wholly(partial(self._take_part, what, b"", own, answer, then))

    def _take_part(
        self,
        what: str,
        payload: bytes,
        own: BaseException | None,
        answer: Callable[[list[Any]], Sequence[Any]],
        then: Callable[[Any], object],
    ) -> Any:
        """This rank's part of a round, which must not end halfway: the next round would read what
        this one left on the link."""
        self._sequence += 1
        if self.leads:
            found = self._coordinate(what, payload, own, answer)
        else:
            found = self._follow(what, payload, own)
        then(found)
        return found

    def share(
        self,
        what: str,
        mine: Callable[[], Any],
        join: Callable[[list[Any]], Any] | None = None,
        then: Callable[[Any], object] = lambda answer: None,
    ) -> Any:
        """A `round` with one answer for all ranks: `join` of their values, None without it."""
        return self.round(
            what, mine, lambda found: [join(found) if join else None] * len(found), then
        )

    def fail(self, what: str, error: BaseException) -> None:
        """Take part in the round `what` with `error`, which is raised."""

        def failing() -> None:
            raise error

        self.share(what, failing)

    def agreed(self, mine: list[T]) -> list[T]:
        """The coordinator's list, on every rank."""
        found: list[T] = self.share("resume: choose", lambda: mine, lambda handed_in: handed_in[0])
        return found

    def on_all(self, act: Callable[[], T]) -> T:
        """The result of `act` on this rank; an error on any rank is raised on every rank."""
        found: list[T] = []
        self.share("resume: open", lambda: found.append(act()))
        return found[0]

    def exchange(self, outgoing: Sequence[RankBytes], incoming: Sequence[RankBytes]) -> None:
        """Send and receive bytes directly; both sides must name the same parts in the same order.

        Raises `Unavailable` if a rank is lost, after the parts of all others; the next round tells
        the other ranks. Until then, a rank with more windows to exchange continues with placeholder
        bytes, since others wait for them. An interrupt of this process is also raised only after
        all parts.
        """
        wholly(partial(self._exchange, outgoing, incoming))

    def _exchange(self, outgoing: Sequence[RankBytes], incoming: Sequence[RankBytes]) -> None:
        works = [
            (part.rank, self._post(self._link.receive, part))
            for part in incoming
            if len(part.memory)
        ]
        works += [
            (part.rank, self._post(self._link.send, part)) for part in outgoing if len(part.memory)
        ]
        failed: RuntimeError | None = None
        for rank, work in works:
            try:
                if isinstance(work, RuntimeError):
                    raise work
                self._wait(work)
            except RuntimeError as error:
                self._unreached.add(rank)
                failed = failed or error
        if failed:
            raise Unavailable(
                f"a rank is gone, or was silent for {self.timeout_s:g} s, while bytes were "
                f"exchanged: {failed}"
            ) from failed

    def agree(self, begin: Callable[[], WhyNot | None], go: Callable[[], object]) -> WhyNot | None:
        """Call `begin` on every rank and return the reasons of all ranks; if there are none, each
        calls `go`, on another thread if this one may be interrupted.

        `begin` returns why this rank cannot begin now. An error that it raises on one rank is
        raised on all.
        """

        def join(found: Sequence[Any]) -> WhyNot | None:
            why = {rank: WhyNot(*each) for rank, each in enumerate(found) if each}
            text = "; ".join(f"rank {rank}: {each.text}" for rank, each in why.items())
            return WhyNot(text, any(each.hangs for each in why.values())) if why else None

        said = self.share("commit: begin", begin, join, lambda why: None if why else go())
        return WhyNot(*said) if said else None

    def is_due(self, due: bool, came: bool) -> tuple[bool, bool]:
        """Whether a commit is due by the coordinator's schedule, and whether any rank got a
        signal."""

        def join(found: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
            return found[0][0], any(came for _, came in found)

        due, came = self.share("every: decide", lambda: (due, came), join)
        return due, came

    def _post(self, begin: Callable[..., Any], part: RankBytes) -> Any:
        """Start the transfer of one part; returns the error if it cannot start."""
        if part.rank in self._unreached:
            return RuntimeError(f"rank {part.rank} could not be reached before")
        try:
            return begin(part.rank, DATA, part.memory)
        except RuntimeError as error:
            return error

    def _coordinate(
        self,
        what: str,
        payload: bytes,
        own: BaseException | None,
        answer: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        payloads, causes = self._gather(what)
        payloads[0] = payload
        if own is not None:
            causes[0] = cause_of(own)
        answers: list[bytes] = []
        if not causes:
            try:
                found = answer([unpack(payloads[rank]) for rank in range(self.size)])
                answers = [pack(each) for each in found]
            except BaseException as error:
                own, causes[0] = error, cause_of(error)
        if causes:
            self._announce(what, causes)
            self._raise(what, causes, own)
        for rank in range(1, self.size):
            self._try(rank, partial(self._send, rank, what, _OK, answers[rank]))
        return unpack(answers[0])

    def _gather(self, what: str) -> tuple[dict[int, bytes], dict[int, Cause]]:
        payloads: dict[int, bytes] = {}
        causes: dict[int, Cause] = {}
        deadline = time.monotonic() + self.timeout_s
        causes |= self._lost
        heads = {
            rank: self._start_head(rank) for rank in range(1, self.size) if rank not in self._lost
        }
        with self._warning_when_slow(what, lambda: silent(heads)):
            for rank, head in heads.items():
                received = self._try(rank, partial(self._finish, rank, what, head, deadline))
                if received is None:
                    if not any(head[1]):
                        self._lost[rank] = self._absent(what, self._lost[rank])
                    causes[rank] = self._lost[rank]
                elif received[0] == _FAILED:
                    causes[rank] = causes_from(unpack(received[1]))[rank]
                else:
                    payloads[rank] = received[1]
        return payloads, causes

    def _announce(self, what: str, causes: dict[int, Cause]) -> None:
        """Tell every rank that can be reached. The others look into the link's shared store."""
        data = pack(causes)
        if self._lost:
            self._announced = True
            self._link.leave(f"lost/{self._sequence}", data)
        for rank in range(1, self.size):
            if rank not in self._lost:
                self._try(rank, partial(self._send, rank, what, _FAILED, data))

    def _follow(self, what: str, payload: bytes, own: BaseException | None) -> Any:
        try:
            with self._warning_when_slow(
                what, lambda: "rank 0, which has not called, or waits for others itself"
            ):
                if own is None:
                    self._send(0, what, _OK, payload)
                else:
                    self._send(0, what, _FAILED, pack({self.rank: cause_of(own)}))
                status, answer = self._finish(
                    0, what, self._start_head(0), time.monotonic() + self.timeout_s * _MARGIN
                )
        except (RuntimeError, CkptStoreError) as error:
            self._lost[0] = self._absent(what, Cause(_GONE, told(error)))
            causes = self._post_mortem() or {0: self._lost[0]}
            if own is not None:
                causes[self.rank] = cause_of(own)
            self._raise(what, causes, own or error)
        said = unpack(answer)
        if status == _FAILED:
            causes = causes_from(said)
            if any(cause.kind == _GONE for cause in causes.values()):
                self._lost.update(causes)
            self._raise(what, causes, own)
        return said

    def _post_mortem(self) -> dict[int, Cause]:
        """The coordinator's report of a lost rank, from the link's shared store; empty if the
        coordinator itself is gone.

        Gloo closes all connections of a rank that one peer timed out on, before that rank itself
        hears of it. So this waits for the report.
        """
        found = self._link.left(f"lost/{self._sequence}", min(GRACE_S, self.timeout_s))
        return causes_from(unpack(found)) if found else {}

    def _raise(self, what: str, causes: dict[int, Cause], own: BaseException | None) -> None:
        if own is not None and not isinstance(own, Exception):
            raise own
        raise failure(
            what, {rank: self._readable(cause) for rank, cause in causes.items()}, self.size
        ) from own

    def _incomplete(self, what: str) -> Unavailable:
        gone = ", ".join(f"rank {rank}" for rank in sorted(self._lost))
        return Unavailable(f"{what} cannot begin: {gone} was lost before; {self._advice}")

    def _try(self, rank: int, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (RuntimeError, CkptStoreError) as error:
            self._lost[rank] = Cause(_GONE, told(error))
            return None

    def _warning_when_slow(
        self, what: str, absent: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """`waiting.warning_when_slow`; where callers meet, the first one comes soon."""
        meeting = what in self._meetings

        def missing() -> str:
            self._was_late = self._was_late or meeting
            return absent()

        return warning_when_slow(
            what,
            self.timeout_s,
            missing,
            soon=meeting and not self._was_late,
            advice=EVERY_RANK if meeting else "",
        )

    def _absent(self, what: str, cause: Cause) -> Cause:
        """The error cause for a rank that was missing in a round. Where callers' own threads take
        part, the rank may still be alive."""
        if what not in self._meetings:
            return cause
        call = self._meetings[what]
        return cause._replace(
            text=f"{cause.text}; if it lives, it did not call {call}: {EVERY_RANK}"
        )

    def _send(self, rank: int, what: str, status: int, payload: bytes) -> None:
        if len(payload) > MAX_BYTES:
            raise InvalidInput(f"a message of {len(payload)} bytes; wanted at most {MAX_BYTES}")
        head = _HEAD.pack(what.encode(), self._sequence, status, len(payload))
        self._wait(self._link.send(rank, ROUND, memoryview(head)))
        if payload:
            self._wait(self._link.send(rank, ROUND, memoryview(payload)))

    def _start_head(self, rank: int) -> tuple[Transfer | RuntimeError, bytearray]:
        head = bytearray(_HEAD.size)
        try:
            return self._link.receive(rank, ROUND, memoryview(head)), head
        except RuntimeError as error:
            return error, head

    def _finish(
        self,
        rank: int,
        what: str,
        started: tuple[Transfer | RuntimeError, bytearray],
        deadline: float,
    ) -> tuple[int, bytes]:
        work, head = started
        if isinstance(work, RuntimeError):
            raise work
        self._wait(work, max(deadline - time.monotonic(), 0.001))
        name, sequence, status, nbytes = _HEAD.unpack(head)
        theirs = name.rstrip(b"\0").decode(errors="replace")
        if nbytes > MAX_BYTES:
            raise Unavailable(
                f"rank {rank} announces {nbytes} bytes; do all ranks run one version of ckptstore?"
            )
        payload = bytearray(nbytes)
        if nbytes:
            self._wait(self._link.receive(rank, ROUND, memoryview(payload)))
        if status == _OK and (theirs, sequence) != (what, self._sequence):
            error = Conflict(
                f"it is at {theirs} ({sequence}) while rank {self.rank} is at {what} "
                f"({self._sequence}); all ranks have to make the same calls in the same order, "
                "none of them under `if rank == 0:`"
            )
            return _FAILED, pack({rank: cause_of(error)})
        return status, bytes(payload)

    def _wait(self, work: Transfer, timeout_s: float | None = None) -> None:
        work(self.timeout_s if timeout_s is None else timeout_s)

    def _readable(self, cause: Cause) -> Cause:
        if cause.kind != _GONE:
            return cause
        return Cause("Unavailable", f"gone, or silent for too long ({cause.text}); {self._advice}")


class DeferredErrors:
    """Keeps the first error of a rank while others wait for its data; `settle` raises it."""

    def __init__(self) -> None:
        self.failed: BaseException | None = None

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keep an error of the block, also an interrupt of this process."""
        try:
            yield
        except BaseException as error:
            self.failed = self.failed or error

    def settle(self) -> None:
        """Raise the kept error."""
        if self.failed:
            raise self.failed
