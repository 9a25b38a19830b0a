"""Connectivity: every tree and page of the commits is read, and its chunks are looked up."""

from collections.abc import Iterator

from ckptstore.core.ids import ChunkId, CommitId
from ckptstore.core.model import CommitDocument, TreeRef
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, Unavailable
from ckptstore.log.fold import CommitRow
from ckptstore.maintenance.check.contents import Contents
from ckptstore.maintenance.check.metadata_reader import (
    metadata_of,
    misfits,
)
from ckptstore.maintenance.check.report import Finding, Kind, Severity


class Walk:
    """Visits every distinct tree and page of the commits once. `missing` collects absent and
    unreadable chunks, `commits` the affected commits."""

    def __init__(self, contents: Contents, chunk_bytes: int) -> None:
        self.missing: set[ChunkId] = set()
        self.commits: set[CommitId] = set()
        self.documents: list[tuple[CommitId, CkptStoreError]] = []
        self.findings: list[Finding] = []
        self._trees, self._index, self._chunk_bytes = (
            contents.trees,
            contents.inventory,
            chunk_bytes,
        )
        self._known: set[ChunkId] = set()
        self._met: set[TreeRef | ChunkId] = set()
        self._wrong: set[TreeRef | ChunkId] = set()

    def commit(self, commit: CommitId, row: CommitRow) -> None:
        """Check one commit."""
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
        """Problems of a commit's trees beyond missing chunks."""
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
        """Read a chunk unless it was read already. It counts as missing if no location holds
        bytes that match its id."""
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
            missing = self._index.missing(self._trees.page_ids(page))
            self.missing.update(missing)
            self._wrong |= {page} if missing else set()
        except Corrupt:
            # The page matches its id but is malformed; the finding is made for its tree.
            return

    def _misfits(self, ref: TreeRef) -> Iterator[str]:
        try:
            yield from misfits(*self._trees.contents(ref), self._chunk_bytes)
        except Corrupt as error:
            yield str(error)
