"""How many ranks a commit was made by, and how they held its leaves."""

from collections import Counter
from typing import Any

from ckptstore.cli.screen import Screen
from ckptstore.cli.table import Column, Table
from ckptstore.core.ids import document_key
from ckptstore.core.model import CommitInfo
from ckptstore.objects.documents import decode_document
from ckptstore.objects.layout import Placed, decode_layout
from ckptstore.repository.store_handle import StoreHandle


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
