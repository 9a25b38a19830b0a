"""Tiered storage: a store on a fast disk with a mirror that receives its commits in the background.

The difference between the two logs tells what to upload, so a crash loses nothing and nothing is
sent twice. While the mirror is unavailable, commits continue and the upload is retried. Chunks that
the disk lost are read from the mirror and repaired from it.

Of the ranks of one host, which share the store, the one that leads a commit uploads it. Every rank
reads from the mirror.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, TypeVar

from ckptstore.errors import CkptStoreError, NotFound, Unavailable
from ckptstore.plugin.checks import Share, offline_store_of, repair
from ckptstore.plugin.handles import (
    CommitRow,
    Resolved,
    State,
    StoreHandle,
    by_age,
    find_commit,
    newest_first,
)
from ckptstore.plugin.mirrors import (
    Leaves,
    Mirrored,
    MirrorOptions,
    all_commits,
    compare_leaves,
    counterparts,
    find_akin,
    mirror,
    other_end,
)
from ckptstore.plugin.model import CHUNK_ID_BYTES, ChunkId, CommitId, digest
from ckptstore.plugin.policies import Policy
from ckptstore.plugin.reading import Reader
from ckptstore.plugin.upkeep import GcOptions, collect, forget_commits, plan_retention, thin_commit
from ckptstore.plugin.work import Condition, ThreadPool, start, survives_forks

logger = logging.getLogger("ckptstore")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
LOOK_S = 0.5
"""Pause between two looks at what another rank uploads."""
THREADS = 2
"""Uploads must not take processor time from training."""

T = TypeVar("T")

Arrived: TypeAlias = Callable[[], object]
"""Called when a commit has arrived in the mirror."""


def due_commits(
    here: State, there: State, every_steps: int, *, newest: bool = False
) -> frozenset[CommitId]:
    """The commits of the log `here` to have in the mirror, whose log is `there`. Pure.

    Of each run these are what it has, and the first commit after each multiple of `every_steps`;
    commits without a step or with a tag, and the newest if asked for. It does not matter which of
    the others are still here.
    """
    if every_steps == 1:
        return all_commits(here)
    always = {*there.commits, *there.replaced, *here.tags.values()}
    always |= {heads[-1] for heads in here.runs.values() if newest and heads}
    due, passed = set[CommitId](), set[str]()
    newest_there = [(run, heads[-1]) for run, heads in there.runs.items() if heads]
    last = {run: there.commits[commit] for run, commit in newest_there}
    ours = {run: here.commits[each] for run, each in newest_there if each in here.commits}
    for commit, row in reversed(by_age(here, None)):
        before = last.get(row.run)
        if before is None or _is_later(row, before, ours.get(row.run)):
            passed.add(row.run)  # as is all that follows here, whatever a clock says
        later = row.run in passed
        begins = before is None or _window(row, every_steps) != _window(before, every_steps)
        if commit in always or (later and begins):
            due.add(commit)
            last[row.run] = row if later or before is None else before
    return frozenset(due)


def _is_later(row: CommitRow, newest: CommitRow, ours: CommitRow | None) -> bool:
    """Whether a commit came after the `newest` one of the mirror. This log says so if it has that
    one: `ours`. Else times do, or steps: a clock may be set back, and each host has its own."""
    if ours is not None:
        return row.age > ours.age
    return row.time_ns > newest.time_ns or (row.step or 0) > (newest.step or 0)


def _window(row: CommitRow, steps: int) -> object:
    """What two commits share if no multiple of `steps` lies between them; a commit without a step
    shares it with none."""
    return object() if row.step is None else row.step // steps


def is_covered(commit: CommitId, here: State, there: State) -> bool:
    """Whether `there` has `commit` of `here`, or a newer one of its run. Pure."""
    row = here.commits.get(commit)
    if row is None:
        return True  # forgotten here, after a newer one had arrived
    return any(
        each in there.commits or each in there.replaced
        for each, other in by_age(here, row.run)
        if other.age >= row.age
    )


class Tier:
    """The mirror of one open store. Its own thread uploads; any thread may call the other
    methods."""

    def __init__(
        self,
        own: StoreHandle,
        place: str,
        *,
        keep: Sequence[Policy] = (),
        every_steps: int = 1,
        leads: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
    ) -> None:
        """`own` is the store, opened for uploading alone, and closed with this.

        Uploaded commits that no policy of `keep` keeps are forgotten here and collected; without
        policies none are. Of each run, the first commit after each multiple of `every_steps` is
        uploaded. The process that `leads` uploads what it finds, others what they commit alone.
        `storage_options` and `index` are the mirror's.
        """
        self.place = place
        self._keep, self._every_steps = tuple(keep), every_steps
        self._own = own
        self._storage_options, self._index = storage_options, index
        self._threads = ThreadPool(THREADS)
        self._broken: BaseException | None = None
        self._damaged = self._closing = False
        self._remote: tuple[StoreHandle, ExitStack] | None = None
        self._thread: threading.Thread | None = None
        survives_forks(self)
        self._sends = leads
        # Commits made before this process are uploaded too.
        self._wanted = int(leads)
        self._thread = thread = threading.Thread(
            target=self._run, name="ckptstore-tier", daemon=True
        )
        try:
            start(thread, f"no thread can be started that uploads to {place}")
        except Unavailable:
            own.close()
            raise

    def forked(self) -> None:
        """A child has no thread that uploads; its parent sends what was wanted before the fork."""
        self._changed, self._remote_lock = Condition(), threading.Lock()
        self._thread = None
        self._wanted = self._done = 0
        self._failed = self._newest = False
        self._watched: list[tuple[CommitId, Arrived]] = []

    def wake(self) -> None:
        """Signal that something was committed or tagged here."""
        with self._changed:
            self._sends = True
            self._wanted += 1
            self._changed.notify_all()

    def watch(self, commit: CommitId, arrived: "Arrived") -> None:
        """Call `arrived` once the mirror has `commit`, or a newer one of its run. It is forgotten
        if this process sends neither."""
        with self._changed:
            self._watched.append((commit, arrived))
        self.wake()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all earlier commits have arrived, or with `every_steps` the newest.

        Returns False after `timeout_s`, or if the mirror is unavailable, or closed before they had,
        or if this is a forked child that has committed something.

        Where another rank uploads, this waits until it has: let that rank call this, too.
        """
        with self._changed:
            wanted = self._wanted
            if self._thread is None:
                return not wanted
        since = time.monotonic()
        if wanted and not self._flush_own(timeout_s):
            return False
        if self._sends:
            return True
        left_s = None if timeout_s is None else since + timeout_s - time.monotonic()
        return self._await_others(left_s)

    def _flush_own(self, timeout_s: float | None) -> bool:
        with self._changed:
            wanted = self._wanted
            if self._every_steps > 1:
                self._wanted = wanted = wanted + 1
                self._newest = True
            self._failed = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._done >= wanted or self._failed or self._broken or self._closing,
                timeout_s,
            )
            if self._broken:
                raise RuntimeError(
                    f"the upload to {self.place} ended with an error; open the store again"
                ) from self._broken
            return self._done >= wanted

    def close(self) -> None:
        """Upload what can be uploaded. If the mirror is unavailable, the next process that opens
        the store continues."""
        try:
            if self._wanted and not self.flush():
                logger.warning(
                    "not everything in %s has reached %s; it is sent when the store is opened "
                    "again",
                    self._own.url,
                    self.place,
                )
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread:
                self._thread.join()
            self._threads.close()
            self._own.close()
            if self._remote:
                self._remote[1].close()

    def _await_others(self, timeout_s: float | None) -> bool:
        """Look into the mirror until it has the newest commit of each run, or a newer one."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            there = self._ask(lambda remote: remote.log.replay(refresh=True))
            if there is None:
                return False
            here = self._own.log.replay(refresh=True)
            if all(is_covered(heads[-1], here, there) for heads in here.runs.values() if heads):
                return True
            left_s = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
            with self._changed:
                if left_s <= 0 or self._changed.wait_for(lambda: self._closing, left_s):
                    return False

    # -- reading --

    def find(self, ref: str | int, run: str) -> tuple[Reader, Resolved] | None:
        """The commit that `ref` names in the mirror, and its reader; None if there is none.

        Raises `InvalidInput` for a beginning that several ids there have.
        """

        def look(remote: StoreHandle) -> Resolved | None:
            try:
                return find_commit(remote, ref, run)
            except NotFound:
                return None

        found = self._ask(look)
        return found and (self._reader(), found)

    def newest_first(self, run: str, here: State) -> list[tuple[Reader | None, Resolved]]:
        """The commits of `run` here (without a reader) and in the mirror, newest first; the
        local one first if both have it.

        Raises `Unavailable` if there are none here and the mirror does not answer: a training
        would begin anew, and pass for the newest.
        """
        mine = newest_first(here, run)
        there = self._ask(lambda remote: remote.log.replay(), alone=not mine)
        theirs, known = newest_first(there, run) if there else [], dict[CommitId, int]()
        reader = self._reader() if theirs else None

        def reach(row: CommitRow) -> int:
            """The time of a commit; it came after its parents, also if a clock was set back."""
            return max(row.time_ns, *(known.get(each, 0) for each in row.parents), 0)

        for info in reversed(theirs):
            assert there
            known[info.id] = reach(there.commits[info.id])
        latest_ns = 0
        for info in reversed(mine):
            # This log knows what came later.
            came_ns = max(reach(here.commits[info.id]), known.get(info.id, 0))
            latest_ns = known[info.id] = max(latest_ns, came_ns)
        rows = [(known[info.id], True, info) for info in mine]
        rows += [(known[info.id], False, info) for info in theirs]
        return [
            (None if is_here else reader, info)
            for _, is_here, info in sorted(rows, key=lambda row: row[:2], reverse=True)
        ]

    def reader(self) -> Reader:
        """Reads what the mirror has by now. Raises `Unavailable` if it does not answer."""
        self._opened().log.replay(refresh=True)
        return self._reader()

    def _ask(self, question: Callable[[StoreHandle], T | None], *, alone: bool = False) -> T | None:
        """The mirror's answer, or None (with a warning) if it is unavailable; raises that if the
        mirror is asked `alone`."""
        try:
            return question(self._opened())
        except Unavailable as error:
            if alone:
                raise Unavailable(
                    f"{self._own.url} has no commits of this run, and its mirror {self.place} does "
                    f"not answer: {error}; to begin anew without it, open without mirror="
                ) from error
            logger.warning("the mirror %s does not answer: %s", self.place, error)
            return None

    def _reader(self) -> Reader:
        remote = self._opened()
        return Reader(remote.config, remote.objects, self._threads, verify_ids=True)

    def rescue(self, ids: bytes, out: Sequence[memoryview], error: CkptStoreError) -> None:
        """Read the chunks that the disk lost from the mirror: `out` holds what could be read.
        Raises `error` if the mirror lacks them, too, and `Unavailable` if it does not answer: an
        older commit would take the place of one that can be had."""
        bad = [i for i, memory in enumerate(out) if digest(memory) != _id(ids, i)]
        logger.warning(
            "%s; %s", error, f"read from {self.place} instead" if bad else f"{self.place} is asked"
        )
        try:
            remote = self._opened()
            remote.log.replay()  # which asks, also for nothing
            remote.objects.read_into(
                b"".join(_id(ids, i) for i in bad), [out[i] for i in bad], verify_ids=True
            )
        except Unavailable as failed:
            raise Unavailable(
                f"{error}; its mirror {self.place} does not answer: {failed}; to go on without "
                "what it has, open without mirror="
            ) from failed
        except CkptStoreError as failed:
            error.add_note(f"and the mirror {self.place} does not have it: {failed}")
            raise error from failed
        self.damaged()

    def damaged(self) -> None:
        """Damage was found here: repair it in the background."""
        with self._changed:
            self._damaged = True
            self._wanted += 1
            self._changed.notify_all()

    def _opened(self) -> StoreHandle:
        with self._remote_lock:
            if self._remote is None:
                stack = ExitStack()
                end = other_end(
                    self.place,
                    like=self._own,
                    storage_options=self._storage_options,
                    index=self._index,
                )
                remote = stack.enter_context(end)
                self._remote = remote, stack
            return self._remote[0]

    # -- uploading --

    def _run(self) -> None:
        try:
            self._upload_until_closed()
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _upload_until_closed(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, pause_s if self._failed else None)
                if self._closing:
                    return
                wanted, newest = self._wanted, self._newest
                self._newest = False
            if self._done >= wanted:
                continue
            failed = not self._try(newest)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if failed else FIRST_PAUSE_S
            with self._changed:
                self._done = self._done if failed else wanted
                self._failed, self._newest = failed, self._newest or (failed and newest)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closing or (self._done < self._wanted and not self._failed)

    def _try(self, newest: bool) -> bool:
        try:
            self._send(newest)
        except (CkptStoreError, OSError) as error:
            logger.warning(
                "%s was not updated; commits continue and the upload is retried: %s",
                self.place,
                error,
            )
            return False
        return True

    def _send(self, newest: bool) -> None:
        state = self._own.log.replay()
        if self._remote:  # before it is asked: what is not to be sent need not wait for it
            due = due_commits(state, self._remote[0].log.state, self._every_steps)
            self._drop_passed(state, due)
        remote = self._opened()
        due = due_commits(state, remote.log.replay(), self._every_steps, newest=newest)
        done = mirror(self._own, remote, due, MirrorOptions(force=True), self._threads)
        self._tell(remote.log.state)
        self._damaged = self._damaged or bool(done.damaged)
        if self._damaged:
            self._heal(remote)
        if self._keep:
            self._trim(remote.log.replay(), done)

    def _tell(self, arrived: State) -> None:
        """Tell those who wait for commits that have arrived."""
        state = self._own.log.state
        with self._changed:
            watched, self._watched = self._watched, []
        for commit, tell in watched:
            if is_covered(commit, state, arrived):
                tell()
            else:
                with self._changed:
                    self._watched.append((commit, tell))

    def _heal(self, remote: StoreHandle) -> None:
        """Repair the damage found here. New damage, and damage that could not be repaired, is
        retried next time."""
        self._damaged = False
        try:
            repair(offline_store_of(self._own), mirrors=[remote.storage], apply=True, share=Share())
        except BaseException:
            self._damaged = True
            raise

    def _drop_passed(self, state: State, due: Collection[CommitId]) -> None:
        """Forget commits of `state` that no policy keeps and that are not to be sent. The two
        newest of each run stay in any case."""
        if self._every_steps == 1 or not self._keep:
            return
        reader = Reader(self._own.config, self._own.objects, self._threads)
        plan = plan_retention(self._own, state, self._keep, reader)
        if gone := [each.commit for each in plan.forgotten if each.commit not in due]:
            forget_commits(self._own, gone, reason=f"not for {self.place}")
            collect(self._own, GcOptions(at_once=frozenset(gone)))
            self._own.follow()

    def _trim(self, arrived: State, done: Mirrored) -> None:
        """Forget or thin commits here that no policy keeps whole and the mirror has."""
        reader = Reader(self._own.config, self._own.objects, self._threads)
        state = self._own.log.replay()
        plan = plan_retention(self._own, state, self._keep, reader)
        unsent = {commit for commit, _ in (*done.plan.pinned, *done.damaged)}
        decided = [each.commit for each in plan.decisions if each.commit not in unsent]
        akin = find_akin(self._own, self._opened(), decided)
        there = counterparts(state, arrived, decided, akin.found)
        compared = compare_leaves(self._own, self._opened(), state, arrived, there)
        # A commit that has other leaves there, or none that can be read, is no copy of this one.
        copied = frozenset(
            commit
            for commit, other in there.items()
            if commit == other or compared.get(commit) in (Leaves.NO_MORE, Leaves.MORE)
        )
        gone = [each.commit for each in plan.forgotten if each.commit in copied]
        thinned = [each for each in plan.thinned if each.commit in copied]
        if gone:
            forget_commits(self._own, gone, reason=f"in {self.place}")
        for each in thinned:
            thin_commit(self._own, reader, each.commit, each.thin)
        if gone or thinned:
            # What others forgot may not have arrived there, and what was forgotten or thinned there
            # has no other copy.
            at_once = frozenset(
                commit
                for commit in (*gone, *(each.commit for each in thinned))
                if not arrived.commits[there[commit]].soft
                and (there[commit] == commit or compared[commit] is Leaves.NO_MORE)
            )
            collect(self._own, GcOptions(at_once=at_once))
            self._own.follow()


def _id(ids: bytes, i: int) -> ChunkId:
    return ChunkId(ids[i * CHUNK_ID_BYTES : (i + 1) * CHUNK_ID_BYTES])
