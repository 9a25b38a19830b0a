"""Tiered storage: a store on a fast disk with a mirror that receives its commits in the background.

The difference between the two logs tells what to upload, so a crash loses nothing and nothing is
sent twice. While the mirror is unavailable, commits continue and the upload is retried. Chunks that
the disk lost are read from the mirror and repaired from it.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from ckptstore.core.forks import Condition, survives_forks
from ckptstore.core.ids import CHUNK_ID_BYTES, ChunkId, digest
from ckptstore.core.process import start
from ckptstore.errors import CkptStoreError, NotFound, Unavailable
from ckptstore.log.resolve import Resolved, newest_first
from ckptstore.log.state import State
from ckptstore.maintenance.check import Share
from ckptstore.maintenance.check.offline_store import offline_store_of
from ckptstore.maintenance.forget import forget_commits, plan_retention
from ckptstore.maintenance.gc import GcOptions, collect
from ckptstore.maintenance.mirror import Mirrored, MirrorOptions, mirror
from ckptstore.maintenance.mirror_match import Leaves, compare_leaves
from ckptstore.maintenance.mirror_plan import all_commits, counterparts, find_akin, other_end
from ckptstore.maintenance.repair import repair
from ckptstore.maintenance.retention import Policy
from ckptstore.maintenance.thin import thin_commit
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader

logger = logging.getLogger("ckptstore")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
THREADS = 2
"""Uploads must not take processor time from training."""

T = TypeVar("T")


class Tier:
    """The mirror of one open store. Its own thread uploads; any thread may call the other
    methods."""

    def __init__(
        self,
        own: StoreHandle,
        place: str,
        *,
        keep: Sequence[Policy] = (),
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
    ) -> None:
        """`own` is the store, opened for uploading alone, and closed with this.

        Uploaded commits that no policy of `keep` keeps are forgotten here and collected; without
        policies none are. `storage_options` and `index` are the mirror's.
        """
        self.place = place
        self._keep = tuple(keep)
        self._own = own
        self._storage_options, self._index = storage_options, index
        self._threads = ThreadPool(THREADS)
        self._broken: BaseException | None = None
        self._damaged = self._closing = False
        self._remote: tuple[StoreHandle, ExitStack] | None = None
        self._thread: threading.Thread | None = None
        survives_forks(self)
        # Commits made before this process are uploaded too.
        self._wanted = 1
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
        self._failed = False

    def wake(self) -> None:
        """Signal that something was committed or tagged here."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all earlier commits have arrived; False after `timeout_s`, or if the mirror
        is unavailable, or closed before they had, or if this is a forked child that has committed
        something."""
        with self._changed:
            wanted = self._wanted
            if self._thread is None:
                return not wanted
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
            if not self.flush():
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
        local one first if both have it."""
        rows: list[tuple[int, int, Reader | None, Resolved]] = []
        rows += [(here.commits[info.id].time_ns, 1, None, info) for info in newest_first(here, run)]
        there = self._ask(lambda remote: remote.log.replay())
        if there is not None:
            known = {info.id: time_ns for time_ns, _, _, info in rows}
            reader = self._reader()
            rows += [
                (known.get(i.id, there.commits[i.id].time_ns), 0, reader, i)
                for i in newest_first(there, run)
            ]
        return [
            (reader, info)
            for _, _, reader, info in sorted(rows, key=lambda row: row[:2], reverse=True)
        ]

    def _ask(self, question: Callable[[StoreHandle], T | None]) -> T | None:
        """The mirror's answer, or None (with a warning) if it is unavailable."""
        try:
            return question(self._opened())
        except Unavailable as error:
            logger.warning("the mirror %s does not answer: %s", self.place, error)
            return None

    def _reader(self) -> Reader:
        remote = self._opened()
        return Reader(remote.config, remote.objects, self._threads, verify_ids=True)

    def rescue(self, ids: bytes, out: Sequence[memoryview], error: CkptStoreError) -> None:
        """Read the chunks that the disk lost from the mirror: `out` holds what could be read.
        Raises `error` if that fails."""
        bad = [i for i, memory in enumerate(out) if digest(memory) != _id(ids, i)]
        logger.warning("%s; read from %s instead", error, self.place)
        try:
            self._opened().objects.read_into(
                b"".join(_id(ids, i) for i in bad), [out[i] for i in bad], verify_ids=True
            )
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
                wanted = self._wanted
            if self._done >= wanted:
                continue
            failed = not self._try()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if failed else FIRST_PAUSE_S
            with self._changed:
                self._done = self._done if failed else wanted
                self._failed = failed
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closing or (self._done < self._wanted and not self._failed)

    def _try(self) -> bool:
        try:
            self._send()
        except (CkptStoreError, OSError) as error:
            logger.warning(
                "%s was not updated; commits continue and the upload is retried: %s",
                self.place,
                error,
            )
            return False
        return True

    def _send(self) -> None:
        remote = self._opened()
        done = mirror(
            self._own,
            remote,
            all_commits(self._own.log.replay()),
            MirrorOptions(force=True),
            self._threads,
        )
        self._damaged = self._damaged or bool(done.damaged)
        if self._damaged:
            self._heal(remote)
        if self._keep:
            self._trim(remote.log.replay(), done)

    def _heal(self, remote: StoreHandle) -> None:
        """Repair the damage found here. New damage, and damage that could not be repaired, is
        retried next time."""
        self._damaged = False
        try:
            repair(offline_store_of(self._own), mirrors=[remote.storage], apply=True, share=Share())
        except BaseException:
            self._damaged = True
            raise

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
