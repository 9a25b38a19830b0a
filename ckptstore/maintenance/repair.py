"""Repair of a store: a plan made from fsck's facts, then applied step by step.

Four rules. Everything written is proved to be the original, or matches its id; the one exception is
a lost `ckptstore.json`, and the plan says so. Nothing is deleted: replaced objects go to
`quarantine/`. The log only grows. An entry is restored only as the exact bytes that the rest of the
log attests, so history never forks. And a readable copy is removed only after another one is
durable and listed, so repair never costs a commit (`maintenance.rescue`).

A document's hash is its commit's id. An entry's hash and length are attested by the next entry, by
a checkpoint, by the catalog, or by the entry's own first line. Only bytes that match are written.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import (
    CONFIG_KEY,
    CommitId,
    StoreId,
    digest,
    document_key,
    log_key,
    segment_key,
)
from ckptstore.core.text import bytes_text
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, NotFound
from ckptstore.log import entries
from ckptstore.log.entries import Position, encode_entry
from ckptstore.log.log_backend import decode_segment, segment_end
from ckptstore.maintenance import Progress, silent
from ckptstore.maintenance.check import Finding, Kind, Report, Severity, Share, lines_of
from ckptstore.maintenance.check.fsck import Facts, examine
from ckptstore.maintenance.check.indexes import drop_indexes
from ckptstore.maintenance.check.offline_store import BadEntry, OfflineStore, decode_at, read_small
from ckptstore.maintenance.rescue import (
    SavePacks,
    flipped,
    plan_rescue,
    quarantine,
    replace_object,
)
from ckptstore.objects.documents import decode_document, encode_config
from ckptstore.repository.init_store import near_stores
from ckptstore.storage.contract import Storage

DAMAGED_SETTING = "damaged"
"""The setting that names the commits which cannot be restored completely."""

ROUNDS = 3
"""A repaired log brings back packs and commits, which may need repair; then the marks follow."""

_HASH_DIGITS = 64
_WRONG_DIGITS = 2
"""Digits of an entry's first line that may differ from its body's hash and still attest it: no
other body comes that near."""

_ONE_BIT = "its own bytes, one bit flipped back"

RETRIES = 10
"""How often a plan is made again because others changed the store meanwhile."""


@dataclass(frozen=True, slots=True)
class WriteConfig:
    """Write `ckptstore.json` again. Chunk size and codec are inferred: right for every existing
    commit."""

    config: StoreConfig

    def __str__(self) -> str:
        return (
            f"write ckptstore.json anew: store {self.config.store}, chunk size "
            f"{self.config.chunk_bytes}, codec {self.config.codec}, log in "
            f"{self.config.log_place}; certain are the store's id, the place of its log, and that "
            "every commit can be read so"
        )

    def apply(self, offline_store: OfflineStore) -> None:
        replace_object(offline_store.storage, CONFIG_KEY, encode_config(self.config))


@dataclass(frozen=True, slots=True)
class PutBack:
    """Restore the exact bytes of a log entry, or of the document of `commit`."""

    key: str
    origin: str
    data: bytes
    commit: CommitId | None = None

    def __str__(self) -> str:
        return (
            f"put back {self.key} from {self.origin}; certain: its hash is the one that others name"
        )

    def apply(self, offline_store: OfflineStore) -> None:
        """A document is needed only while its commit is listed."""
        if self.commit is None or self.commit in offline_store.open_log().replay().commits:
            replace_object(offline_store.storage, self.key, self.data)


@dataclass(frozen=True, slots=True)
class SetAside:
    """Move an obstructing object to `quarantine/`."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"move {self.key} to quarantine/: {self.why}"

    def apply(self, offline_store: OfflineStore) -> None:
        quarantine(offline_store.storage, self.key)


@dataclass(frozen=True, slots=True)
class Mark:
    """Name the commits that cannot be restored completely in the store's settings."""

    commits: tuple[CommitId, ...]

    def __str__(self) -> str:
        if not self.commits:
            return "take back the marks of damaged commits"
        return f"mark as damaged: {', '.join(commit[:12] for commit in self.commits)}"

    def apply(self, offline_store: OfflineStore) -> None:
        log = offline_store.open_log()
        log.replay()
        log.append(entries.Settings(((DAMAGED_SETTING, self.commits or None),)))


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Rebuild this host's indexes."""

    def __str__(self) -> str:
        return "make this host's indexes anew: the indexes disagree with the store"

    def apply(self, offline_store: OfflineStore) -> None:
        drop_indexes(offline_store)


Action: TypeAlias = WriteConfig | PutBack | SetAside | SavePacks | Mark | Rebuild


@dataclass(frozen=True, slots=True, repr=False)
class RepairPlan:
    """The actions, in order, and the findings that cannot be repaired with the available sources,
    or that are about what could not be read.

    With `more`, the rest can only be planned after this plan was applied.
    """

    actions: tuple[Action, ...]
    unrepairable: tuple[Finding, ...]
    more: bool = False

    def __repr__(self) -> str:
        return f"<repair plan: {len(self.actions)} actions, {len(self.unrepairable)} lost>"


