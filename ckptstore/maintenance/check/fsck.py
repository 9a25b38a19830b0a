"""Checking a store: log and refs, then connectivity, then packs and footers, then every stored
byte.

Everything is verified. The log is folded from its first entry; chunks are looked up in footers, not
in the index; documents, schemas and pages are read and compared with their ids. The findings are
data; `repair` plans from them.

Others may write, forget and collect meanwhile. So findings are checked again against the current
log, until nothing was removed between reading the log and the check. Only findings that persist are
reported.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.core.ids import ChunkId, CommitId, PackId
from ckptstore.core.model import PackEntry
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.fold import State
from ckptstore.maintenance.check import data
from ckptstore.maintenance.check.contents import Contents, contents_of, taken
from ckptstore.maintenance.check.data import BadChunk
from ckptstore.maintenance.check.log import (
    catalog_findings,
    document_findings,
    log_findings,
    ref_findings,
)
from ckptstore.maintenance.check.log_audit import Chain, read_chain
from ckptstore.maintenance.check.metadata_reader import (
    Referrer,
    Trees,
    in_order,
)
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.packs import (
    index_findings,
    orphan_findings,
    pack_findings,
    remembered,
    unreadable,
)
from ckptstore.maintenance.check.report import Finding, Kind, Level, Looked, Report, Severity, Share
from ckptstore.maintenance.check.walk import Walk
from ckptstore.maintenance.progress import Progress, silent

_HEAL = (
    "run `ckptstore repair`, with --from and a mirror that has the chunk; or commit the same "
    "state again and repair then"
)


LOOKS = 20
"""How often missing objects are checked again while others remove packs and commits."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts learned by fsck, for `repair`: `missing` chunks are needed and absent, `bad` ones
    are damaged; `needed` are those of both that commits need. `remembered` is the chunk index's
    knowledge of damaged packs."""

    offline_store: OfflineStore
    chain: Chain
    contents: Contents
    missing: tuple[ChunkId, ...]
    bad: tuple[BadChunk, ...]
    needed: frozenset[ChunkId]
    remembered: Mapping[PackId, Sequence[PackEntry]]
    report: Report


def fsck(
    offline_store: OfflineStore,
    *,
    level: Level = Level.CONNECTIVITY,
    share: Share | None = None,
    progress: Progress = silent,
) -> Report:
    """Check up to `level`; `share` limits the stored data read by the last level.

    Changes nothing in the store. Raises `Unavailable` if storage does not answer, `Conflict` for a
    log that requires a newer ckptstore.
    """
    return examine(offline_store, level=level, share=share, progress=progress).report


def examine(
    offline_store: OfflineStore,
    *,
    level: Level,
    share: Share | None = None,
    suspects: bool = False,
    progress: Progress = silent,
) -> Facts:
    """`fsck`, with the facts learned. With `suspects`, packs in which damage was found before
    are read at any level."""
    if suspects and share is None:
        return _Fsck(offline_store, max(level, Level.DATA), Share(bytes=0), progress).run()
    return _Fsck(offline_store, Level.DATA if share else level, share or Share(), progress).run()


class _Fsck:
    """One run."""

    def __init__(
        self, offline_store: OfflineStore, level: Level, share: Share, progress: Progress
    ) -> None:
        self._offline_store, self._level, self._share, self._progress = (
            offline_store,
            level,
            share,
            progress,
        )
        self._data_bytes = 0
        self._remembered: Mapping[PackId, Sequence[PackEntry]] = {}

    def run(self) -> Facts:
        offline_store, storage = self._offline_store, self._offline_store.storage
        self._progress("log", 0, 0)
        chain = read_chain(
            storage,
            offline_store.config.store,
            offline_store.config.generation,
            remembered=offline_store.remembered(),
        )
        contents = contents_of(storage, chain.state)
        catalog = list(catalog_findings(offline_store, contents.trees)) if not chain.bad else []
        seen = self._look(contents)
        bad = self._data(contents) if self._level >= Level.DATA else []
        if not chain.bad:
            contents, seen, bad = self._looked_again(contents, seen, bad)
        orphans = (
            list(orphan_findings(storage, lambda: self._present(chain)))
            if self._level >= Level.PACKS
            else []
        )
        needed, chunks = self._name(contents, seen.missing, bad)
        state = contents.state
        findings = (
            *([offline_store.problem] if offline_store.problem else []),
            *log_findings(chain),
            *ref_findings(state),
            *unreadable(state, contents.problems),
            *catalog,
            *seen.trees,
            *document_findings(state, seen.documents),
            *seen.packs,
            *orphans,
            *seen.index,
            *chunks,
        )
        looked = Looked(
            chain.head,
            len(state.commits) if self._level >= Level.CONNECTIVITY else 0,
            len(state.packs),
            len(contents.inventory),
            self._data_bytes,
            sum(map(data.bytes_of, state.packs.values())),
        )
        report = Report(self._level, findings, looked)
        return Facts(
            offline_store,
            replace(chain, state=state),
            contents,
            seen.missing,
            tuple(bad),
            needed,
            self._remembered,
            report,
        )

    def _look(self, contents: Contents, before: "_Seen | None" = None) -> "_Seen":
        """The problems visible in `contents`; with `before`, only those found then are checked
        again."""
        walk = Walk(contents, self._offline_store.config.chunk_bytes)
        if self._level >= Level.CONNECTIVITY:
            rows = in_order(contents.state)
            for done, (commit, row) in enumerate(rows):
                self._progress("commits", done, len(rows))
                if before is None or commit in before.commits:
                    walk.commit(commit, row)
        packs: list[Finding] = []
        index: list[Finding] = []
        if self._level >= Level.PACKS:
            suspects = None if before is None else {finding.pack for finding in before.packs}
            packs = self._packs(contents, suspects)
            if before is None:
                # Read it before the index is opened, which would recreate a damaged one.
                self._remembered = remembered(
                    self._offline_store,
                    contents.state,
                    {*contents.problems, *(f.pack for f in packs)},
                )
            if before is None or before.index:
                index = list(index_findings(self._offline_store, contents.state, contents.tables))
        return _Seen(
            frozenset(walk.commits),
            tuple(sorted(walk.missing)),
            tuple(walk.documents),
            tuple(walk.findings),
            tuple(packs),
            tuple(index),
        )

    def _looked_again(
        self, contents: Contents, seen: "_Seen", bad: list[BadChunk]
    ) -> "tuple[Contents, _Seen, list[BadChunk]]":
        """The findings that persist: check `seen` again until nothing was removed from the store
        meanwhile."""
        log, twins = self._offline_store.open_log(), False
        for _ in range(LOOKS):
            if not (seen.commits or seen.packs or seen.index or bad or contents.problems):
                break
            now = log.replay(refresh=True)
            if not taken(contents.state, now) and (twins or not seen.missing):
                break
            # Twins are read once something is missing: an exchanged pack hides what its twin still
            # holds.
            twins = twins or bool(seen.missing)
            contents = contents_of(self._offline_store.storage, now, contents, twins=twins)
            seen = self._look(contents, seen)
            listed = {pack.id for pack in now.packs.values()}
            bad = [chunk for chunk in bad if chunk.pack in listed]
        return contents, seen, bad

    def _present(self, chain: Chain) -> State:
        return chain.state if chain.bad else self._offline_store.open_log().replay(refresh=True)

    def _packs(
        self, contents: Contents, suspects: Collection[PackId | None] | None
    ) -> list[Finding]:
        found: list[Finding] = []
        listed = sorted(contents.state.packs.values(), key=lambda pack: pack.id)
        for done, pack in enumerate(listed):
            self._progress("packs", done, len(listed))
            if pack.id in contents.tables and (suspects is None or pack.id in suspects):
                found += pack_findings(self._offline_store.storage, pack, contents.tables[pack.id])
        return found

    def _data(self, contents: Contents) -> list[BadChunk]:
        offline_store, suspect_packs, tables = (
            self._offline_store,
            self._offline_store.suspect_packs,
            contents.tables,
        )
        readable = [pack for pack in contents.state.packs.values() if pack.id in tables]
        record = data.prune(
            data.load_record(offline_store.index_directory, offline_store.config.store), readable
        )
        chosen = data.choose(readable, record, suspect_packs.packs(), self._share)
        self._data_bytes = sum(map(data.bytes_of, chosen))

        def save(verified: data.Verified) -> None:
            data.save_record(offline_store.index_directory, offline_store.config.store, verified)

        return list(
            data.verify_packs(
                offline_store.storage, chosen, tables, record, save, suspect_packs, self._progress
            )
        )

    def _name(
        self, contents: Contents, missing: Collection[ChunkId], bad: Collection[BadChunk]
    ) -> tuple[frozenset[ChunkId], list[Finding]]:
        """Attribute damaged chunks to commits and leaves. Returns the needed ones, and the
        findings; a chunk with a sound copy costs no commit."""
        findings: list[Finding] = []
        objects: dict[ChunkId, list[BadChunk]] = defaultdict(list)
        for chunk in bad:
            objects[chunk.entry.chunk].append(chunk)
        referrers = contents.trees.referrers(contents.state, {*missing, *objects})
        soft = {commit for commit, row in contents.state.commits.items() if row.soft}
        for lost in missing:
            if lost not in objects:
                findings.append(_missing(lost, referrers.get(lost, Referrer((), "")), soft))
        for found in objects.values():
            findings += (
                _damaged(
                    chunk,
                    referrers.get(chunk.entry.chunk),
                    soft,
                    self._sound(contents.trees, chunk),
                )
                for chunk in found
            )
        return frozenset(referrers), findings

    def _sound(self, trees: Trees, bad: BadChunk) -> bool:
        try:
            trees.read(bad.entry.chunk)
        except (Corrupt, NotFound, Unavailable):
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of one check: `missing` chunks, unreadable `documents`, inconsistent `trees`;
    `commits` are those affected."""

    commits: frozenset[CommitId]
    missing: tuple[ChunkId, ...]
    documents: tuple[tuple[CommitId, CkptStoreError], ...]
    trees: tuple[Finding, ...]
    packs: tuple[Finding, ...]
    index: tuple[Finding, ...]


