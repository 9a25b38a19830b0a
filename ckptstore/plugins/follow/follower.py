"""Apply the commits of a run to a target in place, as they come; `Store.follow` makes one.

A commit is applied in four steps: look at the log, plan, read and verify what the target lacks into
separate memory, and write all of it while no reader is within `frozen()`. The first three change
nothing; if readers came or went meanwhile, the target is looked at again before the fourth. Then
the follower forgets what the target holds, and notes the commit when everything is written. So
after an error or an interrupt in between, the target counts as unknown: nobody gets in, and the
next commit is restored whole.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import torch

from ckptstore.errors import Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.plugin.handles import Resolved, State, resolve
from ckptstore.plugin.model import Box, ChunkId, CommitId, check_run, parse_ref
from ckptstore.plugin.reading import Reader, refuse_losses
from ckptstore.plugin.snapshots import (
    RestoreOperation,
    RestoreOptions,
    RestoreReport,
    Snapshot,
    StoreInternals,
    begin_restore,
)
from ckptstore.plugin.text import bytes_text
from ckptstore.plugin.work import Condition, free_bytes
from ckptstore.plugins.follow.plan import FollowPlan, TargetContent, plan
from ckptstore.plugins.follow.turns import Turns

logger = logging.getLogger("ckptstore")

POLL_S = 0.01
"""The shortest pause between two looks at the log."""

POLL_MAX_S = 10.0
"""The longest one: of a run that has made no commit for minutes."""

IDLE_SHARE = 20
"""Otherwise a pause is this fraction of the time since the last commit."""

BUDGET_SHARE = 2
"""The fraction of the host's free memory in which chunks may be held, by default."""

OnCommit: TypeAlias = Callable[[Snapshot], object]


@dataclass(frozen=True, slots=True)
class Applied:
    """A commit in the target, and what it took.

    `report` is as of `Snapshot.restore`; its `read_bytes` are those of the chunks that the target
    lacked. It took `read_s` to read them, and readers were kept out for `written_s`.
    """

    commit: Snapshot
    report: RestoreReport
    read_s: float
    written_s: float


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How to follow; `Store.follow` documents it."""

    run: str
    ref: str | int
    restore: RestoreOptions
    verify_ids: bool
    poll_s: float | None
    turn_timeout_s: float
    on_commit: OnCommit | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A commit of which all that the target lacks was read, and lies `aside`."""

    operation: RestoreOperation
    planned: FollowPlan
    aside: Mapping[ChunkId, memoryview]


