"""Thinning: an old commit loses leaves and keeps the others, without a tensor being read or
written, but for weights that are stored as the rounding of masters that go.

A thinned commit is a commit of its own, with the same schemas, in whose pages some leaves are gone.
One log entry puts it in the place of the original, which is forgotten by the same entry.

What is tied goes together: a content is gone once globs match each of its names, whichever thinning
of this commit brought which glob. So the order of thinnings does not matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from ckptstore.commit.transaction import Destination, Transaction
from ckptstore.commit.write import write_metadata
from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId, CommitId, digest
from ckptstore.core.model import CommitDocument, CommitInfo, Thinning, TreeRef
from ckptstore.core.text import selector
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.log.admission import check
from ckptstore.log.entries import Forget, entry_of, new_bytes_of, new_packs
from ckptstore.log.log import Refused
from ckptstore.maintenance.mover import fill, memory_for, persist
from ckptstore.objects import codecs
from ckptstore.objects.documents import content_id, encode_document
from ckptstore.objects.pack import PAGE, TENSOR
from ckptstore.objects.pages import GONE, split_pages
from ckptstore.repository.chunk_reader import cut
from ckptstore.repository.dedup import items_of
from ckptstore.repository.pack_writer import new_chunk
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import Scratch
from ckptstore.restore.reader import Reader, Tree
from ckptstore.storage.reserve import with_room

_LOOKED_AT = 256
"""Chunks whose patches are in memory at a time."""


class Leaves:
    """Which commits have leaves that match a glob. Schemas come from the catalog; only of thinned
    commits are documents and pages read."""

    def __init__(self, handle: StoreHandle, reader: Reader) -> None:
        self._queries, self._reader = handle.queries(), reader
        self._infos = {info.id: info for info in self._queries.log()}
        self._matches = cache(self._match)

    def matching(self, commit: CommitId, globs: Sequence[str]) -> tuple[str, ...]:
        """Those of `globs` that match a leaf which the commit still has, and which no thinning of
        it matched."""
        info = self._infos.get(commit)
        found = () if info is None else self._ever(info, globs)
        if info is None or not info.thinned or not found:
            return found
        document = self._reader.document(info.session, commit)
        trees = self._reader.trees(document.trees)
        return tuple(glob for glob in found if _matches_more(trees, info.thinned, (glob,)))

    def check(self, globs: Sequence[str]) -> None:
        """Raise `InvalidInput` for a glob that matches no leaf of any commit."""
        for glob in globs:
            if self._infos and not any(self._ever(info, [glob]) for info in self._infos.values()):
                newest = next(iter(self._infos))
                raise InvalidInput(
                    f"no commit has a leaf that matches {glob!r}; nothing was thinned or "
                    f"forgotten: `ckptstore ls {newest[:12]}` lists leaves"
                )

    def _ever(self, info: CommitInfo, globs: Sequence[str]) -> tuple[str, ...]:
        schemas = info.schemas.values()
        return tuple(glob for glob in globs if any(self._matches(s, glob) for s in schemas))

    def _match(self, schema: str, glob: str) -> bool:
        found = self._queries.schema(schema)
        return found is not None and any(map(selector(glob), found.paths))


def thin_commit(
    handle: StoreHandle, reader: Reader, commit: CommitId, globs: Sequence[str]
) -> CommitId | None:
    """Replace a commit by one without the leaves that match `globs`; None if it has none of them.

    A leaf that shares memory with one that stays, stays, until that one is thinned too. Raises
    `Refused` if the commit may not be forgotten, or is not there any more.
    """
    return persist(handle, lambda: _thin(handle, reader, commit, globs))


def _thin(
    handle: StoreHandle, reader: Reader, commit: CommitId, globs: Sequence[str]
) -> CommitId | None:
    state = handle.log.replay()
    if refusal := check(state, Forget((commit,), "")):
        raise Refused(refusal)
    try:
        document = reader.document(state.commits[commit].session, commit)
        trees = reader.trees(document.trees)
    except NotFound:
        # Lost, or deleted by a gc after others forgot the commit: the log says which.
        if refusal := check(handle.log.replay(), Forget((commit,), "")):
            raise Refused(refusal) from None
        raise
    before = document.thinned.globs if document.thinned else ()
    if not _matches_more(trees, before, globs):
        return None
    every = (*before, *(glob for glob in globs if glob not in before))
    old_bytes = new_bytes_of(handle.log.entry(state.commits[commit].n))
    with Transaction.begin(Destination(handle, reader.threads), what="thin") as transaction:
        return _replace(handle, transaction, commit, document, trees, every, old_bytes)


def _replace(
    handle: StoreHandle,
    transaction: Transaction,
    commit: CommitId,
    original: CommitDocument,
    trees: Mapping[str, Tree],
    globs: tuple[str, ...],
    old_bytes: int,
) -> CommitId:
    """Write the pages and the document of the thinned commit, and append its entry.

    The place in the history has what the store grew by for the original, `old_bytes`, and for this.
    """
    matched = _matched(trees, globs)
    new, refs, ids, lost_bytes = dict[ChunkId, tuple[bytes, int]](), [], list[bytes](), 0
    for key, ref in original.trees:
        tree, gone = trees[key], matched[key]
        lost_bytes += sum(tree.raw_bytes(i) for i in gone)
        contents = [GONE if i in gone else each for i, each in enumerate(tree.contents)]
        ids += [ref.schema, *(content.ids for content in contents)]
        if gone:
            pages = [
                (ChunkId(digest(page)), page) for page in split_pages(tree.schema.kinds, contents)
            ]
            ref = TreeRef(ref.schema, tuple(chunk for chunk, _ in pages))
            new |= {chunk: (page, PAGE) for chunk, page in pages}
        else:
            ids += ref.pages
        refs.append((key, ref))
    ids += [original.layout] if original.layout else []
    reused = handle.objects.packs_of(b"".join(ids))
    _write_alone(handle, transaction, b"".join(ids))
    write_metadata(new, transaction.look(), transaction.packs)
    transaction.packs.wait()
    records = [pack.record for pack in transaction.packs.closed]
    document = replace(
        original,
        session=transaction.session,
        tags=(),
        trees=tuple(refs),
        content=content_id(refs),
        logical_bytes=original.logical_bytes - lost_bytes,
        new_bytes=old_bytes + sum(record.stored_bytes for record in records),
        thinned=Thinning(commit, globs),
    )
    thinned, stored = encode_document(document)
    reused |= transaction.look().reused
    body = entry_of(document, thinned, len(stored), records, reused, replaces=commit)
    entry = with_room(handle.storage, partial(transaction.append, body, stored))
    transaction.index(new_packs(entry))
    return thinned


def _write_alone(handle: StoreHandle, transaction: Transaction, ids: bytes) -> None:
    """Write those of the chunks `ids` whole that round others than these: as patches they would
    keep them, which have twice as many bytes."""
    stay, scratch = dict.fromkeys(map(ChunkId, items_of(ids))), Scratch()
    codec = codecs.SPLIT_ZSTD if transaction.packs.codec else codecs.RAW
    with transaction.packs.writing() as writer:
        for looked in cut(tuple(stay), lambda _: 1, _LOOKED_AT):
            rounded = handle.objects.rounded(b"".join(looked))
            alone = [each for each in rounded if not stay.keys() >= set(each.bases)]
            for some in cut(alone, lambda chunk: chunk.raw_bytes, RUN_BYTES):
                with memory_for(some, scratch) as rows:
                    fill(handle.objects, rows, "being thinned", verify_ids=True)
                    for chunk, raw in rows:
                        new = [new_chunk(chunk.id, raw)]
                        writer.add(new, chunk.width, TENSOR, codec=codec, run_bytes=len(raw))
                    writer.flush()


def _matched(trees: Mapping[str, Tree], globs: Sequence[str]) -> dict[str, frozenset[int]]:
    """By key, the leaves with content that match one of `globs`, and so do all their aliases."""
    selected = {key: tree.schema.matching(selector(globs)) for key, tree in trees.items()}
    return {
        key: frozenset(i for i in found if not trees[key].is_gone(i))
        for key, found in selected.items()
    }


def _matches_more(trees: Mapping[str, Tree], before: Sequence[str], globs: Sequence[str]) -> bool:
    """Whether `globs` match a leaf that is there and that none of `before` matches."""
    is_new = selector(globs)
    is_old = selector(before) if before else lambda _: False
    return any(
        is_new(path) and not is_old(path) and not tree.is_gone(i)
        for tree in trees.values()
        for i, path in enumerate(tree.schema.paths)
    )
