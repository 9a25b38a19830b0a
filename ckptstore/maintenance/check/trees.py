"""Documents, schemas and pages of commits, read by the packs' footers alone: their problems, and
the users of a chunk.

Another process may collect meanwhile. A missing object counts only if nothing was removed in
between. The log tells, because the entry that deletes a pack or purges a commit precedes the
removal of its objects (docs/gc.md).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import (
    CHUNK_ID_BYTES,
    ChunkId,
    CommitId,
    PackId,
    SessionId,
    document_key,
    twin_key,
)
from ckptstore.core.model import SHARED, CommitDocument, TreeRef
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.state import CommitRow, State
from ckptstore.maintenance.check import Finding, Kind, severity_of, unread
from ckptstore.objects.codecs import PATCH
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA, FooterTable, bases_of
from ckptstore.objects.pages import decode_page, join_pages
from ckptstore.objects.schema import decode_schema, shared_keys
from ckptstore.repository.chunk_reader import keys_of
from ckptstore.repository.dedup import items_of
from ckptstore.repository.footers import (
    Inventory,
    Table,
    load_tables,
    read_chunk,
    read_table_at,
    verify_any,
)
from ckptstore.restore.reader import Tree
from ckptstore.storage.contract import Storage

_CACHED = 1024


@dataclass(frozen=True, slots=True)
class Referrer:
    """The users of a chunk: commits, oldest first, and one of their leaves (or a description,
    for metadata)."""

    commits: tuple[CommitId, ...]
    leaf: str


class Contents:
    """The chunks of the packs that `state` lists, and the trees of its commits. `tables` are the
    footers, `problems` the reasons why others could not be read. Schemas and pages are cached
    while they are likely to be needed again."""

    def __init__(
        self,
        storage: Storage,
        state: State,
        before: "Contents | None" = None,
        *,
        twins: bool = False,
    ) -> None:
        """Reads the footers, except those in `before`. With `twins`, reads those of twins too: an
        exchanged pack hides what its twin holds."""
        self.state, self._storage = state, storage
        known: Mapping[PackId, FooterTable] = before.tables if before else {}
        listed = [pack for _, pack in sorted(state.packs.items())]
        self.tables: dict[PackId, FooterTable] = {
            pack.id: known[pack.id] for pack in listed if pack.id in known
        }
        self.problems: dict[PackId, CkptStoreError] = {}
        for pack, table in load_tables(storage, [p for p in listed if p.id not in known]):
            if isinstance(table, CkptStoreError):
                self.problems[pack.id] = table
            else:
                self.tables[pack.id] = table
        self.inventory = Inventory((*self._readable(), *(self._strays() if twins else ())))
        self.bases = bases_of_patches(self.tables.values())
        self.metadata = lru_cache(_CACHED)(self.read)
        self.schema = lru_cache(_CACHED)(lambda chunk: decode_schema(self.read(chunk)))

    def _readable(self) -> Iterator[Table]:
        """The packs whose footers could be read."""
        for pack in self.state.packs.values():
            if pack.id in self.tables:
                yield Table(pack.id, keys_of(pack), self.tables[pack.id])

    def _strays(self) -> Iterator[Table]:
        """Twins that list other chunks than their packs do."""
        for pack in self.state.packs.values():
            key = twin_key(pack.id)
            try:
                table = read_table_at(self._storage, key) if pack.metadata else None
            except CkptStoreError:
                continue
            known = self.tables.get(pack.id)
            if table is not None and known is not None and table.tobytes() != known.tobytes():
                yield Table(pack.id, (key,), table)

    def commits(self) -> list[tuple[CommitId, CommitRow]]:
        """The commits, oldest first."""
        return sorted(self.state.commits.items(), key=lambda item: item[1].age)

    def document(self, commit: CommitId) -> CommitDocument:
        """The document of a commit; raises `Corrupt`, `NotFound` or `Unavailable`."""
        row = self.state.commits[commit]
        document = read_document(self._storage, row.session, commit)
        wanted = (row.run, row.step, row.content)
        # Store and session are where it was first committed: it may be mirrored.
        if (document.run, document.step, document.content) != wanted:
            raise Corrupt(
                f"the document of commit {commit[:12]} is not the one that the log tells of: "
                f"wanted {wanted}"
            )
        return document

    def documents(self) -> Iterator[tuple[CommitId, CommitDocument]]:
        """The documents that can be read, oldest first."""
        for commit, _ in self.commits():
            try:
                yield commit, self.document(commit)
            except CkptStoreError:
                continue

    @property
    def unread(self) -> Unavailable | None:
        """The error of a pack that storage did not return: any chunk that is missing elsewhere may
        lie in it."""
        errors = self.problems.values()
        return next((error for error in errors if isinstance(error, Unavailable)), None)

    def read(self, chunk: ChunkId) -> bytes:
        """The bytes of a chunk from any location that matches its id; raises `Corrupt`,
        `NotFound` or `Unavailable`."""
        try:
            return bytes(read_chunk(self._storage, self.inventory.places(chunk)))
        except (Corrupt, NotFound) as error:
            raise self.unread or error from error

    def verify(self, chunk: ChunkId) -> None:
        """Check that some location has the bytes of a chunk, or of a patch that makes them. Raises
        `Corrupt`, `NotFound` or `Unavailable`."""
        verify_any(self._storage, self.inventory.places(chunk))

    def tree(self, name: str, ref: TreeRef, chunk_bytes: int) -> Tree:
        """A tree's schema and complete content."""
        schema = self.schema(ref.schema)
        pages = [self.metadata(page) for page in ref.pages]
        return Tree(name, ref, schema, join_pages(pages, len(schema)), chunk_bytes)

    def referrers(self, chunks: Collection[ChunkId]) -> Mapping[ChunkId, Referrer]:
        """The users of `chunks`, and of what is a patch of them. Reads every document, and every
        page once."""
        return self._users(self.dependents(chunks))

    def named(self, chunks: Collection[ChunkId]) -> Collection[ChunkId]:
        """Those of `chunks` that a commit names itself. Reads as `referrers`."""
        return self._users({chunk: (chunk,) for chunk in chunks}).keys()

    def _users(self, made_of: Mapping[ChunkId, Sequence[ChunkId]]) -> Mapping[ChunkId, Referrer]:
        """The users of chunks; `made_of` has those that each one needs, itself included."""
        found: dict[ChunkId, Referrer] = {}
        wanted = frozenset(made_of)

        @cache
        def hits(page: ChunkId) -> tuple[tuple[int, ChunkId], ...]:
            return tuple(self._hits(page, wanted))

        for commit, document in self.documents() if wanted else ():
            names = {chunk: name for chunk, _, name in _metadata(document) if chunk in wanted} | {
                chunk: self._path(name, ref, leaf)
                for name, ref in document.trees
                for page in ref.pages
                for leaf, chunk in hits(page)
            }
            users: dict[ChunkId, str] = {}
            for user, leaf in names.items():
                for chunk in made_of[user]:
                    users.setdefault(chunk, leaf)
            for chunk, leaf in users.items():
                known = found.get(chunk, Referrer((), leaf))
                found[chunk] = Referrer((*known.commits, commit), known.leaf)
        return found

    def dependents(self, chunks: Collection[ChunkId]) -> Mapping[ChunkId, Sequence[ChunkId]]:
        """Each of `chunks` and of the patches that need some of them, with those that it needs."""
        patches_of: dict[ChunkId, list[ChunkId]] = {}
        for patch, bases in self.bases.items():
            for base in bases:
                patches_of.setdefault(base, []).append(patch)
        found: dict[ChunkId, list[ChunkId]] = {}
        for chunk in set(chunks):
            left, seen = [chunk], set[ChunkId]()
            while left:
                user = left.pop()
                if user not in seen:
                    seen.add(user)
                    found.setdefault(user, []).append(chunk)
                    left += patches_of.get(user, ())
        return found

    def missing(self, ids: bytes) -> list[ChunkId]:
        """Which of `ids`, and of the bases that they are made of, lie in no pack."""
        if not self.bases:
            return self.inventory.missing(ids)
        needed, left = dict[ChunkId, None](), list(map(ChunkId, reversed(items_of(ids))))
        while left:
            if (chunk := left.pop()) not in needed:
                needed[chunk] = None
                left += self.bases.get(chunk, ())
        return self.inventory.missing(b"".join(needed))

    def _hits(self, page: ChunkId, wanted: frozenset[ChunkId]) -> Iterator[tuple[int, ChunkId]]:
        """The leaves of a page that need one of `wanted`; none if the page cannot be read."""
        try:
            decoded = decode_page(self.metadata(page))
        except CkptStoreError:
            return
        for leaf, content in enumerate(decoded.leaves, decoded.first_leaf):
            for i in range(0, len(content.ids), CHUNK_ID_BYTES):
                if (chunk := ChunkId(content.ids[i : i + CHUNK_ID_BYTES])) in wanted:
                    yield leaf, chunk

    def _path(self, name: str, ref: TreeRef, leaf: int) -> str:
        try:
            return self.schema(ref.schema).paths[leaf]
        except (CkptStoreError, IndexError):
            return f"leaf {leaf} of {shown(name)}"


