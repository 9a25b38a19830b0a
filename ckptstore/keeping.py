"""A store as those see it who keep it: forget, collect, check, repair, copy to other stores."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from ckptstore.commit.dedup_probe import GcPin
from ckptstore.errors import InvalidInput, ReadOnly, Unavailable
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import offline_store_of
from ckptstore.maintenance.check.report import Level, Report, parse_level, parse_share
from ckptstore.maintenance.doctor import Check, doctor
from ckptstore.maintenance.forget import forget_by_policy, forget_commits, undelete
from ckptstore.maintenance.gc.collect import MAX_UNUSED, GcOptions, GcReport, collect
from ckptstore.maintenance.gc.session_monitor import Activity, activities
from ckptstore.maintenance.mirror.mirror import Mirrored, MirrorOptions, mirror
from ckptstore.maintenance.mirror.remotes import choose, other_end
from ckptstore.maintenance.progress import Progress, silent
from ckptstore.maintenance.reindex import Reindexed, reindex
from ckptstore.maintenance.repair.repair import Repaired, repair
from ckptstore.maintenance.retention import ForgetPlan, Policy
from ckptstore.maintenance.usage import Usage, usage
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.lru import SecondNames
from ckptstore.repository.resolve_ref import AnyRef, find_commit
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.runtime import StoreRuntime
from ckptstore.storage.registry import open_storage

logger = logging.getLogger("ckptstore")


class Keeping:
    """The part of `Store` that training does not need."""

    run: str
    _handle: StoreHandle
    _runtime: StoreRuntime

    @property
    def chunk_bytes(self) -> int:
        """What this store cuts tensors into, fixed when it was made."""
        return self._handle.config.chunk_bytes

    def chunks(self) -> ObjectStore:
        """The chunks that this store has now, by id: for those who move chunks themselves."""
        self._handle.objects.sync(self._handle.log.replay(refresh=True))
        return self._handle.objects

    def second_names(self, naming: Callable[[memoryview], bytes]) -> SecondNames:
        """What chunks are called besides their ids, as far as this process hashes them from now on:
        by `naming`, or as was asked for before."""
        objects = self._handle.objects
        objects.second_names = objects.second_names or SecondNames(naming)
        return objects.second_names

    def guard(self, what: str) -> GcPin | None:
        """A session of this process, which does `what`, that keeps the chunks it finds from being
        collected; None if this store cannot be written to, so that nothing can be kept."""
        try:
            self._handle.check_writable()
            return GcPin(self._handle.objects, self._handle.log, what)
        except (ReadOnly, Unavailable) as error:
            logger.warning("%s cannot be relied on for chunks: %s", self._handle.url, error)
            return None

    def forget(
        self,
        what: Policy | AnyRef | Sequence[Policy | AnyRef],
        *,
        all_runs: bool = False,
        dry_run: bool = False,
    ) -> ForgetPlan:
        """Forget commits: those that `what` names (refs), or those of this run that no policy of
        `what` keeps, in `all_runs` if wanted.

        Nothing is deleted before the next `gc`; until then `undelete` brings them back. Tagged
        commits, the two newest of each run and the best by the store's settings are never
        forgotten. Returns the plan that was, or with `dry_run` would be, executed.

        Raises `InvalidInput` for nothing to go by, `Conflict` for a named commit that may not go.
        """
        self._handle.check_writable()
        wanted = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
        policies = [item for item in wanted if isinstance(item, Policy)]
        refs = [item for item in wanted if not isinstance(item, Policy)]
        if policies and refs:
            raise InvalidInput(
                "a policy says what to keep, a ref what to forget: give one or the other"
            )
        if refs:
            plan = forget_commits(
                self._handle,
                [find_commit(self._handle, ref, self.run).id for ref in refs],
                dry_run=dry_run,
            )
        else:
            plan = forget_by_policy(
                self._handle, policies, run=None if all_runs else self.run, dry_run=dry_run
            )
        if not dry_run:
            self._handle.follow()
        return plan

    def undelete(self, refs: AnyRef | Sequence[AnyRef]) -> None:
        """Bring forgotten commits back, by their ids or the beginnings of them.

        Raises `NotFound` for one that a gc has purged, `Conflict` for one that is not forgotten.
        """
        self._handle.check_writable()
        wanted = list(refs) if isinstance(refs, Sequence) and not isinstance(refs, str) else [refs]
        undelete(self._handle, [find_commit(self._handle, ref, self.run).id for ref in wanted])
        self._handle.follow()

    def gc(
        self,
        *,
        dry_run: bool = False,
        max_unused: float = MAX_UNUSED,
        max_repack_bytes: int | None = None,
        force: bool = False,
        progress: Progress = silent,
    ) -> GcReport:
        """Remove what no commit needs; safe while others commit, read and collect. With `dry_run`,
        only say what that would be.

        Packs of which more than the share `max_unused` is dead are copied together, at most
        `max_repack_bytes` of them. What a commit in flight may still reuse is deleted by a later
        gc, unless `force`: then that commit writes it again.

        Raises `Corrupt`, before anything is deleted, if a commit's metadata cannot be read.
        """
        options = GcOptions(max_unused, max_repack_bytes, force)
        report = collect(self._handle, options, dry_run=dry_run, progress=progress)
        if not dry_run:
            self._handle.follow()
        return report

    def sessions(self) -> tuple[Activity, ...]:
        """Who is writing to the store now, and which condemned packs wait for whom."""
        return activities(self._handle)

    def usage(self) -> Usage:
        """Logical, new, exclusive and shared bytes of every commit, and what the store holds in
        all. Reads every page once."""
        return usage(self._handle)

    def fsck(
        self, level: Level | str = Level.CONNECTIVITY, *, read_data: str | None = None
    ) -> Report:
        """Look for damage as far as `level` (`"refs"`, `"connectivity"`, `"packs"`, `"data"`); with
        `read_data` (`"5%"`, `"10G"`, `"100%"`) read and hash so much of what is stored, what was
        verified longest ago first. Changes nothing."""
        return fsck(
            offline_store_of(self._handle),
            level=parse_level(level),
            share=parse_share(read_data) if read_data else None,
        )

    def repair(
        self,
        *mirrors: str | os.PathLike[str],
        apply: bool = False,
        read_data: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Repaired:
        """Plan what can be done about damage, with chunks, documents and log entries from `mirrors`
        too; with `apply`, do it. `storage_options` are those of the mirrors.

        A store that cannot be opened any more is repaired by `ckptstore repair`.
        """
        if apply:
            self._handle.check_writable()
        share = parse_share(read_data) if read_data else None
        with ExitStack() as stack:
            options = dict(storage_options or {})
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
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
        progress: Progress = silent,
    ) -> Mirrored:
        """Bring commits of this store into the one at `to`, with the tags that name them: those
        that `refs` name (with `ancestors`, what they descend from too), else all of `run`, else
        all.

        Only chunks that `to` lacks travel. A commit appears there at once, whole, under the same
        id. What is interrupted can be repeated. With `force`, tags move; with `verify`, what was
        written is read back; with `create`, the store is made where there is none; with `dry_run`,
        the result says what would travel. `storage_options` and `index`, the database that has its
        log, are those of `to`.

        Raises `NotFound` for a ref or store that is not there, `InvalidInput` for a store that cuts
        chunks otherwise, `Conflict` before anything is sent if a tag would move, `Unavailable` if
        storage fails. Commits that are damaged here are named in the result.
        """
        options = MirrorOptions(tags, force, verify)
        wanted = choose(
            self._handle, refs, run=run or (self.run if refs else None), ancestors=ancestors
        )
        like = self._handle if create else None
        with other_end(to, like=like, storage_options=storage_options, index=index) as target:
            return mirror(
                self._handle,
                target,
                wanted,
                options,
                self._runtime.threads,
                dry_run=dry_run,
                progress=progress,
            )

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
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
        progress: Progress = silent,
    ) -> Mirrored:
        """Bring commits of the store at `source` into this one; as `push`, the other way round.
        `refs` are looked for there."""
        self._handle.check_writable()
        options = MirrorOptions(tags, force, verify)
        with other_end(
            source, read_only=True, storage_options=storage_options, index=index
        ) as origin:
            wanted = choose(
                origin, refs, run=run or (self.run if refs else None), ancestors=ancestors
            )
            return mirror(
                origin,
                self._handle,
                wanted,
                options,
                self._runtime.threads,
                dry_run=dry_run,
                progress=progress,
            )

    def mirror(
        self,
        to: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        index: str | None = None,
        progress: Progress = silent,
    ) -> Mirrored:
        """Make the store at `to`, which is made if need be, have every commit of this one and every
        tag mean what it means here.

        What only the mirror has stays there.
        """
        return self.push(
            to,
            force=True,
            create=True,
            storage_options=storage_options,
            index=index,
            progress=progress,
        )

    def reindex(self) -> Reindexed:
        """Make this host's catalog and chunk index anew from log and packs."""
        return reindex(self._handle)

    def doctor(self) -> tuple[Check, ...]:
        """Try the storage out, and look whether the next commit will fit."""
        return doctor(self._handle)
