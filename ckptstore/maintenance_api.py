"""Maintain a store: forget, collect garbage, check, repair, copy to other stores; and ask for the
history of its tensors.

A method imports what no other method needs, since each command calls one.
"""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from ckptstore.core.ids import CommitId, check_run
from ckptstore.core.model import CommitInfo
from ckptstore.core.options import Storage
from ckptstore.core.public_calls import beside_commits, public_methods_of_store
from ckptstore.errors import InvalidInput, NoSpace
from ckptstore.log.resolve import check_there
from ckptstore.maintenance import Progress, Spread, Stores, silent
from ckptstore.maintenance.check import Level, Report, parse_level, parse_shard, parse_share
from ckptstore.maintenance.compact import DEFAULT, CompactReport, compact, remember
from ckptstore.maintenance.compact.plan import CompactPolicy, policy_of
from ckptstore.maintenance.forget import (
    find_forgotten,
    forget_by_policy,
    forget_commits,
    forget_run,
    undelete,
)
from ckptstore.maintenance.gc import GRACE_S, MAX_UNUSED, GcOptions, GcReport, collect
from ckptstore.maintenance.gc.session_monitor import Activity, activities
from ckptstore.maintenance.retention import ForgetPlan, Policy
from ckptstore.repository.resolve_ref import AnyRef, find_commit, find_id, trained_last
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader
from ckptstore.storage import open_storage

if TYPE_CHECKING:
    from ckptstore.maintenance.check.indexes import Reindexed
    from ckptstore.maintenance.mirror import Mirrored, MirrorOptions
    from ckptstore.maintenance.repair import Repaired
    from ckptstore.plugins.analysis.history import History
    from ckptstore.plugins.engine.on import OnWorkers
    from ckptstore.plugins.reports.doctor import Check
    from ckptstore.plugins.reports.forecast import Forecast
    from ckptstore.plugins.reports.usage import Usage
    from ckptstore.restore.restore import Select