def _missing(chunk: ChunkId, referrer: Referrer, soft: Collection[CommitId]) -> Finding:
    what = f"chunk {chunk.hex()[:12]} ({_whose(referrer)}) lies in no pack that can be read"
    return Finding(
        Kind.CHUNK,
        what,
        _HEAL,
        _severity(referrer.commits, soft),
        chunk=chunk,
        leaf=referrer.leaf,
        commits=referrer.commits,
    )


def _damaged(
    bad: BadChunk, referrer: Referrer | None, soft: Collection[CommitId], sound: bool
) -> Finding:
    where = f"chunk {bad.entry.chunk.hex()[:12]} at byte {bad.entry.offset} of {bad.key}"
    if referrer is None:
        step = "run `ckptstore gc`, which drops it, or `ckptstore repair`"
        what = f"{where} is damaged; no commit needs it: {bad.problem}"
        return Finding(
            Kind.CHUNK, what, step, Severity.NOTE, bad.key, pack=bad.pack, chunk=bad.entry.chunk
        )
    what = f"{where} ({_whose(referrer)}) is damaged: {bad.problem}"
    if sound:
        step = "run `ckptstore repair --apply`: another copy of it is sound"
        return Finding(
            Kind.CHUNK,
            what,
            step,
            key=bad.key,
            pack=bad.pack,
            chunk=bad.entry.chunk,
            leaf=referrer.leaf,
        )
    severity = _severity(referrer.commits, soft)
    return Finding(
        Kind.CHUNK,
        what,
        _HEAL,
        severity,
        bad.key,
        pack=bad.pack,
        chunk=bad.entry.chunk,
        leaf=referrer.leaf,
        commits=referrer.commits,
    )


def _whose(referrer: Referrer) -> str:
    if not referrer.commits:
        return "of no commit that can be read"
    more = f" and {len(referrer.commits) - 1} more" if len(referrer.commits) > 1 else ""
    return f"{referrer.leaf}, commit {referrer.commits[-1][:12]}{more}"


def _severity(commits: Collection[CommitId], soft: Collection[CommitId]) -> Severity:
    hidden = commits and all(commit in soft for commit in commits)
    return Severity.NOTE if hidden else Severity.DAMAGE
