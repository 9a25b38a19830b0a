"""Whether a store is whole: log and refs, then connectivity, then packs and footers, then every stored byte.

Nothing is believed that cannot be checked: the log is folded from its first entry, chunks are looked for in footers and not in the index,
documents, schemas and pages are read and compared with their ids. What is found is data; `repair` decides from it what to do.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ckptstore.core.ids import ChunkId, CommitId, PackId
from ckptstore.core.model import CommitDocument, TreeRef
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.objects.pack import FooterTable
from ckptstore.upkeep import check_data
from ckptstore.upkeep.chain import Chain, read_chain
from ckptstore.upkeep.check_data import BadChunk
from ckptstore.upkeep.check_log import catalog_findings, document_findings, log_findings, ref_findings
from ckptstore.upkeep.check_packs import index_findings, orphan_findings, pack_findings, unreadable
from ckptstore.upkeep.findings import Finding, Kind, Level, Looked, Report, Severity, Share
from ckptstore.upkeep.ground import Ground
from ckptstore.upkeep.inventory import Inventory, load_tables
from ckptstore.upkeep.progress import Progress, silent
from ckptstore.upkeep.trees import Referrer, Trees, in_order, metadata_of, misfits

_HEAL = "run `ckptstore repair`, with --from and a mirror that has the chunk; or commit the same state again and repair then"


@dataclass(frozen=True, slots=True)
class Facts:
    """What fsck has learned, for `repair`: `missing` chunks are needed and lie nowhere, `bad` ones lie there damaged; `needed` are those of
    both that commits need."""

    ground: Ground
    chain: Chain
    tables: Mapping[PackId, FooterTable]
    inventory: Inventory
    trees: Trees
    missing: tuple[ChunkId, ...]
    bad: tuple[BadChunk, ...]
    needed: frozenset[ChunkId]
    report: Report


def fsck(ground: Ground, *, level: Level = Level.CONNECTIVITY, share: Share | None = None, progress: Progress = silent) -> Report:
    """Look as far as `level`; with `share` to the last level, reading so much of the stored data.

    Changes nothing in the store. Raises `Unavailable` if storage does not answer, `Conflict` for a log that only a newer ckptstore reads.
    """
    return examine(ground, level=level, share=share, progress=progress).report


def examine(ground: Ground, *, level: Level, share: Share | None = None, suspects: bool = False, progress: Progress = silent) -> Facts:
    """`fsck`, with what it learned on the way. With `suspects`, packs in which damage was found before are read whatever the level."""
    if suspects and share is None:
        return _Fsck(ground, max(level, Level.DATA), Share(bytes=0), progress).run()
    return _Fsck(ground, Level.DATA if share else level, share or Share(), progress).run()


class _Fsck:
    """One run."""

    def __init__(self, ground: Ground, level: Level, share: Share, progress: Progress) -> None:
        self._ground, self._level, self._share, self._progress = ground, level, share, progress
        self._findings: list[Finding] = [ground.problem] if ground.problem else []
        self._data_bytes = 0

    def run(self) -> Facts:
        ground, backend = self._ground, self._ground.backend
        self._progress("log", 0, 0)
        chain = read_chain(backend, ground.config.store, ground.config.generation, remembered=ground.remembered())
        state = chain.state
        loaded = dict(load_tables(backend, state))
        problems = {name: table for name, table in loaded.items() if isinstance(table, CkptStoreError)}
        tables = {name: table for name, table in loaded.items() if not isinstance(table, CkptStoreError)}
        inventory = Inventory(tables)
        trees = Trees(backend, inventory)
        self._findings += [*log_findings(chain), *ref_findings(state), *unreadable(state, problems)]
        if not chain.bad:
            self._findings += catalog_findings(ground, trees)
        missing: list[ChunkId] = []
        bad: list[BadChunk] = []
        if self._level >= Level.CONNECTIVITY:
            missing = self._connectivity(chain, inventory, trees)
        if self._level >= Level.PACKS:
            self._packs(chain, tables)
        if self._level >= Level.DATA:
            bad = self._data(chain, tables)
        needed = self._name(chain, trees, missing, bad)
        looked = Looked(
            chain.head,
            len(state.commits) if self._level >= Level.CONNECTIVITY else 0,
            len(state.packs),
            len(inventory),
            self._data_bytes,
            sum(map(check_data.bytes_of, state.packs.values())),
        )
        report = Report(self._level, tuple(self._findings), looked)
        return Facts(ground, chain, tables, inventory, trees, tuple(missing), tuple(bad), needed, report)

    def _connectivity(self, chain: Chain, inventory: Inventory, trees: Trees) -> list[ChunkId]:
        """Read documents, schemas and pages; returns the chunks that commits need and no pack holds, or holds only damaged (metadata)."""
        problems: list[tuple[CommitId, CkptStoreError]] = []
        walk = _Walk(trees, inventory, self._ground.config.chunk_bytes)
        rows = in_order(chain.state)
        for done, (commit, row) in enumerate(rows):
            self._progress("commits", done, len(rows))
            try:
                self._findings += walk.commit(commit, trees.document(commit, row), forgotten=row.soft > 0)
            except (Corrupt, NotFound, Unavailable) as error:
                problems.append((commit, error))
        self._findings += document_findings(chain.state, problems)
        return sorted(walk.missing)

    def _packs(self, chain: Chain, tables: Mapping[PackId, FooterTable]) -> None:
        listed = sorted(chain.state.packs.values(), key=lambda pack: pack.id)
        for done, pack in enumerate(listed):
            self._progress("packs", done, len(listed))
            if pack.id in tables:
                self._findings += pack_findings(self._ground.backend, pack, tables[pack.id])
        self._findings += orphan_findings(self._ground.backend, chain.state)
        self._findings += index_findings(self._ground, chain.state, tables)

    def _data(self, chain: Chain, tables: Mapping[PackId, FooterTable]) -> list[BadChunk]:
        ground, distrust = self._ground, self._ground.distrust
        readable = [pack for pack in chain.state.packs.values() if pack.id in tables]
        record = check_data.prune(check_data.load_record(ground.index_directory, ground.config.store), readable)
        chosen = check_data.choose(readable, record, distrust.packs(), self._share)
        self._data_bytes = sum(map(check_data.bytes_of, chosen))

        def save(verified: check_data.Verified) -> None:
            check_data.save_record(ground.index_directory, ground.config.store, verified)

        return list(check_data.verify_packs(ground.backend, chosen, tables, record, save, distrust, self._progress))

    def _name(self, chain: Chain, trees: Trees, missing: Collection[ChunkId], bad: Collection[BadChunk]) -> frozenset[ChunkId]:
        """Say of each damaged chunk whose it is, and return those that are somebody's. One that is sound elsewhere costs no commit."""
        objects: dict[ChunkId, list[BadChunk]] = defaultdict(list)
        for chunk in bad:
            objects[chunk.entry.chunk].append(chunk)
        referrers = trees.referrers(chain.state, {*missing, *objects})
        soft = {commit for commit, row in chain.state.commits.items() if row.soft}
        for lost in missing:
            if lost not in objects:
                self._findings.append(_missing(lost, referrers.get(lost, Referrer((), "")), soft))
        for found in objects.values():
            self._findings += (_damaged(chunk, referrers.get(chunk.entry.chunk), soft, self._sound(trees, chunk)) for chunk in found)
        return frozenset(referrers)

    def _sound(self, trees: Trees, bad: BadChunk) -> bool:
        try:
            trees.read(bad.entry.chunk)
        except (Corrupt, NotFound, Unavailable):
            return False
        return True


