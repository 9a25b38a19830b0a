"""Use a store in training; maintenance is in `maintenance_api`, opening in `open_store`."""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, get_args

from ckptstore.commit.commit_metadata import label_of, refuse_unnamed
from ckptstore.commit.outages import Health
from ckptstore.core.ids import CommitId, check_run, check_tag
from ckptstore.core.model import CommitInfo, Skipped
from ckptstore.core.options import Async, Ranks, Verify
from ckptstore.core.public_calls import beside_commits, public_methods_of_store
from ckptstore.core.settings import Settings
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.internals import PendingCommit, StoreInternals, flats_of
from ckptstore.log.resolve import Resolved
from ckptstore.maintenance.forget import remove_tags, set_tag
from ckptstore.maintenance_api import Maintenance
from ckptstore.peers import agreed_schedule, calling, collective_of
from ckptstore.plugins.adopt.adoption import adopt
from ckptstore.plugins.follow.follower import Follower, FollowOptions, OnCommit
from ckptstore.plugins.reports.difference import Difference, compare, differing
from ckptstore.plugins.schedule.schedule import Schedule, rule_of
from ckptstore.plugins.signing import signatures
from ckptstore.plugins.tiers.tiers import Tier
from ckptstore.repository.resolve_ref import AnyRef, find_commit, log_resumed, through_pointers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.reader import Reader
from ckptstore.restore.restore import RestoreOptions, Select, check_whole, keys_of
from ckptstore.resuming import has_all_of
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state.staging_buffers import BufferPool

if TYPE_CHECKING:
    from ckptstore.distributed.collective import Collective
    from ckptstore.state.renaming import Rename
    from ckptstore.state.tensors import AskedDtype

logger = logging.getLogger("ckptstore")


