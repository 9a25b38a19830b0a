"""What a commit consists of, as the commands see it: its leaves from the catalog, or whole trees
where their content is asked for.

How many ranks a commit was made by, and how they held its leaves.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptstore.cli.screen import Screen
from ckptstore.cli.table import Column, Table
from ckptstore.core.geometry import nbytes_of
from ckptstore.core.ids import document_key
from ckptstore.core.model import CommitInfo, Schema
from ckptstore.index.queries import LeafInfo, Queries
from ckptstore.objects.documents import Placed, decode_document, decode_layout
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.state.paths import pickled

if TYPE_CHECKING:
    from ckptstore.restore.reader import Reader, Tree


def leaves_of(store: StoreHandle, queries: Queries, info: CommitInfo) -> dict[str, list[LeafInfo]]:
    """The leaves of each key. The catalog has them; a schema that it lacks is read from the
    packs."""
    return {
        key: queries.leaves(schema) or _leaves_read(store, schema)
        for key, schema in info.schemas.items()
    }


def pickles_of(
    store: StoreHandle, info: CommitInfo, leaves: dict[str, list[LeafInfo]]
) -> dict[str, list[str]]:
    """The paths of each key's leaves that are pickles, which a restore reads with
    `allow_pickle=True` only.

    The catalog takes a pickle for the bytes that it is: the schemas of trees that have bytes at all
    are read from the packs.
    """
    return {
        key: pickled(_schema_read(store, info.schemas[key]))
        if any(leaf.kind == "bytes" for leaf in tree)
        else []
        for key, tree in leaves.items()
    }


def tensor_bytes(leaf: LeafInfo) -> int | None:
    """Raw bytes of a tensor, 0 for one that shares another's memory; None for a leaf whose size the
    schema does not say."""
    if leaf.alias >= 0:
        return 0
    return nbytes_of(leaf.dtype, leaf.shape) if leaf.kind == "tensor" else None


@contextmanager
def reading(store: StoreHandle) -> Iterator["Reader"]:
    """A reader of commits, for as long as the context lasts."""
    from ckptstore.repository.thread_pool import ThreadPool
    from ckptstore.restore.reader import Reader

    threads = ThreadPool(1)
    try:
        yield Reader(store.config, store.objects, threads)
    finally:
        threads.close()


def trees_of(reader: "Reader", info: CommitInfo) -> dict[str, "Tree"]:
    """Schema and content of each key, in the order of the application state."""
    return {key: reader.tree(key, ref) for key, ref in reader.document(info.session, info.id).trees}


def _schema_read(store: StoreHandle, schema_id: str) -> Schema:
    from ckptstore.core.ids import parse_chunk_id
    from ckptstore.objects.schema import decode_schema

    return decode_schema(store.objects.read_metadata(parse_chunk_id(schema_id)))


def _leaves_read(store: StoreHandle, schema_id: str) -> list[LeafInfo]:
    schema = _schema_read(store, schema_id)
    columns = (schema.paths, schema.kinds, schema.dtypes, schema.shapes, schema.aliases)
    return [LeafInfo(*row) for row in zip(*columns, strict=True)]


def read_layout(store: StoreHandle, info: CommitInfo) -> dict[str, Any] | None:
    """`world`, and `groups` of leaves that were placed alike; None for a commit of one rank. Raises
    `Corrupt` and `NotFound`."""
    document = decode_document(store.storage.read(document_key(info.session, info.id)), info.id)
    if document.layout is None:
        return None
    layout = decode_layout(store.objects.read_metadata(document.layout))
    groups = Counter(map(_group, layout.leaves.values()))
    named = [
        {"placements": placements, "mesh": mesh, "ranks": ranks, "leaves": n}
        for (placements, mesh, ranks), n in groups.items()
    ]
    return {"world": layout.world, "groups": named} if layout.world > 1 else None


def print_layout(screen: Screen, layout: dict[str, Any]) -> None:
    columns = (
        Column("placed as", fit="wrap"),
        Column("mesh"),
        Column("ranks", right=True),
        Column("leaves", right=True),
    )
    rows = tuple(
        (group["placements"], group["mesh"], str(group["ranks"]), f"{group['leaves']:,}")
        for group in layout["groups"]
    )
    screen.table(Table(columns, rows, title=f"Layout: {layout['world']} ranks"))


def _group(leaf: Placed) -> tuple[str, str, int]:
    """How a leaf was placed, the shape of the mesh, and how many ranks had some of it."""
    ranks = {rank for ranks in leaf.ranks for rank in ranks}
    boxes = f"{len(leaf.boxes)} boxes" if leaf.boxes else "whole"
    return ", ".join(leaf.placements) or boxes, "x".join(map(str, leaf.mesh or ())), len(ranks)
