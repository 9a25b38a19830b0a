"""The store as training code sees it: commit, checkout, resume, tag, look."""

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from ckptstore.core.ids import CommitId, check_tag
from ckptstore.core.model import CommitInfo
from ckptstore.core.refs import parse_ref
from ckptstore.core.settings import Settings
from ckptstore.engine.checkout import Reader
from ckptstore.engine.commit import Committed, Committer, Label
from ckptstore.engine.compare import Difference, compare
from ckptstore.engine.opening import Opening, init_store
from ckptstore.engine.tagging import remove_tag, set_tag
from ckptstore.engine.transfer import Threads
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.history.resolve import Resolved, newest_first, resolve
from ckptstore.objects.backend import open_backend
from ckptstore.snapshot import Snapshot
from ckptstore.text import bytes_text, seconds_text
from ckptstore.upkeep.activity import Activity, activities
from ckptstore.upkeep.doctor import Check, doctor
from ckptstore.upkeep.findings import Level, Report, parse_share
from ckptstore.upkeep.forget import forget_by_policy, forget_commits, undelete
from ckptstore.upkeep.fsck import fsck
from ckptstore.upkeep.gc import MAX_UNUSED, GcOptions, GcReport, collect
from ckptstore.upkeep.ground import ground_of
from ckptstore.upkeep.progress import Progress, silent
from ckptstore.upkeep.reindex import Reindexed, reindex
from ckptstore.upkeep.repair import Repaired, repair
from ckptstore.upkeep.retention import ForgetPlan, Policy
from ckptstore.upkeep.usage import Usage, usage

logger = logging.getLogger("ckptstore")
logger.addHandler(logging.NullHandler())

RATE_BYTES = 64 << 20
"""Commits that write less say nothing about the disk's speed."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A commit that `resume` could not restore, and why."""

    commit: CommitId
    step: int | None
    reason: str