@public_methods_of_store
class Store(Maintenance):
    """A store, open for one training run. Use it as a context manager, or call `close`.

    Threads may share it. A forked child opens its own. A call that reads the history first waits
    for this object's commits in flight; it raises the failure of one of them if the caller has not
    seen it.
    """

    def __init__(
        self,
        handle: StoreHandle,
        settings: Settings,
        tier: Tier | None = None,
        background: Async | None = None,
    ) -> None:
        self._internals = StoreInternals(handle, settings, tier)
        super().__init__(handle, self._internals.threads, settings.run)
        self.run = settings.run
        self._tier, self._background = tier, background or Async()
        self.skipped: tuple[Skipped, ...] = ()
        self._hints = True

    def __repr__(self) -> str:
        return f"<Store {self.url} run={self.run}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Directory or URL of the store."""
        return self._handle.url

    @property
    def id(self) -> str:
        """Id of the store, the same on every host."""
        return self._handle.config.store

    @beside_commits  # waits itself
    def commit(
        self,
        app_state: Mapping[str, Any],
        *unnamed: Never,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        links: Mapping[str, str] | None = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        ranks: Ranks | None = None,
        cast: Mapping[str, Any] | None = None,
        stats: bool = False,
    ) -> Snapshot:
        """Store `app_state` as a new commit of this run; durable when the call returns.

        The parent is the commit that this object last committed, restored or resumed, else the
        newest of the run. With several ranks, all of them call this and get the same snapshot.

        Args:
            app_state: Objects with `state_dict()`, containers or plain values, by name.
            step: The step of the training; a ref, and shown by `log`.
            message: A text that `show` prints.
            metrics: Numbers by name; refs name the best: `best:METRIC`.
            links: Texts by name, such as the URL of the run in a tracker; `show` prints them.
            tag: Names for the commit. An existing tag moves; retention keeps tagged commits.
            cast: Dtypes of floats by glob, `{"optimizer/**": torch.bfloat16}`. Refused where
                values lie beyond the dtype's range, or all would be zero (docs/values.md).
            memory_budget_bytes: Limit for buffers on each rank; default: what the host spares.
            allow_pickle: Pickle values that have no safe encoding.
            ranks: Which ranks commit together, and what they share.
            stats: Measure norm, mean, NaN of tensors on the way: `snapshot.stats.tensors`.

        Raises:
            InvalidInput: A value cannot be stored; the message has its path.
            NoSpace, Unavailable: Storage is full, or failed.
            Conflict: Other writers kept changing what this commit builds on. After any error,
                nothing is visible, unless storage did not say whether it took the commit: then the
                next one follows it if it did. With several ranks all raise, and `causes` has each
                rank's.

        Example:
            >>> store.commit({"model": model, "optimizer": optimizer}, step=100)
        """
        refuse_unnamed("commit", unnamed)
        metadata = partial(label_of, self.run, step, tag, message, metrics, links, cast)
        ranks = ranks or Ranks()
        with calling("commit: plan", ranks) as peers:
            flats = partial(flats_of, app_state, ranks, peers, allow_pickle=allow_pickle)
            snapshot = self._internals.commit(
                flats, metadata, ranks, peers, memory_budget_bytes=memory_budget_bytes, stats=stats
            )
        self._hint(snapshot.step, snapshot.tags, peers)
        return self._internals.after_failure(snapshot)

    @beside_commits
    def commit_async(
        self,
        app_state: Mapping[str, Any],
        *unnamed: Never,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        links: Mapping[str, str] | None = None,
        allow_pickle: bool = False,
        background: Async | None = None,
        ranks: Ranks | None = None,
        cast: Mapping[str, Any] | None = None,
        stats: bool = False,
    ) -> PendingCommit:
        """Copy `app_state`, return, and commit the copy in the background (docs/async.md).

        The commit has the state as of this call. Commits keep the order of the calls. Arguments
        that `commit` has too mean the same here; with several ranks, all of them call this.

        Args:
            background: How this commit runs; default: as `open` was told.

        Returns:
            A pending commit; its `wait` returns the snapshot.

        Raises:
            InvalidInput: A value cannot be stored; or a forked child uses its parent's store.
            CkptStoreError: An earlier asynchronous commit failed unseen; this one goes on. Of
                several ranks none begins. With `Async(on_error="warn")`, not for a failure of
                storage, unless it lasts longer than `max_unsaved_steps`.

        Example:
            >>> pending = store.commit_async({"model": model}, background=Async(staging="lazy"))
        """
        refuse_unnamed("commit_async", unnamed)
        if background:
            background.check_for_one_commit()
        ranks = ranks or Ranks()
        with calling("commit: begin", ranks) as peers:
            self._internals.check_not_within()
            metadata = label_of(self.run, step, tag, message, metrics, links, cast)
            pending = self._internals.commit_async(
                app_state,
                metadata,
                background or self._background,
                ranks,
                peers,
                allow_pickle=allow_pickle,
                stats=stats,
            )
        self._hint(metadata.step, metadata.tags, peers)
        return pending

    def _settle(self) -> None:
        self._internals.async_commits.settle()

    def _hint(self, step: int | None, tags: Sequence[str], peers: "Collective | None") -> None:
        """Say once that a commit can be named."""
        if step is None and not tags and self._hints and (peers is None or peers.leads):
            self._hints = False
            logger.warning(
                "a commit of run %s has neither step nor tag, so only its id names it; "
                "commit(…, step=100) is found by checkout(100)",
                self.run,
            )

    @beside_commits
    def every(
        self,
        auto: Literal["auto"] | None = None,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        mtbf_s: float | None = None,
        on_signal: signal.Signals | None = None,
    ) -> Schedule[Snapshot]:
        """A schedule to call after each step, `every(app_state, step=step, …)`; commits when due.

        Args:
            auto: `"auto"` balances the cost of the last commit against `mtbf_s`.
            steps: Commit at multiples of this number of steps.
            seconds: Commit after this time.
            mtbf_s: Mean time between failures, for `"auto"`.
            on_signal: After this signal, the next call commits, waits until the commit is
                durable, and sets `stopped`. Only the main thread can ask for it.

        With several ranks, all of them use the same arguments and call it at each step. The first
        rank's clock counts, and a signal to any rank. Raises `InvalidInput` unless exactly one
        rule is given.
        """
        rule = rule_of(auto, steps, seconds, mtbf_s)
        return Schedule(self.commit_async, rule, on_signal, agreed_schedule, self._background)

    @property
    def staging(self) -> BufferPool:
        """Staging memory of asynchronous commits, with its `budget_bytes` and `held_bytes`."""
        return self._internals.async_commits.pool

    @beside_commits
    def health(self) -> Health:
        """How the commits of this object fare: the last durable one, and what failed since. It is
        known without any I/O, also while a commit hangs.

        Example:
            >>> wandb.log({"unsaved_steps": store.health().unsaved_steps})
        """
        return self._internals.async_commits.outages.health()

    @property
    def worker_pid(self) -> int | None:
        """Id of the worker process of `executor="process"`; None while there is none."""
        worker = self._internals.worker
        return worker.pid if worker else None

    @beside_commits
    @contextmanager
    def committing(self) -> Iterator[None]:
        """Wait at the end of the block, also after an exception, for the commits in flight. Raises
        the failure of one of them."""
        try:
            yield
        finally:
            failed = self._internals.async_commits.drain()
        if failed:
            raise failed

    @beside_commits  # `StoreInternals.find` waits, except for an id
    def checkout(
        self,
        ref: AnyRef = "latest",
        *,
        verify: Verify = "checksum",
        require_signature: signatures.Files | None = None,
    ) -> Snapshot:
        """Find a commit and return a read handle on it. Nothing is restored yet.

        Args:
            ref: A step of this run (int), a tag, a commit id or its beginning, `"latest"`,
                `"run@100"`, `"latest~2"`, `"best:val_loss"`, a pointer file's path, a snapshot.
            verify: What each chunk that is read is compared with: its checksum (XXH3), or also its
                id (BLAKE3), which takes longer and does not rely on the store's footers.
            require_signature: Files of public keys, one of which signed it; verifies ids, too.

        Returns:
            A snapshot, from which `restore` and `read` take bytes.

        Raises:
            NotFound: No such commit; the message has similar refs.
            InvalidInput: The ref is ambiguous.
            Corrupt, Untrusted: The commit document is damaged; none of the keys signed it.

        Example:
            >>> store.checkout("best:val_loss").restore({"model": model})
        """
        if verify not in get_args(Verify):
            raise InvalidInput(f"verify is {verify!r}; wanted 'checksum' or 'id'")
        reader, info = through_pointers(ref, self._internals.find)
        reader = reader or self._internals.reader
        if require_signature is not None:
            signatures.verify(reader.storage, info.id, require_signature)
            verify = "id"
        if verify == "id":
            reader = reader.verifying_ids()
        return self._internals.snapshot(info, reader)

    @beside_commits  # several ranks wait for these in a round, so that all raise a failure
    def resume(
        self,
        app_state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        without: str | Iterable[str] = (),
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        ranks: Ranks | None = None,
    ) -> Snapshot | None:
        """Restore the newest commit of this run that is intact.

        A damaged commit is skipped with a warning; `skipped` lists it. All leaves then have the
        bytes of the commit that is returned. A commit with leaves that the commit before it lacks
        is verified before anything is replaced, so it is read twice. Several ranks resume the same
        commit. Without any commit, the log says where this looked, as a warning if another run or a
        store with nearly this path has commits.

        Args:
            app_state: Objects with `load_state_dict()`, or plain containers, by name.
            strict: As in `Snapshot.restore`, and refuse an `app_state` that forgot a key.
            without: Keys to leave as they are, one or several.
            memory_budget_bytes: Limit for buffers.
            allow_pickle: Read leaves that are pickles.
            ranks: Which ranks restore together.

        Returns:
            The restored commit; None if the run has no commits.

        Raises:
            Corrupt: The run has commits, and none can be restored; the message says whether
                `app_state` was changed.
            InvalidInput: The newest intact commit does not fit `app_state`, and nothing was
                changed; or an object refused its state, and the message says what was changed.

        Example:
            >>> snap = store.resume({"model": model, "optimizer": optimizer})
        """
        left = keys_of(without)
        restore = partial(
            Snapshot.restore,
            app_state=app_state,
            strict=strict,
            without=left,
            memory_budget_bytes=memory_budget_bytes,
            allow_pickle=allow_pickle,
            ranks=ranks,
        )

        def look(found: Resolved, reader: Reader | None) -> Snapshot:
            snapshot = self._internals.snapshot(found, reader)
            if strict:
                check_whole(snapshot.id, snapshot.keys(), app_state, left)
            return snapshot

        given = ranks or Ranks()
        peers = collective_of(given.process_group, given.timeout_s)
        if peers is None:
            self._settle()
        snapshot = self._resume(look, restore, peers)
        if peers is None or peers.leads:
            where = f"{self.url} and {self._tier.place}" if self._tier else self.url
            found = (snapshot.id, snapshot.step) if snapshot else None
            log_resumed(self._handle, self.run, where, found)
        return snapshot

    @beside_commits
    def follow(
        self,
        run: str,
        target: MutableMapping[str, Any],
        *,
        ref: str = "latest",
        poll_s: float | None = None,
        turn_timeout_s: float = 60.0,
        on_commit: OnCommit | None = None,
        strict: bool = True,
        without: str | Iterable[str] = (),
        select: Select | None = None,
        rename: "Rename | None" = None,
        dtype: "AskedDtype | None" = None,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        verify: Verify = "checksum",
    ) -> Follower:
        """Apply the commits of `run` to `target` in place, as another process makes them.

        Only chunks that the commit in the target does not have are read. They are verified before
        the first byte is replaced, and readers within `follower.frozen()` see all of a commit or
        nothing of it (docs/follow.md). Nothing is applied before the first `wait` or `start`.

        Args:
            run: The run.
            target: As `Snapshot.restore` takes it. Only the follower may write to it.
            ref: What to follow in the run: `"latest"`, `"best:METRIC"`, or a tag that moves.
            poll_s: Pause between two looks at the log; default: 0.01 s after a commit, and longer
                the longer none comes, up to 10 s.
            turn_timeout_s: How long a commit waits for readers, and readers for a commit.
            on_commit: Called with each commit when it is in the target.
            strict: As in `Snapshot.restore`; so are `without`, `select`, `rename`, `dtype` and
                `allow_pickle`.
            memory_budget_bytes: Limit for the chunks that are held until they are verified;
                default: half of the free memory.
            verify: As in `checkout`.

        Returns:
            A follower, to be used as a context manager.

        Raises:
            InvalidInput: `run`, `poll_s` or `verify` cannot be used.

        Example:
            >>> with store.follow("rl", {"model": model}) as follower:
            ...     follower.wait(timeout_s=60)
        """
        if verify not in get_args(Verify):
            raise InvalidInput(f"verify is {verify!r}; wanted 'checksum' or 'id'")
        restore = RestoreOptions(
            strict, allow_pickle, select, rename, dtype, memory_budget_bytes, keys_of(without)
        )
        options = FollowOptions(
            run, ref, restore, verify == "id", poll_s, turn_timeout_s, on_commit
        )
        return Follower(self._internals, target, options)

    def _resume(
        self,
        look: Callable[[Resolved, Reader | None], Snapshot],
        restore: Callable[..., object],
        peers: "Collective | None",
    ) -> Snapshot | None:
        skipped: list[Skipped] = []
        torn: Snapshot | None = None
        candidates = [*self._internals.candidates(peers)]
        for (reader, info), after in zip_longest(candidates, candidates[1:]):
            begin = partial(look, info, reader)
            try:
                snapshot = peers.on_all(begin) if peers else begin()
                plan = self._plan_of_fallback(snapshot, after, torn)
                whole, atomic = peers.agreed(plan) if peers else plan
                if not whole:
                    break
                if not atomic:
                    torn = snapshot
                restore(snapshot, atomic=atomic)
            except (Corrupt, NotFound) as error:
                skipped.append(Skipped(info.id, info.step, str(error)))
                logger.warning("skipped commit %s (step %s): %s", info.id[:12], info.step, error)
                continue
            self.skipped = tuple(skipped)
            return snapshot
        self.skipped = tuple(skipped)
        if skipped:
            left = (
                f"the state may hold bytes of commit {torn.id[:12]}: begin anew"
                if torn
                else "nothing was changed"
            )
            raise Corrupt(
                f"none of the {len(candidates)} commits of run {self.run} can be restored; {left}; "
                f"the newest: {skipped[0].reason}"
            )
        return None

    def _plan_of_fallback(
        self,
        snapshot: Snapshot,
        after: tuple[Reader | None, Resolved] | None,
        torn: Snapshot | None,
    ) -> list[bool]:
        """Two answers: whether `snapshot` replaces all that was read of `torn`, and whether to
        verify `snapshot` before it replaces anything, because the next commit, `after`, lacks some
        of its leaves."""
        whole = torn is None or has_all_of(torn, lambda: snapshot)
        if after is None:
            return [whole, False]
        reader, info = after
        return [whole, not has_all_of(snapshot, lambda: self._internals.snapshot(info, reader))]

    def log(self, limit: int | None = None, *, run: str | None = None) -> list[CommitInfo]:
        """Commits of all runs, or of `run`, newest first, without forgotten ones."""
        if limit is not None and not (isinstance(limit, int) and 0 <= limit < 1 << 63):
            raise InvalidInput(f"limit is {limit!r:.80}; wanted a number of commits, or None")
        return self._handle.queries().log(None if run is None else check_run(run), limit)

    def runs(self) -> list[str]:
        """The runs that have commits."""
        return [info.run for info in self._handle.queries().runs()]

    def tags(self) -> dict[str, CommitId]:
        """Every tag with its commit."""
        return {info.name: info.commit for info in self._handle.queries().tags()}

    def tag(self, name: str, ref: AnyRef = "latest") -> None:
        """Set tag `name` to the commit `ref`. An existing tag moves."""
        found = find_commit(self._handle, ref, self.run)
        set_tag(self._handle, self._internals.reader, check_tag(name), found)
        self._internals.wake_tier()

    def untag(self, name: str) -> None:
        """Remove a tag; the commit stays. Raises `NotFound` for an unknown tag, `Conflict` for the
        hold of a hollow directory, which `release` removes."""
        remove_tags(self._handle, name)

    def diff(self, a: AnyRef, b: AnyRef) -> Difference:
        """Compare the commits `a` and `b` leaf by leaf."""
        before, after = (contents_of(self.checkout(ref)) for ref in (a, b))
        return compare(*differing(before, after), old_keys=before.keys, new_keys=after.keys)

    def flush_mirror(self, timeout_s: float | None = None) -> bool:
        """Wait until the mirror has all commits and tags made so far; True if there is no mirror.

        Returns False if the mirror is away or `timeout_s` have passed. `close` waits too.
        """
        return self._tier is None or self._tier.flush(timeout_s)

    @beside_commits  # waits itself
    def adopt(
        self,
        directory: str | os.PathLike[str],
        *,
        hollow: bool = False,
        step: int | None = None,
        tag: str | Sequence[str] | None = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        links: Mapping[str, str] | None = None,
    ) -> Snapshot:
        """Commit a checkpoint directory of any program; `Snapshot.materialize` writes it again.

        Tensors in its files become leaves, which share chunks with other commits (docs/formats.md).
        One process calls this, also where ranks train together.

        Args:
            directory: The directory. The store must not lie in it.
            hollow: Remove its files with tensors when the commit is durable and was read back. The
                commit is kept until `release`.
            step: As in `commit`, and so are `tag`, `message`, `metrics` and `links`.

        Raises:
            InvalidInput: It has a pipe, a socket, or a name that is not Unicode.
            Unavailable: A file cannot be read or removed, or changed meanwhile.

        Example:
            >>> store.adopt("out/checkpoint-500", step=500, metrics={"eval_loss": 0.31})
        """
        label = partial(label_of, self.run, step, tag, message, metrics, links)
        return adopt(self._internals, directory, label, hollow=hollow)

    @beside_commits  # waits itself
    def close(self) -> None:
        """Wait for commits in flight, then close files and threads. Idempotent.

        Raises the unseen failure of an asynchronous commit, after everything was closed.
        """
        self._internals.close()


def internals_of(store: Store) -> StoreInternals:
    """The parts of `store` for other rooms of this package. They live as long as the store."""
    return store._internals