class Follower:
    """A target that takes the commits of a run; use it as a context manager, or call `stop`.

    Threads may share it.
    """

    def __init__(
        self, internals: StoreInternals, target: MutableMapping[str, Any], options: FollowOptions
    ) -> None:
        check_run(options.run)
        parse_ref(options.ref)
        if options.poll_s is not None and not options.poll_s > 0:
            raise InvalidInput(f"poll_s is {options.poll_s!r}; wanted a number above 0, or None")
        self._internals, self._target, self._options = internals, target, options
        reader: Reader = internals.reader
        self._reader = reader.verifying_ids() if options.verify_ids else reader
        self._turns = Turns()
        self._applying = threading.RLock()
        self._news = Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._returned: CommitId | None = None
        self._applied: Applied | None = None
        self._held: TargetContent | None = None
        self._is_unknown = False
        self._memory = memoryview(b"")
        self._position: object = None
        self._heard_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if error is None:
            self._raise_failure()

    @property
    def applied(self) -> Applied | None:
        """The commit that the target holds, and what it took; None before the first one, and while
        the content of the target is unknown."""
        return self._applied

    def wait(self, timeout_s: float | None = None) -> Snapshot | None:
        """Wait for a commit that no call has returned yet, and apply it, unless the thread of
        `start` does.

        Commits between the one in the target and the newest are skipped.

        Args:
            timeout_s: How long to wait for a commit to appear; default: as long as it takes. With
                0, the log is looked at once.

        Returns:
            The commit that the target holds now; None if there is no new one.

        Raises:
            InvalidInput: The commit does not fit the target, which is as it was; or the chunks that
                it lacks exceed the budget; or an object refused its state; or this thread is within
                `frozen()`.
            Corrupt, NotFound: The commit is damaged, or was deleted while no newer one came.
            Unavailable: The store cannot be read, or readers were within `frozen()` for too long.

        Example:
            >>> commit = follower.wait(timeout_s=60)
        """
        self._turns.check_outside()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._raise_failure()
            is_behind = self._is_running
            if not is_behind:
                self._apply_newest()
            with self._news:
                applied = self._applied
                if applied is not None and applied.commit.id != self._returned:
                    self._returned = applied.commit.id
                    return applied.commit
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                pause_s = None if is_behind else self._pause_s()
                self._news.wait(min((s for s in (left_s, pause_s) if s is not None), default=None))

    @contextmanager
    def frozen(self, timeout_s: float | None = None) -> Iterator[Snapshot]:
        """Keep commits out of the target within the block, and tell which one it holds.

        Several threads may be within. A commit that is ready waits for them, and new readers wait
        for it.

        Args:
            timeout_s: How long to wait for a commit that is being applied; default: the follower's
                `turn_timeout_s`.

        Raises:
            NotFound: No commit was applied yet.
            Unavailable: It took longer than `timeout_s`; or the target is unknown, since the last
                write failed, and the newest commit cannot be read now.
            CkptStoreError: The thread of `start` ended with it; it is raised once.

        Example:
            >>> with follower.frozen() as commit:
            ...     answers = model.generate(prompts)
        """
        if not self._is_running:
            self._raise_failure()
        if self._is_unknown:
            self._apply_newest()
        within_s = self._options.turn_timeout_s if timeout_s is None else timeout_s
        with self._turns.reading(within_s):
            applied = self._applied
            if applied is None:
                raise NotFound(
                    f"the target holds no commit of {self._named}: call wait() first, and look at "
                    "its result"
                )
            yield applied.commit

    def start(self) -> None:
        """Apply commits from now on in a thread of its own.

        The thread repeats what storage did not answer, and a commit that is damaged: it logs that,
        and `wait` and `stop` raise it unless a commit was applied since. After any other error it
        ends, and the next call raises it.
        """
        if self._is_running:
            return
        self._raise_failure()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="ckptstore-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread of `start`, after the commit that it is applying. Idempotent. Raises its
        failure, if no call has yet. The target keeps its commit."""
        self._end()
        self._raise_failure()

    # -- the thread --

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _end(self) -> None:
        self._stopping.set()
        with self._news:
            self._news.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        with self._applying:
            self._memory = memoryview(b"")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._apply_newest()
            except (Unavailable, Corrupt, NotFound) as error:
                logger.warning("following %s: %s; trying again", self._named, error)
                self._failed(error)
            except BaseException as error:  # the next call raises it
                self._failed(error)
                return
            self._stopping.wait(self._pause_s())

    def _failed(self, error: BaseException | None) -> None:
        """Keep an error for the next call, or forget it; and wake those in `wait`."""
        with self._news:
            self._failure = error
            self._news.notify_all()

    def _raise_failure(self) -> None:
        with self._news:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _pause_s(self) -> float:
        if self._options.poll_s is not None:
            return self._options.poll_s
        idle_s = time.monotonic() - self._heard_s
        return min(max(POLL_S, idle_s / IDLE_SHARE), POLL_MAX_S)

    # -- one commit --

    @property
    def _named(self) -> str:
        return f"run {self._options.run} ({self._options.ref}) of {self._internals.handle.url}"

    def _apply_newest(self) -> None:
        """Apply the commit that the ref names now, unless the target holds it. An idle look costs
        one look-up in the log."""
        log, ahead = self._internals.handle.log, _ReadAhead(self._internals, self._options.run)
        with self._applying, ahead:
            read_ahead = ahead.begin if self._held else _nothing
            while (state := log.replay(refresh=True, tell=read_ahead)).position != self._position:
                found = self._named_by(state)
                if found is not None and not self._holds(found):
                    try:
                        ahead.wait()
                        applied = self._apply(found, state)
                    except (NotFound, Corrupt):
                        newer = self._named_by(log.replay(refresh=True))
                        if newer is None or newer.id == found.id:
                            raise
                        continue  # a gc may have deleted it meanwhile
                    self._tell(applied)
                self._position = state.position
                return  # not the next one: a trainer may be faster than this

    def _named_by(self, state: State) -> Resolved | None:
        """The commit that the ref names; None for a run without commits, or a tag that is yet to
        come."""
        try:
            return resolve(state, self._options.ref, self._options.run)
        except NotFound:
            return None

    def _holds(self, found: Resolved) -> bool:
        applied = self._applied
        return applied is not None and applied.commit.id == found.id

    def _apply(self, found: Resolved, state: State) -> Applied:
        # In a bucket both take a request's time: the new packs' footers, and the document.
        reads: list[Callable[[], object]] = [
            partial(self._internals.handle.objects.sync, state),
            partial(self._reader.document, found.session, found.id),
        ]
        self._reader.threads.spread(lambda read: read(), reads)
        snapshot = self._internals.snapshot(found, self._reader)
        if self._held is None:
            # Nobody sees the target now, so it is read into place, chunk by chunk.
            operation, planned = self._begin(snapshot)
            with self._turns.writing(self._options.turn_timeout_s):
                return self._write(snapshot, operation, planned, operation.read, 0.0)
        started_s, passed = time.monotonic(), self._turns.passed
        ready = self._ready(snapshot, None)
        read_s = time.monotonic() - started_s
        with self._turns.writing(self._options.turn_timeout_s):
            if self._turns.passed != passed:  # readers may have written to it, or replaced parts
                ready = self._ready(snapshot, ready)
            return self._write(
                snapshot, ready.operation, ready.planned, partial(self._land, ready), read_s
            )

    def _begin(self, snapshot: Snapshot) -> tuple[RestoreOperation, FollowPlan]:
        """Look at the target, and plan what to read for it."""
        held = self._held
        # What conversions lose is found out in the chunks that are read anyway.
        options = replace(self._options.restore, rehearse=held is None)
        operation = begin_restore(snapshot, self._target, options)
        _ = operation.reading  # refuses pages that contradict the shapes
        return operation, plan(held or TargetContent(), operation.wanted)

    def _ready(self, snapshot: Snapshot, before: "_Ready | None") -> "_Ready":
        """What the target lacks as it is now, read. `before` has chunks that were read."""
        operation, planned = self._begin(snapshot)
        known = before.aside if before else {}
        aside = {**known, **self._read_aside(operation, planned, known)}
        if before is None or planned.missing != before.planned.missing:
            _refuse_losses(planned, aside, snapshot)
        return _Ready(operation, planned, aside)

    def _land(self, ready: "_Ready") -> None:
        operation, aside = ready.operation, ready.aside
        self._reader.carry_out(operation.reading, ())  # leaves that lie in pages
        for job in ready.planned.lacking:
            job.land(aside[job.piece.chunk])
        needed_bytes, read_bytes = operation.reading.needed_bytes, sum(map(len, aside.values()))
        operation.report = replace(
            operation.report, needed_bytes=needed_bytes, read_bytes=read_bytes
        )

    def _write(
        self,
        snapshot: Snapshot,
        operation: RestoreOperation,
        planned: FollowPlan,
        write: Callable[[], None],
        read_s: float,
    ) -> Applied:
        """Write while nobody reads. Until all of it is done, the target counts as unknown."""
        started_s = time.monotonic()
        _synchronize(planned)  # what readers launched may still read
        self._is_unknown = True
        self._applied = self._held = None
        write()
        operation.finish()
        _synchronize(planned)
        self._held = planned.held()
        written_s = time.monotonic() - started_s
        self._applied = applied = Applied(snapshot, operation.report, read_s, written_s)
        self._is_unknown = False
        return applied

    def _read_aside(
        self,
        operation: RestoreOperation,
        planned: FollowPlan,
        known: Mapping[ChunkId, memoryview],
    ) -> dict[ChunkId, memoryview]:
        """The chunks that the target lacks, without `known` ones, verified, in memory of their own.

        It is kept for the next commit: of a run that changes every chunk, fresh pages would cost
        as much as the reads.
        """
        lacking = planned.lacking
        jobs = {job.piece.chunk: job for job in lacking if job.piece.chunk not in known}
        nbytes = sum(job.piece.raw_bytes for job in jobs.values())
        self._check_budget(nbytes + sum(map(len, known.values())))
        if known:
            memory = np.empty(nbytes, np.uint8).data
        else:
            if len(self._memory) < nbytes:
                self._memory = memoryview(b"")  # first, so that there are never two
                self._memory = np.empty(nbytes, np.uint8).data  # not zeroed: all of it is read
            memory = self._memory
        aside: dict[ChunkId, memoryview] = {}
        at = 0
        for chunk, job in jobs.items():
            aside[chunk] = memory[at : at + job.piece.raw_bytes]
            at += job.piece.raw_bytes
        if jobs:
            rows = [(job, aside[chunk]) for chunk, job in jobs.items()]
            self._reader.fetch(rows, operation.reading, planned.bases)
        return aside

    def _check_budget(self, nbytes: int) -> None:
        given = self._options.restore.memory_budget_bytes
        if given is None and nbytes <= len(self._memory):
            return
        free = free_bytes() if given is None else None
        budget = given if free is None else free // BUDGET_SHARE
        if budget is not None and nbytes > budget:
            raise InvalidInput(
                f"the newest commit of {self._named} changes chunks of {bytes_text(nbytes)}, which "
                f"are held in memory until they are verified, and {bytes_text(budget)} are allowed;"
                " the target is unchanged: raise memory_budget_bytes, or checkout(…).restore(…) "
                "into the target and follow anew"
            )

    def _tell(self, applied: Applied) -> None:
        self._heard_s = time.monotonic()
        self._failed(None)
        if self._options.on_commit is not None:
            self._options.on_commit(applied.commit)


def _nothing(entry: object) -> None:
    """The first commit is read into place."""


class _ReadAhead:
    """In a bucket, all that the first new entry of the log adds is read while others are looked
    for."""

    def __init__(self, internals: StoreInternals, run: str) -> None:
        self._objects, self._threads = internals.handle.objects, internals.reader.threads
        self._run, self._is_far = run, internals.handle.storage.capabilities.slow_requests
        self._reading: list[tuple[Callable[[], None], Any]] = []

    def begin(self, entry: Any) -> None:
        """Begin, unless an entry before was read ahead."""
        if self._is_far and not self._reading:
            read = partial(self._objects.read_ahead, entry, self._run)
            self._reading.append((read, self._threads.submit(read)))

    def wait(self) -> None:
        """Return when it has been read: by this thread, if all others are busy."""
        for read, reading in self._reading:
            if reading.cancel():
                read()
            else:
                reading.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reading:
            self._objects.storage.read_ahead({})


def _refuse_losses(
    planned: FollowPlan, aside: Mapping[ChunkId, memoryview], snapshot: Snapshot
) -> None:
    """Raise `InvalidInput` if a conversion loses more than precision, before anything is written.
    That all values of a leaf become zero is seen only where all of it is read."""
    found = []
    for target in planned.targets:
        want, losses = target.want, getattr(target.want.destination, "losses", None)
        if losses is None:
            continue
        inline = want.tree.content(want.number).inline
        counts, shape = losses.again(), want.tree.extent(want.number)[0]
        is_whole = inline is not None or len(target.lacking) == target.count
        part = Box((0,) * len(shape), shape)  # a box, so that nothing is said of the whole leaf
        counting = want._replace(destination=counts, box=want.box if is_whole else part)
        if inline is not None and want.box is None:
            counts.write(0, memoryview(inline))
        for job in target.lacking:
            job._replace(wanted=counting, memory=None).land(aside[job.piece.chunk])
        found.append(counting)
    refuse_losses(found, snapshot.id)


def _synchronize(planned: FollowPlan) -> None:
    """Wait for what was launched on the devices of the target."""
    for device in planned.devices:
        module: Any = getattr(torch, device.type, None)
        synchronize = getattr(module, "synchronize", None)
        if synchronize is not None:
            synchronize(device) if device.type in ("cuda", "xpu") else synchronize()