def bases_of_patches(tables: Iterable[FooterTable]) -> Mapping[ChunkId, tuple[ChunkId, ...]]:
    """The bases of each chunk that is stored as a patch and nowhere whole: of the copy that the
    fewest patches make."""
    found, whole = dict[ChunkId, tuple[int, list[bytes]]](), list[npt.NDArray[np.void]]()
    for table in tables:
        is_patch = table["codec"] == PATCH
        if is_patch.any():
            rows = table[is_patch]
            bases = bases_of(rows).tolist()
            for i, (name, depth) in enumerate(rows[["chunk", "depth"]].tolist()):
                nearest = found.get(ChunkId(name))
                if nearest is None or depth < nearest[0]:
                    found[ChunkId(name)] = depth, bases[i]
        whole.append(table["chunk"][~is_patch])
    if found:
        for chunks in whole:
            for chunk in found.keys() & set(map(ChunkId, chunks.tolist())):
                del found[chunk]
    return {chunk: tuple(map(ChunkId, dict.fromkeys(bases))) for chunk, (_, bases) in found.items()}


def taken(before: State, now: State) -> bool:
    """Whether packs or commits that `before` lists are no longer listed `now`. Pure."""
    names = {pack.id for pack in now.packs.values()}
    return any(pack.id not in names for pack in before.packs.values()) or any(
        commit not in now.commits for commit in before.commits
    )


