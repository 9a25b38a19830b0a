"""How does packed content become a commit? Write schemas, pages, layout and document, then the log
entry."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.write import write_metadata
from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import ChunkId, CommitId, SessionId, digest, document_key
from ckptstore.core.model import CommitDocument, LeafContent, PackRecord, Schema, TreeRef
from ckptstore.log import entries
from ckptstore.objects.documents import content_id, encode_document
from ckptstore.objects.pack import LAYOUT, PAGE, SCHEMA
from ckptstore.objects.pages import split_pages
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import Dedup
from ckptstore.repository.pack_writer import PackSet
from ckptstore.storage.contract import Storage, put_finished


class TreeContent(NamedTuple):
    """One key of a state whose chunks are packed: its schema, and its leaves' contents in order."""

    key: str
    schema: Schema
    contents: Sequence[LeafContent]


class Metadata(NamedTuple):
    """References to a commit's metadata in packs."""

    trees: tuple[tuple[str, TreeRef], ...]
    layout: ChunkId | None


class Published(NamedTuple):
    """A durable document, which becomes a commit when the log names it. `own` lists the objects to
    delete if that fails."""

    document: CommitDocument
    commit: CommitId
    document_bytes: int
    own: tuple[str, ...]


class Publisher:
    """Writes the metadata and documents of one store's commits."""

    def __init__(self, config: StoreConfig, objects: ObjectStore) -> None:
        self._config, self._objects = config, objects
        self._schemas = LastSchemas()

    def write_metadata(
        self,
        trees: Iterable[TreeContent],
        dedup: Dedup,
        packs: PackSet,
        layout: bytes | None = None,
    ) -> Metadata:
        """Pack the new schemas, pages and layout. The pack is closed; `packs.wait` makes it
        durable."""
        metadata: dict[ChunkId, tuple[bytes, int]] = {}
        refs = []
        for key, tree_schema, contents in trees:
            schema = self._schemas.encode(key, tree_schema)
            schema_id = ChunkId(digest(schema))
            named = [
                (ChunkId(digest(data)), data) for data in split_pages(tree_schema.kinds, contents)
            ]
            metadata[schema_id] = (schema, SCHEMA)
            metadata.update((chunk, (data, PAGE)) for chunk, data in named)
            refs.append((key, TreeRef(schema_id, tuple(chunk for chunk, _ in named))))
        layout_id = None if layout is None else ChunkId(digest(layout))
        if layout_id and layout is not None:
            metadata[layout_id] = (layout, LAYOUT)
        write_metadata(metadata, dedup, packs)
        return Metadata(tuple(refs), layout_id)

    def write_document(
        self,
        session: SessionId,
        label: CommitMetadata,
        metadata: Metadata,
        records: Sequence[PackRecord],
        *,
        logical_bytes: int,
        leaves: int,
    ) -> Published:
        """Write the document of a commit that registers the packs `records`."""
        document = CommitDocument(
            store=self._config.store,
            session=session,
            run=label.run,
            step=label.step,
            message=label.message,
            time_ns=time.time_ns(),
            parents=label.parents,
            metrics=label.metrics,
            tags=label.tags,
            trees=metadata.trees,
            layout=metadata.layout,
            content=content_id(metadata.trees),
            logical_bytes=logical_bytes,
            new_bytes=sum(record.bytes * (2 if record.metadata else 1) for record in records),
            leaves=leaves,
        )
        commit, stored = encode_document(document)
        return put_document(
            self._objects.storage, document_key(session, commit), document, commit, stored
        )


def put_document(
    storage: Storage, key: str, document: CommitDocument, commit: CommitId, stored: bytes
) -> Published:
    """Store the document under `key`. Raises `Conflict` if `key` has other bytes."""
    created = put_finished(storage, key, stored)
    return Published(document, commit, len(stored), (key,) if created else ())


def entry_body(
    published: Published, records: Sequence[PackRecord], reused: Iterable[int]
) -> entries.Commit:
    """The log entry of a commit that registers the packs `records` and reuses the packs numbered
    `reused`."""
    document = published.document
    return entries.Commit(
        session=document.session,
        commit=published.commit,
        content=document.content,
        run=document.run,
        step=document.step,
        parents=document.parents,
        message=document.message,
        metrics=document.metrics,
        tags=document.tags,
        packs=tuple(records),
        reused=frozenset(reused),
        schemas=tuple((key, ref.schema.hex()) for key, ref in document.trees),
        logical_bytes=document.logical_bytes,
        new_bytes=document.new_bytes,
        leaves=document.leaves,
        document_bytes=published.document_bytes,
    )