@dataclass(frozen=True, slots=True, repr=False)
class Repaired:
    """The findings, the actions taken (none in a dry run: `plan` has the planned ones), and the
    findings that remain."""

    before: Report
    plan: RepairPlan
    applied: tuple[Action, ...]
    after: Report
    dry_run: bool

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions taken, or in a dry run the planned ones."""
        return self.plan.actions if self.dry_run else self.applied

    def __repr__(self) -> str:
        verb = "planned" if self.dry_run else "taken"
        return f"<repair: {len(self.actions)} actions {verb}; {self.after.summary}>"

    def __str__(self) -> str:
        lines = [f"{'would' if self.dry_run else 'done'}: {action}" for action in self.actions]
        if self.plan.more and self.dry_run:
            lines.append("then: what the whole log lists is looked at, and repaired as well")
        lines += lines_of(self.plan.unrepairable if self.dry_run else self.after.findings)
        if not self.plan.actions and not self.applied:
            lines.append(self._nothing())
        elif self.dry_run:
            lines.append("nothing was changed: add --apply to do it")
        return "\n".join(lines)

    def _nothing(self) -> str:
        """Why there is no action, and how far repair has looked."""
        if self.after.damaged:
            return "there is nothing that could be done"
        looked = self.after.looked
        if not (unread := looked.stored_bytes - looked.data_bytes) and not self.after.unread:
            return "there is nothing to repair"
        text = "there is nothing to repair in what was looked at"
        if not unread:
            return text
        read = bytes_text(looked.data_bytes) if looked.data_bytes else "no data"
        advice = f"`ckptstore repair --read-data` reads {bytes_text(looked.stored_bytes)}"
        return f"{text}; {read} was read: {advice}"


def check_source(storage: Storage) -> None:
    """Raise `NotFound` for a place without anything of a store, and `Unavailable` for one that does
    not answer: a repair that passed over it would take what it has for lost."""
    if storage.size(CONFIG_KEY) is not None:
        return
    if any(any(storage.list(prefix)) for prefix in ("packs/", "commits/", "log/", "quarantine/")):
        return
    near = near_stores(storage.capabilities.local_root)
    raise NotFound(
        f"no store to repair from at {storage.url}: it has no {CONFIG_KEY} and no packs{near}; "
        "nothing was done"
    )


def repair(
    offline_store: OfflineStore,
    *,
    mirrors: Sequence[Storage] = (),
    apply: bool = False,
    share: Share | None = None,
    progress: Progress = silent,
) -> Repaired:
    """Check the store, plan a repair, and with `apply` carry it out.

    `share` limits the stored data that is read and verified first; packs in which an earlier fsck
    found damage are always read. Other processes may continue: each action checks the current log,
    and the plan is made again if others changed its subject. Raises `Conflict` if that happens
    repeatedly, and before anything else `NotFound` for a mirror that has nothing of a store and
    `Unavailable` for one that does not answer.
    """
    for mirror in mirrors:
        check_source(mirror)
    facts = examine(offline_store, share=share, progress=progress)
    before, plan = facts.report, plan_repair(facts, mirrors)
    first, applied, rounds, retries = plan, list[Action](), ROUNDS if apply else 0, RETRIES
    while rounds and plan.actions:
        try:
            for action in plan.actions:
                progress("repair", len(applied), len(applied) + len(plan.actions))
                action.apply(facts.offline_store)
                applied.append(action)
            rounds -= 1
        except (Conflict, Corrupt, NotFound):
            # Others changed the facts behind the plan; plan again from the current store.
            if not retries:
                raise
            retries -= 1
        if any(isinstance(action, WriteConfig) for action in applied):
            offline_store = replace(offline_store, problem=None)
        facts = examine(offline_store, share=share, progress=progress)
        plan = plan_repair(facts, mirrors)
    return Repaired(before, first, tuple(applied), facts.report, not apply)


def plan_repair(facts: Facts, mirrors: Sequence[Storage]) -> RepairPlan:
    """Plan the actions for `facts`. Reads the store and the mirrors, changes nothing."""
    actions: list[Action] = []
    offline_store, state = facts.offline_store, facts.chain.state
    if offline_store.problem is not None:
        actions.append(WriteConfig(offline_store.config))
    if facts.chain.bad:
        # A broken log takes no appends and its list is uncertain: repair it first.
        entries, unrepairable = _plan_log(facts, mirrors)
        return RepairPlan((*actions, *entries), tuple(unrepairable), more=bool(entries))
    actions += (SetAside(cache.key, cache.problem) for cache in facts.chain.bad_caches)
    for finding in facts.report.findings:
        if finding.kind is Kind.DOCUMENT and finding.commits:
            (commit,) = finding.commits
            key = document_key(state.commits[commit].session, commit)
            if found := recover_document(offline_store.storage, key, commit, mirrors):
                actions.append(PutBack(key, *found, commit))
    save = plan_rescue(facts, mirrors)
    actions += [save] if save.damaged or save.sources else []
    # Marks come last: only then is it known what stays damaged.
    damaged, marked = tuple(sorted(_damaged(facts))), state.settings.get(DAMAGED_SETTING) or ()
    if not actions and damaged != marked:
        actions.append(Mark(damaged))
    stale = any(
        finding.severity is Severity.INDEX and finding.kind is not Kind.CHECKPOINT
        for finding in facts.report.findings
    )
    # The chunk index alone knows the chunks of a pack without readable footer.
    if stale and facts.contents.problems.keys() <= {name for _, name in save.damaged}:
        actions.append(Rebuild())
    healed = {source.entry.chunk for source in save.sources}
    put_back = {action.key for action in actions if isinstance(action, PutBack)}
    left = (
        finding
        for finding in facts.report.findings
        if finding.severity is Severity.UNREAD
        or (finding.commits and finding.chunk not in healed and finding.key not in put_back)
    )
    return RepairPlan(tuple(actions), tuple(left))


def _damaged(facts: Facts) -> set[CommitId]:
    """The commits to mark. A mark is taken back only when everything could be read."""
    state, marked = facts.chain.state, facts.chain.state.settings.get(DAMAGED_SETTING)
    names = marked if isinstance(marked, tuple) and facts.report.unread else ()
    still = {commit for commit in state.commits if commit in names}
    return still | facts.report.damaged_commits.keys()


def _plan_log(facts: Facts, mirrors: Sequence[Storage]) -> tuple[list[PutBack], list[Finding]]:
    """Restore the last entry first: it attests the one before, and a log with a gap takes no
    appends meanwhile."""
    actions: list[PutBack] = []
    unrepairable = []
    findings = {
        finding.entry: finding for finding in facts.report.findings if finding.kind is Kind.ENTRY
    }
    copies = facts.offline_store.copies(bad.n for bad in facts.chain.bad)
    store, before = facts.offline_store.config.store, None
    for bad in reversed(facts.chain.bad):
        if before and before.n == bad.n:
            bad = replace(bad, wanted=bad.wanted or before)
        found = recover_entry(bad, store, facts.offline_store.storage, mirrors, copies.get(bad.n))
        if found is None:
            unrepairable.append(findings[bad.n])
            continue
        actions.append(PutBack(log_key(bad.n), *found))
        entry = decode_at(bad.n, found[1], store)
        before = Position(bad.n - 1, entry.prev_hash, entry.prev_bytes)
    return actions, unrepairable


def recover_entry(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> tuple[str, bytes] | None:
    """The entry `bad.n`, and whether it is from its own bytes, from `kept` (the catalog's copy),
    from a segment of the store's `own` or from a mirror; None if all fail."""
    versions = _entry_versions(bad, store, own, mirrors, kept)
    return next((each for each in versions if _is_the_one(bad, each[1], store)), None)


def recover_document(
    storage: Storage, key: str, commit: CommitId, mirrors: Sequence[Storage]
) -> tuple[str, bytes] | None:
    """The document of a commit, and whether it is from its own bytes or from a mirror; None if
    both fail."""
    for origin, data in _document_versions(storage, key, commit, mirrors):
        with suppress(CkptStoreError):
            decode_document(data, commit)
            return origin, data
    return None


def _document_versions(
    storage: Storage, key: str, commit: CommitId, mirrors: Sequence[Storage]
) -> Iterator[tuple[str, bytes]]:
    """Bytes that may be those of a document. In a mirror it has the same key, or, in a push
    target, another session's."""
    for mirror in mirrors:
        yield mirror.url, read_small(mirror, key) or b""
        for other, _ in mirror.list("commits/"):
            if other.endswith(f"-{commit}"):
                yield mirror.url, read_small(mirror, other) or b""
    yield from ((_ONE_BIT, data) for data in flipped(read_small(storage, key)))


def _entry_versions(
    bad: BadEntry, store: StoreId, own: Storage, mirrors: Sequence[Storage], kept: bytes | None
) -> Iterator[tuple[str, bytes]]:
    """Bytes that may be those of an entry."""
    if bad.data is not None:
        body = bad.data[_HASH_DIGITS + 1 :]
        whole = digest(body).hex().encode() + b"\n" + body
        yield "its own body, under a new first line", whole
    if kept is not None:
        yield "the catalog's copy", kept
    last = segment_end(bad.n)
    with suppress(CkptStoreError):
        for entry in decode_segment(read_small(own, segment_key(last)) or b"", last, store):
            if entry.n == bad.n:
                yield "a segment of the log", encode_entry(entry)
    yield from ((mirror.url, read_small(mirror, log_key(bad.n)) or b"") for mirror in mirrors)
    yield from ((_ONE_BIT, data) for data in flipped(bad.data))


def _is_the_one(bad: BadEntry, data: bytes, store: StoreId) -> bool:
    """Whether `data` is the attested entry."""
    try:
        entry = decode_at(bad.n, data, store)
    except CkptStoreError:
        return False
    if bad.wanted is not None:
        return entry.position == bad.wanted
    line = entry.hash.encode() + b"\n"
    return (
        bad.data is not None
        and len(bad.data) == entry.bytes
        and sum(a != b for a, b in zip(bad.data, line, strict=False)) <= _WRONG_DIGITS
    )