class Store:
    """A store, opened for one training run. Threads may share it; a forked child opens its own.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, opening: Opening, settings: Settings) -> None:
        self.run = settings.run
        self._opening = opening
        self._threads = Threads(settings.threads)
        self._lock = threading.Lock()
        self._parent: CommitId | None = None
        self._best_rate = 0.0
        self.skipped: tuple[Skipped, ...] = ()

    def __repr__(self) -> str:
        return f"<Store {self.url} run={self.run}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._opening.url

    @property
    def id(self) -> str:
        """The store's id, the same for everybody who opens it."""
        return self._opening.config.store

    def commit(
        self,
        app_state: Mapping[str, Any],
        *,
        step: int | None = None,
        tag: str | Sequence[str] = (),
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        allow_pickle: bool = False,
    ) -> Snapshot:
        """Store `app_state` as a new commit of this run and return it; durable when this returns.

        `app_state` maps names to objects with `state_dict()` or to plain containers and values. `tag` names the commit (moving a tag that
        exists) and protects it from retention. Its parent is the commit that this store object committed, restored or resumed last, else
        the run's newest.

        Raises `InvalidInput` for what cannot be stored, naming its path; `Unavailable` if storage fails or is full; `Conflict` if
        others kept changing what this commit builds on. Whatever is raised, nothing is visible and nothing is lost.
        """
        self._opening.check_writable()
        tags = tuple(check_tag(name) for name in ([tag] if isinstance(tag, str) else tag))
        with self._lock:
            parents = (self._parent,) if self._parent else ()
            label = Label(self.run, _step(step), _message(message), _metrics(metrics), tags, parents)
            committed = self._committer.commit(app_state, label, allow_pickle=allow_pickle)
            self._opening.follow({ref.schema.hex(): committed.schemas[key] for key, ref in committed.document.trees})
            self._parent = committed.id
        self._report(committed)
        return Snapshot(self._reader, committed.id, committed.document, tags=tags, stats=committed.stats, restored=self._descend_from)

    def checkout(self, ref: str | int = "latest") -> Snapshot:
        """A read handle on a commit: a step (int) of this run, a tag, a commit id or its beginning, `"latest"`, `"run@100"`, `"latest~2"`,
        `"best:val_loss"`.

        Raises `NotFound` naming near ones, `InvalidInput` for an ambiguous ref, `Corrupt` for a damaged commit document.
        """
        return self._snapshot(self._resolve(ref))

    def resume(self, app_state: MutableMapping[str, Any], *, strict: bool = True, allow_pickle: bool = False) -> Snapshot | None:
        """Restore the newest commit of this run that verifies and return it; None on a run without commits.

        A commit that is damaged is skipped with a warning, and `skipped` says which and why. Raises `Corrupt` if there are commits and none
        can be restored, `InvalidInput` if the newest does not fit `app_state`.
        """
        skipped: list[Skipped] = []
        for info in newest_first(self._opening.log.replay(), self.run):
            try:
                snapshot = self._snapshot(info)
                snapshot.restore(app_state, strict=strict, allow_pickle=allow_pickle)
            except (Corrupt, NotFound) as error:
                skipped.append(Skipped(info.id, info.step, str(error)))
                logger.warning("skipped commit %s (step %s): %s", info.id[:12], info.step, error)
                continue
            self.skipped = tuple(skipped)
            return snapshot
        self.skipped = tuple(skipped)
        if skipped:
            raise Corrupt(f"none of the {len(skipped)} commits of run {self.run} can be restored; the newest: {skipped[0].reason}")
        return None

    def log(self, limit: int | None = None, *, run: str | None = None, all_runs: bool = False) -> list[CommitInfo]:
        """The commits of this run (of `run`, or of `all_runs`), newest first, forgotten ones left out."""
        return self._opening.queries().log(None if all_runs else run or self.run, limit)

    def runs(self) -> list[str]:
        """The runs that have commits."""
        return [info.run for info in self._opening.queries().runs()]

    def tags(self) -> dict[str, CommitId]:
        """Every tag and the commit it names."""
        return {info.name: info.commit for info in self._opening.queries().tags()}

    def tag(self, name: str, ref: str | int = "latest") -> None:
        """Let `name` mean the commit `ref`, moving it if it meant another."""
        set_tag(self._opening, self._reader, check_tag(name), self._resolve(ref))

    def untag(self, name: str) -> None:
        """Remove a tag; the commit stays. Raises `NotFound` for a tag that is not there."""
        remove_tag(self._opening, name)

    def forget(
        self, what: Policy | str | int | Sequence[Policy | str | int], *, all_runs: bool = False, dry_run: bool = False
    ) -> ForgetPlan:
        """Forget commits: those that `what` names (refs), or those of this run that no policy of `what` keeps, in `all_runs` if wanted.

        Nothing is deleted before the next `gc`; until then `undelete` brings them back. Tagged commits, the two newest of each run and the
        best by the store's settings are never forgotten. Returns the plan that was, or with `dry_run` would be, executed.

        Raises `InvalidInput` for nothing to go by, `Conflict` for a named commit that may not go.
        """
        self._opening.check_writable()
        wanted = [what] if isinstance(what, Policy | str | int) else list(what)
        policies = [item for item in wanted if isinstance(item, Policy)]
        refs = [item for item in wanted if not isinstance(item, Policy)]
        if policies and refs:
            raise InvalidInput("a policy says what to keep, a ref what to forget: give one or the other")
        if refs:
            plan = forget_commits(self._opening, [self._resolve(ref).id for ref in refs], dry_run=dry_run)
        else:
            plan = forget_by_policy(self._opening, policies, run=None if all_runs else self.run, dry_run=dry_run)
        if not dry_run:
            self._opening.follow()
        return plan

    def undelete(self, refs: str | int | Sequence[str | int]) -> None:
        """Bring forgotten commits back, by their ids or the beginnings of them.

        Raises `NotFound` for one that a gc has purged, `Conflict` for one that is not forgotten.
        """
        self._opening.check_writable()
        wanted = [refs] if isinstance(refs, str | int) else refs
        undelete(self._opening, [self._resolve(ref).id for ref in wanted])
        self._opening.follow()

    def gc(
        self,
        *,
        dry_run: bool = False,
        max_unused: float = MAX_UNUSED,
        max_repack_bytes: int | None = None,
        impatient: bool = False,
        progress: Progress = silent,
    ) -> GcReport:
        """Remove what no commit needs; safe while others commit, read and collect. With `dry_run`, only say what that would be.

        Packs of which more than the share `max_unused` is dead are copied together, at most `max_repack_bytes` of them. What a commit in
        flight may still reuse is deleted by a later gc, unless `impatient`: then that commit writes it again.

        Raises `Corrupt`, before anything is deleted, if a commit's metadata cannot be read.
        """
        options = GcOptions(max_unused, max_repack_bytes, impatient)
        report = collect(self._opening, options, dry_run=dry_run, progress=progress)
        if not dry_run:
            self._opening.follow()
        return report

    def sessions(self) -> tuple[Activity, ...]:
        """Who is writing to the store now, and which condemned packs wait for whom."""
        return activities(self._opening)

    def diff(self, a: str | int, b: str | int) -> Difference:
        """What changed from commit `a` to commit `b`, leaf by leaf."""
        return compare(*(self._snapshot(self._resolve(ref)).trees for ref in (a, b)))

    def usage(self) -> Usage:
        """Logical, new, exclusive and shared bytes of every commit, and what the store holds in all. Reads every page once."""
        return usage(self._opening)

    def fsck(self, level: Level = Level.CONNECTIVITY, *, read_data: str | None = None) -> Report:
        """Look for damage as far as `level`; with `read_data` (`"5%"`, `"10G"`, `"100%"`) read and hash so much of what is stored, what was
        verified longest ago first. Changes nothing."""
        return fsck(ground_of(self._opening), level=level, share=parse_share(read_data) if read_data else None)

    def repair(self, *mirrors: str | os.PathLike[str], apply: bool = False, read_data: str | None = None) -> Repaired:
        """Plan what can be done about damage, with chunks, documents and log entries from `mirrors` too; with `apply`, do it.

        A store that cannot be opened any more is repaired by `ckptstore repair`.
        """
        if apply:
            self._opening.check_writable()
        share = parse_share(read_data) if read_data else None
        with ExitStack() as stack:
            backends = [stack.enter_context(closing(open_backend(os.fspath(place), read_only=True))) for place in mirrors]
            return repair(ground_of(self._opening), mirrors=backends, apply=apply, share=share)

    def reindex(self) -> Reindexed:
        """Make this host's catalog and chunk index anew from log and packs."""
        return reindex(self._opening)

    def doctor(self) -> tuple[Check, ...]:
        """Try the storage out, and look whether the next commit will fit."""
        return doctor(self._opening)

    def close(self) -> None:
        """Wait for what is in flight and let go of files and threads; idempotent."""
        with self._lock:
            self._threads.close()
            self._opening.close()

    @cached_property
    def _committer(self) -> Committer:
        return Committer(self._opening.config, self._opening.objects, self._opening.log, self._threads)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._opening.config, self._opening.objects, self._threads)

    def _resolve(self, ref: str | int) -> Resolved:
        """By the log; the catalog knows best what to say about a ref that names no commit."""
        parsed = parse_ref(ref)
        if found := resolve(self._opening.log.replay(), parsed, self.run):
            return found
        wrong = self._opening.queries().resolve(parsed, self.run)
        raise Corrupt(f"the catalog takes {ref!r} for commit {wrong[:12]}, which the log denies; run `ckptstore reindex`")

    def _snapshot(self, info: Resolved) -> Snapshot:
        document = self._reader.document(info.session, info.id)
        return Snapshot(self._reader, info.id, document, tags=info.tags, restored=self._descend_from)

    def _descend_from(self, commit: CommitId) -> None:
        """What is committed next descends from what was restored last."""
        self._parent = commit

    def _report(self, committed: Committed) -> None:
        """One line for people; everything in it is in `Snapshot.stats` too."""
        stats, document = committed.stats, committed.document
        if stats.new_bytes >= RATE_BYTES:
            self._best_rate = max(self._best_rate, stats.written_bytes_per_s)
        share = f", {stats.written_bytes_per_s / self._best_rate:.0%} of the disk's best here" if stats.new_bytes >= RATE_BYTES else ""
        logger.info(
            "commit %s%s%s: %s -> %s new, held %s, durable after %s%s",
            committed.id[:12],
            "" if document.step is None else f" step {document.step}",
            f" ({', '.join(document.tags)})" if document.tags else "",
            bytes_text(stats.logical_bytes),
            bytes_text(stats.new_bytes),
            seconds_text(stats.held_s),
            seconds_text(stats.durable_s),
            share,
        )