def shown(name: str) -> str:
    """The tree of this name, for people."""
    return "plain values" if name == SHARED else name


def read_document(storage: Storage, session: SessionId, commit: CommitId) -> CommitDocument:
    """The document that `session` wrote of a commit; raises `Corrupt`, `NotFound` or
    `Unavailable`."""
    return decode_document(storage.read(document_key(session, commit)), commit)


def metadata_of(document: CommitDocument) -> dict[ChunkId, int]:
    """The kinds of a commit's schemas, pages and layout."""
    return {chunk: kind for chunk, kind, _ in _metadata(document)}


def _metadata(document: CommitDocument) -> Iterator[tuple[ChunkId, int, str]]:
    """A commit's schemas, pages and layout, with their kinds and names."""
    for name, ref in document.trees:
        of = shown(name)
        yield ref.schema, SCHEMA, f"the schema of {of}"
        yield from ((page, PAGE, f"page {n} of {of}") for n, page in enumerate(ref.pages))
    if document.layout is not None:
        yield document.layout, LAYOUT, "its layout"


class Walk:
    """Connectivity: visits every distinct tree and page of the commits once, and looks up its
    chunks. `missing` collects absent and damaged chunks, `unread` those that storage did not
    return, or that may lie in packs which it did not return; `commits` are the affected commits."""

    def __init__(self, contents: Contents, chunk_bytes: int) -> None:
        self.missing: set[ChunkId] = set()
        self.unread: set[ChunkId] = set()
        self.commits: set[CommitId] = set()
        self.findings: list[Finding] = []
        self._contents, self._chunk_bytes = contents, chunk_bytes
        self._is_whole = cache(self._look_at)
        self._fits: dict[tuple[TreeRef, tuple[str, ...]], bool] = {}

    def commit(self, commit: CommitId, row: CommitRow) -> None:
        """Check one commit."""
        try:
            document = self._contents.document(commit)
        except CkptStoreError as error:
            self.findings.append(_no_document(commit, row, error))
            self.commits.add(commit)
            return
        whole = [self._is_whole(chunk, kind) for chunk, kind in metadata_of(document).items()]
        trees = [(name, ref, document.keys_of(name)) for name, ref in document.trees]
        for name, ref, keys in trees:
            lacking = self.missing | self.unread
            if (ref, keys) not in self._fits and lacking.isdisjoint((ref.schema, *ref.pages)):
                found = [_misfit(name, commit, row, w) for w in self._misfits(name, ref, keys)]
                self.findings += found
                self._fits[ref, keys] = not found
        if not all(whole) or not all(self._fits.get((ref, keys)) for _, ref, keys in trees):
            self.commits.add(commit)

    def _look_at(self, chunk: ChunkId, kind: int) -> bool:
        """Whether a location holds the bytes of this chunk, and those that it names exist."""
        try:
            data = self._contents.metadata(chunk)
        except CkptStoreError as error:
            (self.unread if isinstance(error, Unavailable) else self.missing).add(chunk)
            return False
        try:
            leaves = decode_page(data).leaves if kind == PAGE else ()
        except Corrupt:
            # The page matches its id but is malformed; the finding is made for its tree.
            return True
        missing = self._contents.missing(b"".join(content.ids for content in leaves))
        (self.unread if self._contents.unread else self.missing).update(missing)
        return not missing

    def _misfits(self, name: str, ref: TreeRef, keys: Sequence[str]) -> Iterator[str]:
        """Leaves whose content does not match their shape: path and problem."""
        try:
            tree = self._contents.tree(name, ref, self._chunk_bytes)
            if name == SHARED and (got := shared_keys(tree.schema)) != tuple(keys):
                yield f"keys: wanted {', '.join(keys)}, got {', '.join(got)}"
        except Corrupt as error:
            yield str(error)
            return
        yield from misfits(tree)


