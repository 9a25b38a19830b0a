"""The store as training code sees it: commit, checkout, resume, tag, look."""

import logging
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from ckptstore.committing import Committing
from ckptstore.core.ids import CommitId, check_run, check_tag
from ckptstore.core.model import CommitInfo
from ckptstore.core.refs import Latest, parse_ref
from ckptstore.core.settings import Settings
from ckptstore.distributed.collective import TIMEOUT_S, Collective
from ckptstore.distributed.gloo import collective_of
from ckptstore.distributed.restore import agreed, on_all
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.keeping import Keeping
from ckptstore.log.resolve import Resolved, newest_first
from ckptstore.maintenance.mirror.tiers import Tier
from ckptstore.maintenance.tags import remove_tag, set_tag
from ckptstore.repository.resolve_ref import AnyRef, find_commit, through_pointers
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.restore.diff import Difference, compare
from ckptstore.restore.reader import Reader
from ckptstore.snapshot import Snapshot

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A commit that `resume` could not restore, and why."""

    commit: CommitId
    step: int | None
    reason: str


class Store(Committing, Keeping):
    """A store, opened for one training run. Threads may share it; a forked child opens its own.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, handle: StoreHandle, settings: Settings, tier: Tier | None = None) -> None:
        super().__init__(handle, settings, tier)
        self.skipped: tuple[Skipped, ...] = ()

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
        return self._handle.url

    def check_writable(self) -> None:
        """Raise `ReadOnly` unless this store may be committed to."""
        self._handle.check_writable()

    @property
    def reopening(self) -> dict[str, Any]:
        """What `ckptstore.open` takes to open this store again, for the same run, in another
        process."""
        settings = self._settings
        return {
            "place": self._handle.place,
            "run": self.run,
            "storage_options": settings.storage_options,
            "index": settings.index,
        }

    @property
    def id(self) -> str:
        """The store's id, the same for everybody who opens it."""
        return self._handle.config.store

    def checkout(self, ref: AnyRef = "latest") -> Snapshot:
        """A read handle on a commit: a step (int) of this run, a tag, a commit id or its beginning,
        `"latest"`, `"run@100"`, `"latest~2"`, `"best:val_loss"`, the path of a pointer file, a
        snapshot.

        Raises `NotFound` naming near ones, `InvalidInput` for an ambiguous ref, `Corrupt` for a
        damaged commit document.
        """
        reader, info = through_pointers(ref, self._find)
        return self._snapshot(info, reader)

    def resume(
        self,
        app_state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        memory_budget_bytes: int | None = None,
        allow_pickle: bool = False,
        process_group: Any = None,
        private: Mapping[int, int] | None = None,
        broadcast: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Snapshot | None:
        """Restore the newest commit of this run that verifies and return it; None on a run without
        commits.

        A commit that is damaged is skipped with a warning, and `skipped` says which and why. Raises
        `Corrupt` if there are commits and none can be restored, `InvalidInput` if the newest does
        not fit `app_state`. With several ranks, as in `Snapshot.restore`, all of them resume the
        same commit.
        """
        skipped: list[Skipped] = []
        peers = collective_of(process_group, timeout_s)
        for reader, info in (
            [(None, info) for info in self._candidates(peers)] if peers else self._newest_first()
        ):
            try:
                snapshot = (
                    on_all(peers, partial(self._snapshot, info))
                    if peers
                    else self._snapshot(info, reader)
                )
                snapshot.restore(
                    app_state,
                    strict=strict,
                    memory_budget_bytes=memory_budget_bytes,
                    allow_pickle=allow_pickle,
                    process_group=process_group,
                    private=private,
                    broadcast=broadcast,
                    timeout_s=timeout_s,
                )
            except (Corrupt, NotFound) as error:
                skipped.append(Skipped(info.id, info.step, str(error)))
                logger.warning("skipped commit %s (step %s): %s", info.id[:12], info.step, error)
                continue
            self.skipped = tuple(skipped)
            return snapshot
        self.skipped = tuple(skipped)
        if skipped:
            raise Corrupt(
                f"none of the {len(skipped)} commits of run {self.run} can be restored; the "
                f"newest: {skipped[0].reason}"
            )
        return None

    def log(
        self, limit: int | None = None, *, run: str | None = None, all_runs: bool = False
    ) -> list[CommitInfo]:
        """The commits of this run (of `run`, or of `all_runs`), newest first, forgotten ones left
        out."""
        if limit is not None and not (isinstance(limit, int) and 0 <= limit < 1 << 63):
            raise InvalidInput(
                f"limit is {limit!r:.80}; wanted a number of commits, or None for all"
            )
        return self._handle.queries().log(None if all_runs else check_run(run or self.run), limit)

    def runs(self) -> list[str]:
        """The runs that have commits."""
        return [info.run for info in self._handle.queries().runs()]

    def tags(self) -> dict[str, CommitId]:
        """Every tag and the commit it names."""
        return {info.name: info.commit for info in self._handle.queries().tags()}

    def tag(self, name: str, ref: AnyRef = "latest") -> None:
        """Let `name` mean the commit `ref`, moving it if it meant another."""
        set_tag(self._handle, self._runtime.reader, check_tag(name), self._resolve(ref))
        self._wake_tier()

    def untag(self, name: str) -> None:
        """Remove a tag; the commit stays. Raises `NotFound` for a tag that is not there."""
        remove_tag(self._handle, name)

    def diff(self, a: AnyRef, b: AnyRef) -> Difference:
        """What changed from commit `a` to commit `b`, leaf by leaf."""
        return compare(*(self._snapshot(self._resolve(ref)).trees for ref in (a, b)))

    def flush_mirror(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was committed and tagged so far has arrived in the store's mirror, if
        it was opened with one; False if the mirror is away or `timeout_s` have passed. `close` does
        the same."""
        return self._tier is None or self._tier.flush(timeout_s)

    def close(self) -> None:
        """Wait for what is in flight and let go of files and threads; idempotent.

        Raises what an asynchronous commit failed with if nobody has seen it, after everything was
        closed.
        """
        self._check_not_within()
        failed = self._async.drain()
        with ExitStack() as closing:
            closing.callback(self._release)
            if self._tier:
                closing.callback(self._tier.close)
        if failed:
            raise failed

    def _resolve(self, ref: AnyRef) -> Resolved:
        return find_commit(self._handle, ref, self.run)

    def _candidates(self, peers: Collective) -> list[Resolved]:
        """The commits of this run, newest first: the coordinator's."""
        found = list(newest_first(self._handle.log.replay(), self.run))
        wanted = agreed(peers, [info.id for info in found])
        if any(commit not in {info.id for info in found} for commit in wanted):
            found = list(newest_first(self._handle.log.replay(refresh=True), self.run))
        known = {info.id: info for info in found}
        return [known[commit] for commit in wanted]

    def _find(self, ref: str | int) -> tuple[Reader | None, Resolved]:
        """The commit that `ref` names, and who reads it if it is in the mirror alone. `latest` is
        the newest of both."""
        if self._tier and isinstance(named := parse_ref(ref), Latest):
            for found in self._tier.newest_first(named.run or self.run, self._handle.log.replay()):
                return found
        try:
            return None, self._resolve(ref)
        except NotFound:
            if self._tier and (there := self._tier.find(ref, self.run)):
                return there
            raise

    def _newest_first(self) -> list[tuple[Reader | None, Resolved]]:
        state = self._handle.log.replay()
        return (
            self._tier.newest_first(self.run, state)
            if self._tier
            else [(None, info) for info in newest_first(state, self.run)]
        )

    def _snapshot(self, info: Resolved, reader: Reader | None = None) -> Snapshot:
        document = (reader or self._runtime.reader).document(info.session, info.id)
        return self._snapshot_of(info.id, document, info.tags, reader=reader)
