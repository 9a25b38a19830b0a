"""The items that ranks save: written as parts, described to the coordinator, and joined to the
trees of a commit.

DCP has flat names, and the keys that lead to each. The first key is a key of the application state;
the others make dicts and lists below it. A state dict without nesting, as in
`dcp.save(model.state_dict())`, becomes one key, `model`. Keys of a mapping that are all whole
numbers become numbers again, since DCP made text of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ckptstore import Snapshot, Store
from ckptstore.errors import Conflict, Corrupt
from ckptstore.interop.dcp.names import Keys, Marks, is_divided
from ckptstore.plugin.encoding import canonical, decode_schema, encode_schema
from ckptstore.plugin.leaves import NOTHING, BytesSource, Source, segment, segments
from ckptstore.plugin.model import (
    CHUNK_ID_BYTES,
    INLINE_BYTES,
    Box,
    LeafContent,
    Node,
    Schema,
    SessionId,
    Shape,
    nbytes_of,
    parse_session_id,
    width_of,
)
from ckptstore.plugin.ranks import framing
from ckptstore.plugin.stores import publish_parts, write_parts
from ckptstore.plugin.tiling import misfit, tile
from ckptstore.plugin.values import flatten, values
from ckptstore.plugin.writing import (
    CommitMetadata,
    Extent,
    GivenPart,
    Session,
    TreeContent,
    extent_of_bytes,
)
from ckptstore.plugins.foreign.sources import Joined

_EMPTY = LeafContent(inline=b"")


@dataclass(frozen=True, slots=True)
class Item:
    """An object, or, with `box`, a box of a tensor of `shape`.

    `schema` has its leaves, with paths relative to the item; `is_bytes` marks bytes that the
    planner made.
    """

    name: str
    schema: Schema
    box: Box | None = None
    shape: Shape = ()
    is_bytes: bool = False


Resolved: TypeAlias = tuple[Item, list[Source]]
"""An item and the sources of its leaves."""


class Stored(NamedTuple):
    """A written item: the content of each leaf, and the rank that wrote it."""

    item: Item
    contents: Sequence[LeafContent]
    rank: int


class RankItems(NamedTuple):
    """The items of one rank, the receipt for them, and the session that they were written under."""

    session: SessionId
    receipt: list[Any]
    stored: list[Stored]


def box_item(name: str, dtype: str, shape: Shape, box: Box) -> Item:
    schema = Schema(0, ("",), ("tensor",), (dtype,), (box.lengths,), (-1,))
    return Item(name, schema, box, shape)


def object_item(name: str, value: Any, allow_pickle: bool, *, is_bytes: bool = False) -> Resolved:
    """An object as an item, as the registry divides it. Raises `InvalidInput` for one that the
    registry does not know, unless `allow_pickle`."""
    flat = flatten({name: value}, allow_pickle=allow_pickle)[name]
    own = len(segment(name))
    schema = replace(flat.schema, paths=tuple(path[own:] for path in flat.schema.paths))
    return Item(name, schema, is_bytes=is_bytes), flat.leaves


def write_items(
    store: Store,
    session: SessionId,
    rank: int,
    resolved: Sequence[Resolved],
    run: str,
    *,
    alone: bool,
) -> bytes:
    """Hash and pack the items for a commit to `run`, durable on return. Returns the message to the
    coordinator.

    A rank that saves `alone` stores each box as a tensor of its own.
    """
    parts = [part for item, sources in resolved for part in _parts(item, sources, alone)]
    written = write_parts(store, session, rank, parts, run)
    given = iter(written.contents)
    rows: list[list[Any]] = []
    for item, sources in resolved:
        contents = [_EMPTY if source is NOTHING else next(given) for source in sources]
        said = [[each.inline, each.ids, each.raw_bytes] for each in contents]
        if item.box is None:
            rows.append([item.name, said, item.is_bytes, encode_schema(item.schema)])
        else:
            rows.append([item.name, said, item.schema.dtypes[0], item.shape, *item.box])
    return framing.pack([session, written.receipt, rows])


def read_message(rank: int, message: object) -> RankItems:
    """The inverse of `write_items`. Raises `Corrupt`."""
    if not isinstance(message, bytes):
        raise Corrupt(
            f"rank {rank} sent no message about its items; do all ranks use a StoreWriter, and one "
            "version of ckptstore?"
        )
    session, receipt, rows = framing.unpack(message)
    stored = []
    try:
        for name, contents, *head in rows:
            if len(head) == 2:
                item = Item(name, decode_schema(head[1]), is_bytes=head[0])
            else:
                dtype, shape, offsets, lengths = head
                item = box_item(name, dtype, tuple(shape), Box(tuple(offsets), tuple(lengths)))
            stored.append(Stored(item, [LeafContent(*each) for each in contents], rank))
    except (TypeError, ValueError) as error:
        raise framing.damaged(error) from error
    return RankItems(parse_session_id(session), receipt, stored)


def _parts(item: Item, sources: Sequence[Source], alone: bool) -> Iterator[GivenPart]:
    """One part for each leaf with bytes of its own."""
    schema = item.schema
    for i, source in enumerate(sources):
        if source is NOTHING:
            continue
        path = item.name + schema.paths[i]
        if schema.kinds[i] != "tensor" or not source.nbytes:
            extent = extent_of_bytes(schema.kinds[i], source.nbytes)
            yield GivenPart(extent, source, source.nbytes, path)
            continue
        dtype, shape, box = schema.dtypes[i], schema.shapes[i], None
        if item.box and not alone and shape != item.shape:
            shape, box = item.shape, item.box
        extent = Extent(shape, width_of(dtype), source.nbytes, dtype, box)
        yield GivenPart(extent, source, nbytes_of(dtype, shape), path)


def publish_items(
    store: Store,
    session: Session,
    ranks: Sequence[RankItems],
    keys: Mapping[str, Keys],
    label: CommitMetadata,
    *,
    flat_key: str,
    world: int,
    alone: int | None = None,
    started: float,
) -> Snapshot:
    """Commit what `ranks` have written under `session`, and end it. `keys` leads to items; a name
    without keys is its own key. `alone` is the number of a rank that saves its part alone.

    Raises `Conflict` for boxes that do not tile their tensors, and for another session's items.
    """
    planter = _Planter(store.chunk_bytes, alone)
    stored = [each for rank in ranks for each in rank.stored]
    trees = planter.trees(_nested(stored, keys, flat_key, planter.marks))
    layout: dict[str, Any] = {"world": world, "trees": planter.held}
    if planter.marks != Marks():
        layout["dcp"] = planter.marks.document()
    encoded = None if world == 1 and "dcp" not in layout else canonical.encode(layout)
    receipts = [rank.receipt for rank in ranks]
    return publish_parts(
        store, session, label, trees, encoded, receipts, started=started, follow=alone is None
    )


def _nested(
    stored: Sequence[Stored], keys: Mapping[str, Keys], flat_key: str, marks: Marks
) -> dict[Any, Any]:
    """The items of each name, in nested dicts by their keys."""
    by_name: dict[str, list[Stored]] = {}
    for each in stored:
        by_name.setdefault(each.item.name, []).append(each)
    order = [name for name in keys if name in by_name]
    order += [name for name in by_name if name not in keys]
    places = {name: tuple(keys.get(name) or (name,)) for name in order}
    if order and all(len(place) == 1 for place in places.values()):
        marks.flat = flat_key
        places = {name: (flat_key, *place) for name, place in places.items()}
    root: dict[Any, Any] = {}
    for name, place in places.items():
        at = root
        for key in place[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise Conflict(
                    f"{name} lies below another item of the state dict; give them different names"
                )
        if place[-1] in at:
            raise Conflict(
                f"{name} has the place of other items of the state dict; give them different names"
            )
        at[place[-1]] = by_name[name]
    return root


class _Planter:
    """Makes the trees one by one. `held` has the ranks of the boxes of each divided leaf."""

    def __init__(self, chunk_bytes: int, alone: int | None) -> None:
        self._chunk_bytes = chunk_bytes
        self.marks = Marks(rank=alone)
        self.held: dict[str, dict[str, Any]] = {}
        self._leaves: list[tuple[Any, ...]] = []
        self._contents: list[LeafContent] = []
        self._held: dict[str, Any] = {}

    def trees(self, root: Mapping[Any, Any]) -> list[TreeContent]:
        return [self._tree(str(key), below) for key, below in root.items()]

    def _tree(self, key: str, below: Any) -> TreeContent:
        self._leaves, self._contents = [], []
        self._held = self.held[key] = {}
        skeleton = self._node(below, segment(key))
        columns = tuple(zip(*self._leaves, strict=True)) or ((),) * 5
        return TreeContent(key, Schema(skeleton, *columns), self._contents)

    def _node(self, below: Any, path: str) -> Node | int:
        if isinstance(below, list):
            return self._item(below, path)
        if all(type(key) is int for key in below) and sorted(below) == list(range(len(below))):
            children = tuple(self._node(below[i], f"{path}/{i}") for i in range(len(below)))
            return Node("list", children)
        names = [values.encode_key(key) for key in _as_numbers(list(below))]
        children = tuple(
            self._node(child, f"{path}/{name}")
            for child, name in zip(below.values(), segments(names), strict=True)
        )
        return Node("dict", children, tuple(names))

    def _item(self, stored: list[Stored], path: str) -> Node | int:
        item, contents, _ = stored[0]
        boxes = _boxes(stored)
        if item.box is None:
            return self._object(item, contents, path)
        if self.marks.rank is not None and not _is_whole(boxes, item.shape):
            # Without bytes, it is one empty box: DCP looks for a tensor, and finds no overlap.
            return self._part(item, boxes or {item.box: stored[0]}, path)
        if 0 not in item.shape and (problem := misfit(item.shape, tuple(boxes))):
            ranks = sorted({each.rank for each in stored})
            raise Conflict(
                f"{item.name} with shape {list(item.shape)} is not saved exactly once by ranks "
                f"{ranks}: {problem}"
            )
        if len(boxes) > 1:
            self._held[path] = {
                "mesh": None,
                "placements": [],
                "boxes": list(boxes),
                "ranks": [[each.rank] for each in boxes.values()],
            }
        found = {box: each.contents[0] for box, each in boxes.items()}
        (dtype,) = item.schema.dtypes
        content = whole_content(dtype, item.shape, found, self._chunk_bytes)
        return self._leaf((path, "tensor", dtype, item.shape, -1), content)

    def _object(self, item: Item, contents: Sequence[LeafContent], path: str) -> Node | int:
        schema, first = item.schema, len(self._leaves)
        if item.is_bytes:
            self.marks.raw.append(path)
        if is_divided(schema.skeleton, schema):
            self.marks.items.append(path)
        for i, content in enumerate(contents):
            alias = schema.aliases[i] + first if schema.aliases[i] >= 0 else -1
            kind, dtype, shape = schema.kinds[i], schema.dtypes[i], schema.shapes[i]
            self._leaf((path + schema.paths[i], kind, dtype, shape, alias), content)
        return _shifted(schema.skeleton, first)

    def _part(self, item: Item, boxes: Mapping[Box, Stored], path: str) -> Node:
        """A tensor of which only boxes exist: each becomes a tensor, named by its offsets."""
        self.marks.parts[path] = item.shape
        (dtype,) = item.schema.dtypes
        names = tuple(",".join(map(str, box.offsets)) for box in boxes)
        children = tuple(
            self._leaf((f"{path}/{name}", "tensor", dtype, box.lengths, -1), each.contents[0])
            for name, (box, each) in zip(names, boxes.items(), strict=True)
        )
        return Node("dict", children, names)

    def _leaf(self, columns: tuple[Any, ...], content: LeafContent) -> int:
        """Append a leaf: its path, kind, dtype, shape and alias, as in a schema's columns."""
        self._leaves.append(columns)
        self._contents.append(content)
        return len(self._leaves) - 1


