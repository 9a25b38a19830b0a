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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ckptstore.core.ids import ChunkId, CommitId, PackId, pack_key
from ckptstore.core.model import PackEntry
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.state import Pack, State
from ckptstore.maintenance import Progress, Spread, here, silent
from ckptstore.maintenance.check import (
    WHOLE,
    Finding,
    Kind,
    Level,
    Looked,
    Report,
    Severity,
    Shard,
    Share,
    foreign,
    severity_of,
    unread,
)
from ckptstore.maintenance.check.data import BadChunk, PackToRead, verify
from ckptstore.maintenance.check.indexes import catalog_findings, index_findings, remembered
from ckptstore.maintenance.check.offline_store import (
    Chain,
    OfflineStore,
    log_findings,
    read_chain,
    ref_findings,
)
from ckptstore.maintenance.check.trees import Contents, Referrer, Walk, taken
from ckptstore.maintenance.gc.plan import list_objects, owner, unlisted
from ckptstore.objects.pack import FooterTable
from ckptstore.plugins.signing.signatures import damaged
from ckptstore.repository.chunk_reader import keys_of, verify_at
from ckptstore.repository.footers import read_table_at
from ckptstore.repository.thread_pool import REMOTE_READS, ThreadPool
from ckptstore.storage.contract import Storage

_HEAL = (
    "run `ckptstore repair`, with --from and a mirror that has the chunk; or commit the same "
    "state again and repair then"
)

_SAVE = "run `ckptstore repair`: what verifies is saved; --from names a mirror that has the rest"

BATCH = 8
"""So many packs are looked at by one task."""

LOOKS = 20
"""How often missing objects are checked again while others remove packs and commits."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts learned by fsck, for `repair`: `missing` chunks are needed and absent, `bad` ones
    are damaged; `needed` are those of both that commits need. What storage did not return is in
    none of them. `remembered` is the chunk index's
    knowledge of damaged packs."""

    offline_store: OfflineStore
    chain: Chain
    contents: Contents
    missing: frozenset[ChunkId]
    bad: tuple[BadChunk, ...]
    needed: frozenset[ChunkId]
    remembered: Mapping[PackId, Sequence[PackEntry]]
    report: Report


def fsck(
    offline_store: OfflineStore,
    *,
    level: Level = Level.CONNECTIVITY,
    share: Share | None = None,
    shard: Shard = WHOLE,
    spread: Spread[Storage] | None = None,
    progress: Progress = silent,
) -> Report:
    """Check up to `level`; `share` limits the stored data read by the last level. Of a `shard`, the
    commits, the packs and the orphans are those that it has; all else is checked in each. `spread`
    reads the data, by default the threads of this process.

    Changes nothing in the store. Raises `Unavailable` if storage does not answer, `Conflict` for a
    log that requires a newer ckptstore.
    """
    level = Level.DATA if share else level
    return _Fsck(offline_store, level, share or Share(), progress, shard, spread).run().report