@public_methods_of_store
class Maintenance:
    """Maintains an open store, and needs no torch for it. The command line uses it as it is;
    `Store` adds training.

    Refs that name no run are resolved in `run`, or in all runs if that is None.
    """

    def __init__(
        self,
        handle: StoreHandle,
        threads: ThreadPool,
        run: str | None = None,
        spread: Callable[..., Spread[Stores]] | None = None,
    ) -> None:
        """`spread` makes what carries out the long jobs on some stores, if not `threads` do."""
        self._handle, self._threads, self._run, self._on = handle, threads, run, spread

    def _settle(self) -> None:
        """Nothing is in flight here; `Store` waits."""

    @property
    def chunk_bytes(self) -> int:
        """Largest size of a chunk, fixed when the store was made."""
        return self._handle.config.chunk_bytes

    def history(
        self,
        select: "Select" = "*",
        refs: Sequence[AnyRef] | None = None,
        *,
        run: str | None = None,
        progress: Progress = silent,
    ) -> "History":
        """The history of tensors: norm, mean, standard deviation, minimum, maximum, zeros, NaN and
        drift of each, in each commit.

        The catalog keeps measurements by chunk: a second call reads no tensor, and an unchanged
        tensor costs nothing.

        Args:
            select: The tensors, a glob or several, such as `"model/*.weight"`.
            refs: The commits, in this order; default: all of the run, from the first to the last.
            run: Another run than this one.
            progress: Called with phase, done and total.

        Returns:
            A sequence of `HistoryRow`, with `to_pandas()` and `first_bad()`.

        Raises:
            NotFound: No commit, or none with a selected tensor.

        Example:
            >>> store.history("model/*").first_bad()[0].step
            60
        """
        from ckptstore.plugins.analysis.history import history

        if refs is not None:
            queries = self._handle.queries()
            found = [find_id(self._handle, queries, ref, run or self._run) for ref in refs]
            return history(self._handle, self._threads, queries.commits(found), select, progress)
        queries = self._handle.queries()
        run = run or self._run or trained_last(queries)
        commits = queries.log(None if run is None else check_run(run))[::-1]
        return history(self._handle, self._threads, commits, select, progress)

    def forget(
        self,
        what: Policy | AnyRef | Sequence[Policy | AnyRef] = (),
        *,
        run: str | None = None,
        all_runs: bool = False,
        all_commits: bool = False,
        dry_run: bool = False,
    ) -> ForgetPlan:
        """Forget commits, by name or by policy, or a whole run. A later `gc` deletes them; until
        then, `undelete` undoes.

        Tagged commits stay. Policies also spare the two newest of each run; refs may name them, but
        not all that a run has.

        Args:
            what: Refs of commits to forget, or policies of commits to keep.
            run: Another run than this one, for refs that name none and for policies.
            all_runs: Apply the policies to every run, not only to one.
            all_commits: Forget every commit of `run`; with refs, also the last of a run.
            dry_run: Return the plan without executing it.

        Returns:
            The plan: forgotten commits, and kept ones with the reason.

        Raises:
            InvalidInput: Nothing is given, what is given excludes each other, or a policy is about
                a metric that no commit has.
            NotFound: A ref names no commit, or `run` has none.
            Conflict: A named commit is protected; nothing was forgotten.

        Example:
            >>> store.forget(ckptstore.KeepLast(5), dry_run=True)
            >>> store.forget(run="abandoned", all_commits=True)
        """
        if not dry_run:
            self._handle.check_writable()
        if run is not None:
            check_run(run)
        wanted = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
        policies = [item for item in wanted if isinstance(item, Policy)]
        refs = [item for item in wanted if not isinstance(item, Policy)]
        if policies and refs:
            raise InvalidInput(
                "policies (--keep options) name commits to keep, refs commits to forget: give one "
                "or the other"
            )
        if all_commits and (policies or all_runs or (run is None and not refs)):
            raise InvalidInput(
                "--all (all_commits=True) forgets a whole run: name it by --run (run=), and give "
                "no policy"
            )
        if refs:
            commits = [find_commit(self._handle, ref, run or self._run).id for ref in refs]
            plan = forget_commits(self._handle, commits, all_commits=all_commits, dry_run=dry_run)
        elif all_commits and run is not None:
            plan = forget_run(self._handle, run, dry_run=dry_run)
        else:
            if run is not None:
                check_there(self._handle.log.replay(), run)
            within = None if all_runs else run or self._run
            reader = Reader(self._handle.config, self._handle.objects, self._threads)
            plan = forget_by_policy(self._handle, policies, reader, run=within, dry_run=dry_run)
        if not dry_run:
            self._handle.follow()
        return plan

    def forecast(
        self, policies: Policy | Sequence[Policy], *, all_runs: bool = False
    ) -> "Forecast":
        """Predict the space that `forget` with these policies, followed by a gc, would free.
        Changes nothing, and reads no tensor.

        Args:
            policies: As for `forget`; those that thin, too.
            all_runs: Apply them to every run, not only to this one.

        Returns:
            Commits and bytes by run, and the total. Bytes are exact, but for the new pages of
            thinned commits.

        Raises:
            InvalidInput: No policy is given, or a glob matches no leaf.

        Example:
            >>> store.forecast(ckptstore.KeepLast(5).thin("optimizer/**")).freed_bytes
            1073741824
        """
        from ckptstore.plugins.reports.forecast import forecast

        wanted = [policies] if isinstance(policies, Policy) else list(policies)
        reader = Reader(self._handle.config, self._handle.objects, self._threads)
        return forecast(self._handle, reader, wanted, None if all_runs else self._run)

    def forgotten(self, *, all_runs: bool = False) -> list[CommitInfo]:
        """Forgotten commits of this run, or of `all_runs`, that no gc has deleted, newest first."""
        infos = self._handle.queries().log(None if all_runs else self._run, forgotten=True)
        return [info for info in infos if info.forgotten]

    def undelete(self, refs: AnyRef | Sequence[AnyRef]) -> tuple[CommitId, ...]:
        """Restore forgotten commits, and return their ids. A ref names a forgotten commit here: a
        step the newest of them, `latest` the newest of all.

        Raises `NotFound` for a commit that a gc has deleted, `Conflict` for one that is not
        forgotten.
        """
        self._handle.check_writable()
        wanted = list(refs) if isinstance(refs, Sequence) and not isinstance(refs, str) else [refs]
        reader = Reader(self._handle.config, self._handle.objects, self._threads)
        commits = {find_forgotten(self._handle, ref, self._run): None for ref in wanted}
        undelete(self._handle, reader, tuple(commits))
        self._handle.follow()
        return tuple(commits)

    def release(
        self,
        *holds: str | os.PathLike[str],
        except_in: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        dry_run: bool = False,
    ) -> dict[str, CommitId]:
        """Stop keeping the commits of hollow directories that are no longer needed. A hollow
        directory and its copies keep their commit until this is called, even after they are
        deleted.

        Args:
            holds: Hollow directories that are about to go, or holds by name (`held/…`) whose
                directories are gone.
            except_in: Instead of these: folders. Every hold is released but those of the hollow
                directories in the folders, at any depth.
            dry_run: Release nothing.

        Returns:
            The holds that were released, with the commit that each kept. Policies decide about the
            commits from then on.

        Raises:
            InvalidInput: Both are given, or neither is.
            NotFound: A directory or a name has no hold, or a folder no hollow directory: its file
                system may be away.
            Conflict: A directory has a copy beside it.
            Unavailable: A folder cannot be read.

        Example:
            >>> store.release(except_in=["out", "/backup/out"], dry_run=True)
        """
        from ckptstore.plugins.adopt.holds import release_named, release_others

        folders = [except_in] if isinstance(except_in, str | os.PathLike) else list(except_in)
        if bool(holds) == bool(folders):
            raise InvalidInput(
                "release takes hollow directories and names of holds, or --except-in (except_in=): "
                "the folders that have every hollow directory which is left; give one or the other"
            )
        if not dry_run:
            self._handle.check_writable()
        if holds:
            return release_named(self._handle, holds, dry_run=dry_run)
        reader = Reader(self._handle.config, self._handle.objects, self._threads)
        return release_others(self._handle, reader, folders, dry_run=dry_run)

    @beside_commits
    def gc(
        self,
        *,
        dry_run: bool = False,
        max_unused: float = MAX_UNUSED,
        max_repack_bytes: int | None = None,
        grace_s: float = GRACE_S,
        force: bool = False,
        progress: Progress = silent,
    ) -> GcReport:
        """Free the space of forgotten and unfinished commits, and compact where the store's
        settings say so. Other processes may commit, read and collect meanwhile.

        Args:
            dry_run: Report without changing anything.
            max_unused: Largest share of the packs' bytes that may stay dead instead of being
                rewritten.
            max_repack_bytes: Copy at most this much, and merge small packs with it although that
                costs more than it gains. Default: no limit, and only what pays.
            grace_s: Commits forgotten less than this many seconds ago stay, for `undelete`; 0 keeps
                none.
            force: Wait for no commit in flight, which then writes its chunks again. Otherwise a
                later gc deletes chunks that such commits may reuse.
            progress: Called with phase, done and total.

        Returns:
            The commits, packs and bytes that were removed, copied or left.

        Raises:
            Corrupt: The metadata of a commit cannot be read; nothing was deleted.

        Example:
            >>> store.gc(max_unused=0.2, grace_s=0)
        """
        options = GcOptions(max_unused, max_repack_bytes, force, grace_s)
        handle, spread = self._handle, self._on and self._on(self._handle)
        report = collect(handle, options, dry_run=dry_run, progress=progress, spread=spread)
        if not dry_run:
            if policy := policy_of(self._handle.log.state):
                try:
                    compacted = compact(
                        handle, policy, full_only=True, progress=progress, spread=spread
                    )
                    report.add(compacted.collected)
                    report.not_compacted = compacted.problems
                except NoSpace as error:
                    report.stopped = str(error)
            self._handle.follow()
        return report

    @beside_commits
    def compact(
        self,
        policy: CompactPolicy = DEFAULT,
        *,
        threads: int = 1,
        with_gc: bool | None = None,
        dry_run: bool = False,
        progress: Progress = silent,
    ) -> CompactReport:
        """Store the chunks of old commits smaller, without loss: as byte planes, and as differences
        from those of a neighboring commit. Other processes may commit, read and collect meanwhile.

        Args:
            policy: Which commits stay as they are, and how many share a base.
            threads: How many chunks are coded side by side.
            with_gc: True keeps the policy in the store's settings, and every later `gc` compacts by
                it, once a group is full; False removes it from there. A dry run changes neither.
            dry_run: Estimate by a sample, without changing anything.
            progress: Called with phase, done and total.

        Returns:
            The chunks that were coded, their size before and after, and the bytes freed.

        Raises:
            InvalidInput: `threads` is less than 1.
            ReadOnly: The store is read-only, and `dry_run` is not given.
            Corrupt: The metadata of a commit cannot be read.
            NoSpace: The disk is full; what was coded before is kept.

        Example:
            >>> store.compact(ckptstore.CompactPolicy(newest=1, every=8))
        """
        report = compact(
            self._handle,
            policy,
            threads=threads,
            dry_run=dry_run,
            progress=progress,
            spread=self._on and self._on(self._handle),
        )
        if not dry_run:
            if with_gc is not None:
                remember(self._handle, policy if with_gc else None)
            self._handle.follow()
        return report

    @beside_commits
    def sessions(self) -> tuple[Activity, ...]:
        """Processes that write now, and the condemned packs that wait for each of them."""
        return activities(self._handle)

    def usage(self) -> "Usage":
        """Logical, new, exclusive and shared bytes of every commit, and totals of the store. Reads
        every page once."""
        from ckptstore.plugins.reports.usage import usage

        return usage(self._handle)

    @beside_commits
    def fsck(
        self,
        level: Level | str = Level.CONNECTIVITY,
        *,
        read_data: str | None = None,
        shard: str | None = None,
    ) -> Report:
        """Look for damage. Changes nothing.

        Args:
            level: How deep to look: `"refs"`, `"connectivity"`, `"packs"` or `"data"`.
            read_data: Amount of data to read and hash (`"5%"`, `"10G"`, `"all"`), starting with
                data verified longest ago.
            shard: Check one part of several, such as `"1/8"`, on this host. All parts together
                find what one check of the whole finds.

        Returns:
            The findings, and `ok`.

        Raises:
            InvalidInput: `level`, `read_data` or `shard` cannot be understood.

        Example:
            >>> store.fsck(read_data="5%")
        """
        from ckptstore.maintenance.check.fsck import fsck
        from ckptstore.maintenance.check.offline_store import offline_store_of

        return fsck(
            offline_store_of(self._handle),
            level=parse_level(level),
            share=parse_share(read_data),
            shard=parse_shard(shard),
        )

    def on(self, executor: Executor) -> "OnWorkers":
        """This store, with long jobs that run on the workers of `executor`: threads, processes, or
        the hosts of a Ray cluster (docs/engines.md).

        Args:
            executor: Anything with the contract of `concurrent.futures.Executor`. It stays open.

        Example:
            >>> with RayExecutor("ray") as executor:
            ...     store.on(executor).fsck(read_data="all")
        """
        from ckptstore.plugins.engine.on import OnWorkers

        handle, threads, run = self._handle, self._threads, self._run
        return OnWorkers(handle, executor, run, partial(Maintenance, handle, threads, run))

    @beside_commits
    def repair(
        self,
        *mirrors: str | os.PathLike[str],
        apply: bool = False,
        read_data: str | None = None,
        storage: Storage | None = None,
    ) -> "Repaired":
        """Plan the repair of damage; with `apply`, execute it.

        For a store that no longer opens, use the command `ckptstore repair`.

        Args:
            mirrors: Stores that supply intact chunks, documents and log entries.
            apply: Execute the plan.
            read_data: Read and hash this amount of data first, as in `fsck`.
            storage: Where and how the mirrors keep their objects.

        Returns:
            The damage found, the actions, and commits that stay damaged.

        Raises:
            ReadOnly: `apply` is given and the store is read-only.
            NotFound: A mirror has nothing of a store; nothing was done.
            Unavailable: A mirror, or the store's log, cannot be read; nothing was done.

        Example:
            >>> store.repair("s3://bucket/mirror", apply=True)
        """
        from ckptstore.maintenance.check.offline_store import offline_store_of
        from ckptstore.maintenance.repair import repair

        if apply:
            self._handle.check_writable()
        share = parse_share(read_data)
        with ExitStack() as stack:
            options = dict((storage or Storage()).options or {})
            opened = (
                open_storage(os.fspath(place), read_only=True, storage_options=options)
                for place in mirrors
            )
            storages = [stack.enter_context(closing(storage)) for storage in opened]
            return repair(
                offline_store_of(self._handle), mirrors=storages, apply=apply, share=share
            )

    def push(
        self,
        to: str | os.PathLike[str],
        *refs: AnyRef,
        run: str | None = None,
        ancestors: bool = False,
        tags: bool = True,
        force: bool = False,
        verify: bool = False,
        create: bool = False,
        dry_run: bool = False,
        storage: Storage | None = None,
        progress: Progress = silent,
    ) -> "Mirrored":
        """Copy commits and their tags to the store at `to`, without chunks that it has.

        A commit appears there whole, under the same id. Repeat an interrupted push to resume it.

        Args:
            to: Directory or URL of the other store.
            refs: Commits to copy; default: all of `run`, else all.
            run: Run of the commits, in which `refs` are resolved.
            ancestors: Copy the ancestors of `refs` too.
            tags: Copy tags; with `force`, move those that name another commit there.
            verify: Read written data back.
            create: Make the store if there is none.
            dry_run: Return the plan without copying.
            storage: Where and how `to` keeps its objects.
            progress: Called with phase, done and total.

        Returns:
            The commits, chunks and bytes copied, and commits that are damaged here.

        Raises:
            NotFound: A ref or the store does not exist.
            InvalidInput: The other store has another chunk size.
            Conflict: A tag would move; nothing was sent.
            Unavailable: Storage failed.

        Example:
            >>> store.push("s3://bucket/checkpoints", "best:val_loss")
        """
        from ckptstore.maintenance.mirror import MirrorOptions
        from ckptstore.maintenance.mirror_plan import choose, other_end

        options = MirrorOptions(tags, force, verify)
        run = run or (self._run if refs else None)
        wanted = choose(self._handle, refs, run=run, ancestors=ancestors)
        like = self._handle if create else None
        there = storage or Storage()
        with other_end(to, like=like, storage_options=there.options, index=there.index) as target:
            return self._send(self._handle, target, wanted, options, dry_run, progress)

    @beside_commits
    def pull(
        self,
        source: str | os.PathLike[str],
        *refs: AnyRef,
        run: str | None = None,
        ancestors: bool = False,
        tags: bool = True,
        force: bool = False,
        verify: bool = False,
        dry_run: bool = False,
        storage: Storage | None = None,
        progress: Progress = silent,
    ) -> "Mirrored":
        """Copy commits from the store at `source`, as `push` copies them to another. `refs` are
        resolved in `source`."""
        from ckptstore.maintenance.mirror import MirrorOptions
        from ckptstore.maintenance.mirror_plan import choose, other_end

        self._handle.check_writable()
        options = MirrorOptions(tags, force, verify)
        run = run or (self._run if refs else None)
        there = storage or Storage()
        with other_end(
            source, read_only=True, storage_options=there.options, index=there.index
        ) as origin:
            wanted = choose(origin, refs, run=run, ancestors=ancestors)
            return self._send(origin, self._handle, wanted, options, dry_run, progress)

    def mirror(
        self,
        to: str | os.PathLike[str],
        *,
        storage: Storage | None = None,
        progress: Progress = silent,
    ) -> "Mirrored":
        """Copy every commit and tag to the store at `to`; make that store if there is none. A tag
        of both stores moves to the commit that it names here. Other commits of `to` stay.
        """
        return self.push(to, force=True, create=True, storage=storage, progress=progress)

    def _send(
        self,
        source: StoreHandle,
        target: StoreHandle,
        wanted: Collection[CommitId],
        options: "MirrorOptions",
        dry_run: bool,
        progress: Progress,
    ) -> "Mirrored":
        from ckptstore.maintenance.mirror import mirror

        return mirror(
            source,
            target,
            wanted,
            options,
            self._threads,
            dry_run=dry_run,
            progress=progress,
            spread=self._on and self._on(source, target),
        )

    @beside_commits
    def reindex(self, *, progress: Progress = silent) -> "Reindexed":
        """Rebuild this host's catalog and chunk index from log and packs."""
        from ckptstore.maintenance.check.indexes import reindex

        return reindex(self._handle, progress=progress)

    @beside_commits
    def doctor(self) -> "tuple[Check, ...]":
        """Test the storage, and check whether the next commit fits."""
        from ckptstore.plugins.reports.doctor import doctor

        return doctor(self._handle)