class _Walk:
    """Every distinct tree and page of the commits, once. `missing` grows with the chunks that lie nowhere, or that cannot be read."""

    def __init__(self, trees: Trees, inventory: Inventory, chunk_bytes: int) -> None:
        self.missing: set[ChunkId] = set()
        self._trees, self._inventory, self._chunk_bytes = trees, inventory, chunk_bytes
        self._known: set[ChunkId] = set()
        self._met: set[TreeRef | ChunkId] = set()

    def commit(self, commit: CommitId, document: CommitDocument, *, forgotten: bool) -> Iterator[Finding]:
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
                severity = Severity.NOTE if forgotten else Severity.DAMAGE
                text = f"tree {key} of commit {commit[:12]} does not fit together: {what}"
                yield Finding(Kind.TREE, text, "restore another commit", severity, leaf=what.split(" ")[0], commits=(commit,))

    def _metadata(self, chunk: ChunkId) -> None:
        """Read what has not been read yet. The chunk counts as missing if it cannot be: no place holds it as its id says."""
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
            self.missing.update(self._inventory.missing(self._trees.page_ids(page)))
        except Corrupt:
            return  # a page that is what its id says and makes no sense: its tree says so

    def _misfits(self, ref: TreeRef) -> Iterator[str]:
        try:
            yield from misfits(*self._trees.contents(ref), self._chunk_bytes)
        except Corrupt as error:
            yield str(error)


def _missing(chunk: ChunkId, referrer: Referrer, soft: Collection[CommitId]) -> Finding:
    what = f"chunk {chunk.hex()[:12]} ({_whose(referrer)}) lies in no pack that can be read"
    return Finding(Kind.CHUNK, what, _HEAL, _severity(referrer.commits, soft), chunk=chunk, leaf=referrer.leaf, commits=referrer.commits)


def _damaged(bad: BadChunk, referrer: Referrer | None, soft: Collection[CommitId], sound: bool) -> Finding:
    where = f"chunk {bad.entry.chunk.hex()[:12]} at byte {bad.entry.offset} of {bad.key}"
    if referrer is None:
        step = "run `ckptstore gc`, which drops it, or `ckptstore repair`"
        what = f"{where} is damaged; no commit needs it: {bad.problem}"
        return Finding(Kind.CHUNK, what, step, Severity.NOTE, bad.key, pack=bad.pack, chunk=bad.entry.chunk)
    what = f"{where} ({_whose(referrer)}) is damaged: {bad.problem}"
    if sound:
        step = "run `ckptstore repair --apply`: another copy of it is sound"
        return Finding(Kind.CHUNK, what, step, key=bad.key, pack=bad.pack, chunk=bad.entry.chunk, leaf=referrer.leaf)
    severity = _severity(referrer.commits, soft)
    return Finding(
        Kind.CHUNK, what, _HEAL, severity, bad.key, pack=bad.pack, chunk=bad.entry.chunk, leaf=referrer.leaf, commits=referrer.commits
    )


def _whose(referrer: Referrer) -> str:
    if not referrer.commits:
        return "of no commit that can be read"
    more = f" and {len(referrer.commits) - 1} more" if len(referrer.commits) > 1 else ""
    return f"{referrer.leaf}, commit {referrer.commits[-1][:12]}{more}"


def _severity(commits: Collection[CommitId], soft: Collection[CommitId]) -> Severity:
    return Severity.NOTE if commits and all(commit in soft for commit in commits) else Severity.DAMAGE
