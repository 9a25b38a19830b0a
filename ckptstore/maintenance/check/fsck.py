"""Whether a store is whole: log and refs, then connectivity, then packs and footers, then every
stored byte.

Nothing is believed that cannot be checked: the log is folded from its first entry, chunks are
looked for in footers and not in the index, documents, schemas and pages are read and compared with
their ids. What is found is data; `repair` decides from it what to do.

Others may write, forget and collect meanwhile. So what is found is looked at again, by the log as
it is then, until nothing was taken from the store between the log and the look; only what holds
then is reported.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.core.ids import ChunkId, CommitId, PackId
from ckptstore.core.model import CommitDocument, PackEntry, TreeRef
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.fold import CommitRow, State
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
    metadata_of,
    misfits,
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
from ckptstore.maintenance.progress import Progress, silent

_HEAL = (
    "run `ckptstore repair`, with --from and a mirror that has the chunk; or commit the same "
    "state again and repair then"
)


LOOKS = 20
"""So often fsck looks again at what is missing while others take packs and commits from the
store."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What fsck has learned, for `repair`: `missing` chunks are needed and lie nowhere, `bad` ones
    lie there damaged; `needed` are those of both that commits need. `remembered` is what this
    host's chunk index knew of packs that have something wrong."""

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
    """Look as far as `level`; with `share` to the last level, reading so much of the stored data.

    Changes nothing in the store. Raises `Unavailable` if storage does not answer, `Conflict` for a
    log that only a newer ckptstore reads.
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
    """`fsck`, with what it learned on the way. With `suspects`, packs in which damage was found
    before are read whatever the level."""
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
        """What is wrong as far as `contents` tell; with `before`, only where something was wrong
        then."""
        walk = _Walk(contents, self._offline_store.config.chunk_bytes)
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
                # Before the index is opened: one that is damaged is made anew then.
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
        """What still holds: `seen` looked at anew until nothing was taken from the store
        meanwhile."""
        log, twins = self._offline_store.open_log(), False
        for _ in range(LOOKS):
            if not (seen.commits or seen.packs or seen.index or bad or contents.problems):
                break
            now = log.replay(refresh=True)
            if not taken(contents.state, now) and (twins or not seen.missing):
                break
            # Twins are looked into once something is missing: a pack that was exchanged hides what
            # its twin still holds.
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
        """Say of each damaged chunk whose it is. Returns those that are somebody's, and the
        findings; one that is sound elsewhere costs no commit."""
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
    """What one look has found: the `missing` chunks, `documents` that cannot be read, `trees` that
    do not fit; `commits` are those that any of it hits."""

    commits: frozenset[CommitId]
    missing: tuple[ChunkId, ...]
    documents: tuple[tuple[CommitId, CkptStoreError], ...]
    trees: tuple[Finding, ...]
    packs: tuple[Finding, ...]
    index: tuple[Finding, ...]


class _Walk:
    """Every distinct tree and page of the commits, once. `missing` grows with the chunks that lie
    nowhere, or that cannot be read, and `commits` with those that anything is wrong with."""

    def __init__(self, contents: Contents, chunk_bytes: int) -> None:
        self.missing: set[ChunkId] = set()
        self.commits: set[CommitId] = set()
        self.documents: list[tuple[CommitId, CkptStoreError]] = []
        self.findings: list[Finding] = []
        self._trees, self._inventory, self._chunk_bytes = (
            contents.trees,
            contents.inventory,
            chunk_bytes,
        )
        self._known: set[ChunkId] = set()
        self._met: set[TreeRef | ChunkId] = set()
        self._wrong: set[TreeRef | ChunkId] = set()

    def commit(self, commit: CommitId, row: CommitRow) -> None:
        """Look at one commit."""
        try:
            document = self._trees.document(commit, row)
        except (Corrupt, NotFound, Unavailable) as error:
            self.documents.append((commit, error))
            self.commits.add(commit)
            return
        self.findings += self._document(commit, document, forgotten=row.soft > 0)
        refs = [ref for _, ref in document.trees]
        pages = [page for ref in refs for page in ref.pages]
        if not self.missing.isdisjoint(metadata_of(document)) or not self._wrong.isdisjoint(
            [*refs, *pages]
        ):
            self.commits.add(commit)

    def _document(
        self, commit: CommitId, document: CommitDocument, *, forgotten: bool
    ) -> Iterator[Finding]:
        """What is wrong with the trees of a commit beyond missing chunks."""
        for chunk in metadata_of(document):
            self._metadata(chunk)
        for _, ref in document.trees:
            for page in ref.pages:
                self._page(page)
        for key, ref in document.trees:
            if ref in self._met or not self.missing.isdisjoint((ref.schema, *ref.pages)):
                continue
            self._met.add(ref)
            for what in self._misfits(ref):
                self._wrong.add(ref)
                severity = Severity.NOTE if forgotten else Severity.DAMAGE
                text = f"tree {key} of commit {commit[:12]} does not fit together: {what}"
                yield Finding(
                    Kind.TREE,
                    text,
                    "restore another commit",
                    severity,
                    leaf=what.split(" ")[0],
                    commits=(commit,),
                )

    def _metadata(self, chunk: ChunkId) -> None:
        """Read what has not been read yet. The chunk counts as missing if it cannot be: no place
        holds it as its id says."""
        if chunk in self._known:
            return
        self._known.add(chunk)
        try:
            self._trees.read(chunk)
        except (Corrupt, NotFound, Unavailable):
            self.missing.add(chunk)

    def _page(self, page: ChunkId) -> None:
        if page in self._met or page in self.missing:
            return
        self._met.add(page)
        try:
            missing = self._inventory.missing(self._trees.page_ids(page))
            self.missing.update(missing)
            self._wrong |= {page} if missing else set()
        except Corrupt:
            return  # a page that is what its id says and makes no sense: its tree says so

    def _misfits(self, ref: TreeRef) -> Iterator[str]:
        try:
            yield from misfits(*self._trees.contents(ref), self._chunk_bytes)
        except Corrupt as error:
            yield str(error)


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
    return (
        Severity.NOTE if commits and all(commit in soft for commit in commits) else Severity.DAMAGE
    )