def _boxes(stored: Sequence[Stored]) -> dict[Box, Stored]:
    """The boxes of one name with bytes, in order. Raises `Conflict` if ranks have different things
    under it."""
    kinds = {
        "an object" if item.box is None else f"{item.schema.dtypes[0]}{list(item.shape)}"
        for item, _, _ in stored
    }
    if len(kinds) > 1:
        raise Conflict(
            f"{stored[0].item.name} is {' and '.join(sorted(kinds))} on different ranks; give "
            "different things different names"
        )
    found = {each.item.box: each for each in stored}
    return {box: found[box] for box in sorted(filter(None, found)) if 0 not in box.lengths}


def _is_whole(boxes: Iterable[Box], shape: Shape) -> bool:
    """Whether none of `boxes` is a part; the whole of an empty tensor has no box."""
    return 0 in shape or [box.lengths for box in boxes] == [shape]


def whole_content(
    dtype: str, shape: Shape, boxes: Mapping[Box, LeafContent], chunk_bytes: int
) -> LeafContent:
    """The content of a tensor from its boxes, which tile it: chunks of the whole where no edge cuts
    one.
    """
    nbytes, width = nbytes_of(dtype, shape), width_of(dtype)
    if nbytes <= INLINE_BYTES:
        pieces = [(box, BytesSource(content.inline or b"")) for box, content in boxes.items()]
        return LeafContent(inline=Joined(shape, width, pieces).read_all(), raw_bytes=nbytes)
    ordered = tuple(boxes)
    if len(ordered) == 1:
        return LeafContent(ids=boxes[ordered[0]].ids, raw_bytes=nbytes)
    tiling = tile(shape, width, chunk_bytes, ordered)
    if not tiling.whole or tiling.cells:
        joined = b"".join(boxes[box].ids for box in ordered)
        return LeafContent(ids=joined, raw_bytes=nbytes, boxes=ordered)
    ids = bytearray(tiling.chunks * CHUNK_ID_BYTES)
    for span in tiling.spans:
        own = boxes[ordered[span.box]].ids[span.first * CHUNK_ID_BYTES : span.stop * CHUNK_ID_BYTES]
        ids[span.chunk * CHUNK_ID_BYTES : span.chunk * CHUNK_ID_BYTES + len(own)] = own
    return LeafContent(ids=bytes(ids), raw_bytes=nbytes)


def _as_numbers(keys: list[Any]) -> list[Any]:
    """Keys with whole numbers instead of DCP's text."""
    if all(isinstance(key, str) and key.isdecimal() and str(int(key)) == key for key in keys):
        return [int(key) for key in keys]
    return keys


def _shifted(node: Node | int, by: int) -> Node | int:
    """A skeleton with leaf numbers starting at `by`."""
    if isinstance(node, int):
        return node + by
    children = tuple(_shifted(child, by) for child in node.children)
    return Node(node.type, children, node.keys, node.attrs)