def open(
    place: str | os.PathLike[str],
    *,
    run: str | None = None,
    create: bool = True,
    read_only: bool = False,
    chunk_bytes: int | None = None,
    codec: str | None = None,
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Open the store at `place`, a directory or an fsspec URL; with `create`, make it where there is nothing yet.

    `run` groups the commits of one training run (default `$CKPTSTORE_RUN`, else `main`). `chunk_bytes` (a power of two, default 1 MiB) and
    `codec` (`raw` or `zstd`) apply only to a store that is made here. `threads` (default `$CKPTSTORE_THREADS`, else by the processors)
    hash, read and write.

    Raises `NotFound` if there is no store, `InvalidInput` if `place` holds something else or a store of a newer format, `Corrupt` if
    `ckptstore.json` is damaged, `ReadOnly` or `Unavailable` if it cannot be made.
    """
    settings = Settings.of(
        run=run,
        create=create,
        read_only=read_only,
        chunk_bytes=chunk_bytes,
        codec=codec,
        threads=threads,
        storage_options=None if storage_options is None else dict(storage_options),
    )
    opening = _find_or_make(place, settings)
    if not read_only:
        opening.warm()
    return Store(opening, settings)


def _find_or_make(place: str | os.PathLike[str], settings: Settings) -> Opening:
    options = settings.storage_options
    try:
        return Opening(place, read_only=settings.read_only, storage_options=options)
    except NotFound:
        if not settings.create or settings.read_only:
            raise
    with suppress(Conflict):  # another process made it at the same time: open that one
        init_store(place, chunk_bytes=settings.chunk_bytes, codec=settings.codec, storage_options=options)
    return Opening(place, storage_options=options)


def _step(step: object) -> int | None:
    if step is None or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
        return step
    raise InvalidInput(f"step is {step!r}; wanted a whole number from 0 on, or None")


def _message(message: object) -> str:
    if isinstance(message, str):
        return message
    raise InvalidInput(f"message is {message!r}; wanted a string")


def _metrics(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    pairs = []
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"a metric's name is {name!r}; wanted a string")
        try:
            pairs.append((name, float(value)))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"metric {name!r} is {value!r}; wanted a number") from error
    return tuple(sorted(pairs))