def examine(offline_store: OfflineStore, *, share: Share | None, progress: Progress) -> Facts:
    """`fsck` of packs, or with `share` of data, with the facts learned. Packs in which damage was
    found before are always read."""
    return _Fsck(offline_store, Level.DATA, share or Share(bytes=0), progress).run()


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of one check: `missing` chunks, `unread` ones, affected `commits`, and
    findings."""

    commits: frozenset[CommitId]
    missing: frozenset[ChunkId]
    unread: frozenset[ChunkId]
    trees: tuple[Finding, ...]
    packs: tuple[Finding, ...] = ()
    index: tuple[Finding, ...] = ()


@dataclass
class _Fsck:
    """One run."""

    offline_store: OfflineStore
    level: Level
    share: Share
    progress: Progress
    shard: Shard = WHOLE
    spread: Spread[Storage] | None = None
    remembered: Mapping[PackId, Sequence[PackEntry]] = field(default_factory=dict)

    def run(self) -> Facts:
        offline_store, level = self.offline_store, self.level
        storage, config = offline_store.storage, offline_store.config
        self.progress("log", 0, 0)
        chain = read_chain(
            storage, config.store, config.generation, remembered=offline_store.remembered()
        )
        contents = Contents(storage, chain.state)
        catalog = [] if chain.bad else catalog_findings(offline_store, chain, contents)
        seen = self._look(contents)
        data_bytes, bad = 0, list[BadChunk]()
        if level >= Level.DATA:
            data_bytes, bad = verify(
                offline_store, contents, self.share, self.progress, self.spread, self.shard
            )
            if self.shard != WHOLE:
                bad += self._elsewhere(contents, seen.missing, bad)
        if not chain.bad:
            contents, seen, bad = self._looked_again(contents, seen, bad)
        orphans: list[Finding] = []
        if level >= Level.PACKS:
            found = orphan_findings(storage, lambda: self._present(chain))
            orphans = [orphan for orphan in found if self.shard.has(orphan.key)]
        state = contents.state
        silent = [chunk for chunk in bad if isinstance(chunk.problem, Unavailable)]
        bad = [chunk for chunk in bad if not isinstance(chunk.problem, Unavailable)]
        referrers = contents.referrers({*seen.missing, *(chunk.entry.chunk for chunk in bad)})
        findings = (
            *([offline_store.problem] if offline_store.problem else []),
            *log_findings(chain),
            *ref_findings(state),
            *unreadable(contents),
            *_unread(seen, silent),
            *catalog,
            *seen.trees,
            *self._signatures(state),
            *seen.packs,
            *orphans,
            *seen.index,
            *_chunk_findings(contents, seen.missing, bad, referrers),
        )
        packs = [pack for pack in state.packs.values() if self.shard.has(pack.id)]
        commits = sum(map(self.shard.has, state.commits))
        looked = Looked(
            chain.head,
            commits if level >= Level.CONNECTIVITY else 0,
            len(packs),
            sum(len(contents.tables[pack.id]) for pack in packs if pack.id in contents.tables),
            data_bytes,
            sum(pack.stored_bytes for pack in packs),
        )
        return Facts(
            offline_store,
            replace(chain, state=state),
            contents,
            seen.missing,
            tuple(bad),
            frozenset(referrers),
            self.remembered,
            Report(level, findings, looked),
        )

    def _look(self, contents: Contents, before: _Seen | None = None) -> _Seen:
        """The problems visible in `contents`; with `before`, only those found then are checked
        again."""
        walk = Walk(contents, self.offline_store.config.chunk_bytes)
        if self.level >= Level.CONNECTIVITY:
            rows = [row for row in contents.commits() if self.shard.has(row[0])]
            for done, (commit, row) in enumerate(rows):
                self.progress("commits", done, len(rows))
                if before is None or commit in before.commits:
                    walk.commit(commit, row)
        seen = _Seen(
            frozenset(walk.commits),
            frozenset(walk.missing),
            frozenset(walk.unread),
            tuple(walk.findings),
        )
        if self.level < Level.PACKS:
            return seen
        suspects = None if before is None else {finding.pack for finding in before.packs}
        packs = tuple(self._packs(contents, suspects))
        if before is None:
            # Read it before the index is opened, which would recreate a damaged one.
            self.remembered = remembered(
                self.offline_store, contents.state, {*contents.problems, *(f.pack for f in packs)}
            )
        index: tuple[Finding, ...] = ()
        if before is None or before.index:
            index = tuple(index_findings(self.offline_store, contents.state, contents.tables))
        return replace(seen, packs=packs, index=index)

    def _elsewhere(
        self, contents: Contents, missing: Collection[ChunkId], bad: Sequence[BadChunk]
    ) -> list[BadChunk]:
        """Where metadata lies that cannot be read: in packs of other shards, which find it damaged
        there, too. So every shard says the same of it."""
        known = {(chunk.key, chunk.entry.offset) for chunk in bad}
        found = list[BadChunk]()
        for place in (place for chunk in missing for place in contents.inventory.places(chunk)):
            for key in place.keys:
                if (key, place.entry.offset) not in known:
                    try:
                        verify_at(self.offline_store.storage, (key,), place.entry)
                    except (Corrupt, NotFound, Unavailable) as error:
                        found.append(BadChunk(place.pack, key, place.entry, error))
        return found

    def _looked_again(
        self, contents: Contents, seen: _Seen, bad: list[BadChunk]
    ) -> tuple[Contents, _Seen, list[BadChunk]]:
        """The findings that persist: check `seen` again until nothing was removed from the store
        meanwhile."""
        log, twins = self.offline_store.open_log(), False
        for _ in range(LOOKS):
            if not (seen.commits or seen.packs or seen.index or bad or contents.problems):
                break
            now = log.replay(refresh=True)
            if not taken(contents.state, now) and (twins or not seen.missing):
                break
            # Twins are read once something is missing: an exchanged pack hides what its twin still
            # holds.
            twins = twins or bool(seen.missing)
            contents = Contents(self.offline_store.storage, now, contents, twins=twins)
            seen = self._look(contents, seen)
            listed = {pack.id for pack in now.packs.values()}
            bad = [chunk for chunk in bad if chunk.pack in listed]
        return contents, seen, bad

    def _signatures(self, state: State) -> Iterator[Finding]:
        if self.level >= Level.CONNECTIVITY:
            for key, why in damaged(self.offline_store.storage, state.commits):
                step = "delete it, and sign the commit again if you trust it"
                yield Finding(Kind.SIGNATURE, f"{key}: {why}", step, Severity.NOTE, key)

    def _present(self, chain: Chain) -> State:
        return chain.state if chain.bad else self.offline_store.open_log().replay(refresh=True)

    def _packs(
        self, contents: Contents, suspects: Collection[PackId | None] | None
    ) -> Iterator[Finding]:
        packs = contents.state.packs.values()
        listed = sorted(filter(lambda pack: self.shard.has(pack.id), packs), key=attrgetter("id"))
        wanted = [
            PackToRead(pack, contents.tables[pack.id])
            for pack in listed
            if pack.id in contents.tables and (suspects is None or pack.id in suspects)
        ]
        with ExitStack() as stack:
            spread = self.spread
            if spread is None:
                storage = self.offline_store.storage
                side_by_side = REMOTE_READS if storage.capabilities.slow_requests else 1
                threads = stack.enter_context(closing(ThreadPool(side_by_side)))
                spread = here(storage, threads)
            batches = (tuple(wanted[i : i + BATCH]) for i in range(0, len(wanted), BATCH))
            looked, found, done = stack.enter_context(closing(spread(look_at, batches))), [], 0
            for batch, findings in looked:
                found += findings
                done += len(batch)
                self.progress("packs", done, len(wanted))
        yield from sorted(found, key=attrgetter("key"))


def _unread(seen: _Seen, silent: Sequence[BadChunk]) -> Iterator[Finding]:
    """Chunks that storage did not return, and those that may lie in packs which it did not
    return."""
    if seen.unread:
        chunks = count_text(len(seen.unread), "chunk")
        commits = count_text(len(seen.commits), "commit")
        yield unread(Kind.CHUNK, f"{chunks} of {commits} could not be read or looked for")
    for chunk in silent:
        name = f"chunk {chunk.entry.chunk.hex()[:12]} at byte {chunk.entry.offset} of {chunk.key}"
        yield unread(Kind.CHUNK, f"{name} cannot be read: {chunk.problem}", chunk.pack)


def _chunk_findings(
    contents: Contents,
    missing: Collection[ChunkId],
    bad: Collection[BadChunk],
    referrers: Mapping[ChunkId, Referrer],
) -> Iterator[Finding]:
    """Damaged chunks, attributed to commits and leaves. A chunk with a sound copy costs no
    commit."""
    objects: dict[ChunkId, list[BadChunk]] = defaultdict(list)
    for place in bad:
        objects[place.entry.chunk].append(place)
    for lost in sorted(missing):
        if lost not in objects:
            yield _finding(contents.state, lost, referrers.get(lost))
    for chunk, places in objects.items():
        sound = _is_sound(contents, chunk)
        for place in places:
            yield _finding(contents.state, chunk, referrers.get(chunk), place, sound=sound)


def _finding(
    state: State,
    chunk: ChunkId,
    referrer: Referrer | None,
    bad: BadChunk | None = None,
    *,
    sound: bool = False,
) -> Finding:
    """A missing chunk, or a `bad` one, of which another copy may be `sound`."""
    commits, leaf = (referrer.commits, referrer.leaf) if referrer else ((), "")
    severity = severity_of(hidden=bool(commits) and all(state.commits[c].soft for c in commits))
    step, whose = _HEAL, "of no commit that can be read"
    if commits:
        more = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
        whose = f"{leaf}, commit {commits[-1][:12]}{more}"
    if bad and referrer is None:
        whose, severity = "no commit needs it", Severity.NOTE
        step = "run `ckptstore gc`, which drops it, or `ckptstore repair`"
    elif bad and sound:
        commits, severity = (), Severity.DAMAGE
        step = "run `ckptstore repair --apply`: another copy of it is sound"
    name = f"chunk {chunk.hex()[:12]}"
    what = f"{name} ({whose}) lies in no pack that can be read"
    if bad:
        what = f"{name} at byte {bad.entry.offset} of {bad.key} ({whose}) is damaged: {bad.problem}"
    return Finding(
        Kind.CHUNK,
        what,
        step,
        severity,
        bad.key if bad else "",
        pack=bad.pack if bad else None,
        chunk=chunk,
        leaf=leaf,
        commits=commits,
    )


def _is_sound(contents: Contents, chunk: ChunkId) -> bool:
    try:
        contents.verify(chunk)
    except CkptStoreError:
        return False
    return True


def unreadable(contents: Contents) -> Iterator[Finding]:
    """Packs without a readable footer: their content is unknown. Pure."""
    for _, pack in sorted(contents.state.packs.items()):
        if error := contents.problems.get(pack.id):
            size = f"{bytes_text(pack.bytes)}, {pack.chunks} chunks"
            what = f"pack {pack.id} ({size}) cannot be read: {error}"
            if isinstance(error, Unavailable):
                yield unread(Kind.PACK, what, pack.id)
            else:
                yield Finding(Kind.PACK, what, _SAVE, key=pack_key(pack.id), pack=pack.id)


def look_at(storage: Storage, threads: ThreadPool, batch: Sequence[PackToRead]) -> list[Finding]:
    """The problems of some packs, side by side where `threads` are several."""
    found = list[Finding]()
    threads.spread(lambda each: found.extend(pack_findings(storage, *each)), batch)
    return found


def pack_findings(storage: Storage, pack: Pack, table: FooterTable) -> Iterator[Finding]:
    """The problems of one pack with at least one readable footer, `table`."""
    if len(table) != pack.chunks:
        yield _object(
            pack, pack_key(pack.id), f"has {len(table)} chunks; the log says {pack.chunks}"
        )
    for key in keys_of(pack):
        try:
            size = storage.size(key)
            if size is None:
                yield _object(pack, key, "is missing")
            elif size != pack.bytes:
                yield _object(pack, key, f"has {size} bytes; the log says {pack.bytes}")
            elif read_table_at(storage, key).tobytes() != table.tobytes():
                yield _object(pack, key, "lists other chunks than its twin")
        except (Corrupt, NotFound) as error:
            yield _object(pack, key, f"is damaged: {error}")
        except Unavailable as error:
            yield unread(Kind.PACK, str(error), pack.id)


def _object(pack: Pack, key: str, what: str) -> Finding:
    """A problem of one object. The twin of a metadata pack still serves, so nothing is lost yet."""
    if pack.metadata:
        step = "run `ckptstore repair --apply`, which saves its chunks from the sound twin"
        return Finding(Kind.TWIN, f"{key} {what}", step, key=key, pack=pack.id)
    return Finding(Kind.PACK, f"{key} {what}", _SAVE, key=key, pack=pack.id)


def orphan_findings(storage: Storage, present: Callable[[], State]) -> Iterator[Finding]:
    """Objects that no log entry names: left by stopped writers, being written now, or foreign.
    They are listed before `present` reads the state, so newly committed ones are excluded."""
    listing = list_objects(storage)
    state = present()
    for key, size in unlisted(listing, state):
        session = owner(key)
        if session is None:
            yield foreign(key)
            continue
        what = f"{key} ({bytes_text(size)}) is named by no entry of the log"
        step = "nothing: its writer may be at work; else gc will find it dead"
        if state.closed(session):
            step = "run `ckptstore gc`, which deletes it"
        yield Finding(Kind.ORPHAN, what, step, Severity.NOTE, key)