def misfits(tree: Tree) -> Iterator[str]:
    """Leaves whose content does not match their shape: path and problem. Pure."""
    for i, path in enumerate(tree.schema.paths):
        try:
            if tree.schema.aliases[i] < 0 and not tree.is_gone(i):
                tree.check(i)
        except (Corrupt, KeyError, ValueError) as error:
            yield f"{path}: {error}"


def _misfit(name: str, commit: CommitId, row: CommitRow, what: str) -> Finding:
    return Finding(
        Kind.TREE,
        f"tree {shown(name)} of commit {commit[:12]} does not fit together: {what}",
        "restore another commit",
        severity_of(hidden=row.soft > 0),
        leaf=what.split(":")[0],
        commits=(commit,),
    )


def _no_document(commit: CommitId, row: CommitRow, error: CkptStoreError) -> Finding:
    what = (
        f"the document of commit {commit[:12]} (run {row.run}, step {row.step}) cannot be read: "
        f"{error}"
    )
    if isinstance(error, Unavailable):
        return unread(Kind.DOCUMENT, what)
    return Finding(
        Kind.DOCUMENT,
        what,
        "run `ckptstore repair`, with --from and a mirror that has it; no other commit is hit",
        severity_of(hidden=row.soft > 0),
        document_key(row.session, commit),
        row.n,
        commits=(commit,),
    )
