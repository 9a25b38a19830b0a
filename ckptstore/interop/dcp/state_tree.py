"""Which tree does a saved state dict become? Pure.

DCP has flat names, and the keys that lead to each. The first key is a key of the application state;
the others make dicts and lists below it. A state dict without nesting, as in
`dcp.save(model.state_dict())`, becomes one key, `model`. Keys of a mapping that are all whole
numbers become numbers again, since DCP made text of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.commit.transaction import TreeContent
from ckptstore.core import geometry
from ckptstore.core.geometry import byte_ranges
from ckptstore.core.ids import CHUNK_ID_BYTES
from ckptstore.core.model import INLINE_BYTES, Box, LeafContent, LeafKind, Node, Schema, Shape
from ckptstore.distributed.tiling import misfit, tile
from ckptstore.errors import Conflict
from ckptstore.interop.dcp.items import BoxItem, ObjectItem, Stored
from ckptstore.interop.dcp.names import Keys, Marks, is_divided
from ckptstore.objects import canonical
from ckptstore.state import values
from ckptstore.state.paths import segment, segments


@dataclass(frozen=True, slots=True)
class Planted:
    """A saved state dict as trees; `layout` is the commit's layout."""

    trees: list[TreeContent]
    layout: bytes | None


def plant(
    stored: Sequence[Stored],
    keys: Mapping[str, Keys],
    *,
    flat_key: str,
    chunk_bytes: int,
    world: int,
    rank: int | None = None,
) -> Planted:
    """The trees of the written items. `keys` leads to items; a name without keys is its own key.
    `rank` marks one rank's part.

    Raises `Conflict` for boxes that do not tile their tensors.
    """
    by_name: dict[str, list[Stored]] = {}
    for each in stored:
        by_name.setdefault(each.name, []).append(each)
    order = [
        *(name for name in keys if name in by_name),
        *(name for name in by_name if name not in keys),
    ]
    places = {name: tuple(keys.get(name) or (name,)) for name in order}
    marks = Marks(rank=rank)
    if order and all(len(place) == 1 for place in places.values()):
        marks.flat = flat_key
        places = {name: (flat_key, *place) for name, place in places.items()}
    planter = _Planter(chunk_bytes, marks)
    trees = [
        planter.tree(str(key), below)
        for key, below in _nested((places[name], by_name[name]) for name in order).items()
    ]
    return Planted(trees, _layout(planter, world, marks))


def _nested(items: Iterable[tuple[Keys, list[Stored]]]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for place, stored in items:
        at = root
        for key in place[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise Conflict(
                    f"{stored[0].name} lies below another item of the state dict; give them "
                    "different names"
                )
        at[place[-1]] = stored
    return root


def _layout(planter: "_Planter", world: int, marks: Marks) -> bytes | None:
    plain = marks == Marks()
    if plain and world == 1:
        return None
    document: dict[str, Any] = {"world": world, "trees": planter.held}
    return canonical.encode(document if plain else {**document, "dcp": marks.document()})


class _Planter:
    """Makes the trees one by one. `held` lists the rank of each box."""

    def __init__(self, chunk_bytes: int, marks: Marks) -> None:
        self._chunk_bytes, self._marks = chunk_bytes, marks
        self.held: dict[str, dict[str, Any]] = {}
        self._columns: list[tuple[str, LeafKind, str, Shape, int]] = []
        self._contents: list[LeafContent] = []
        self._key = ""

    def tree(self, key: str, below: Any) -> TreeContent:
        self._columns, self._contents, self._key = [], [], key
        self.held[key] = {}
        skeleton = self._node(below, segment(key))
        columns = tuple(zip(*self._columns, strict=True)) or ((),) * 5
        return TreeContent(key, Schema(skeleton, *columns), self._contents)

    def _node(self, below: Any, path: str) -> Node | int:
        if isinstance(below, list):
            return self._item(below, path)
        if all(type(key) is int for key in below) and sorted(below) == list(range(len(below))):
            return Node(
                "list", tuple(self._node(below[i], f"{path}/{i}") for i in range(len(below)))
            )
        names = [values.encode_key(key) for key in _as_numbers(list(below))]
        children = tuple(
            self._node(child, f"{path}/{name}")
            for child, name in zip(below.values(), segments(names), strict=True)
        )
        return Node("dict", children, tuple(names))

    def _item(self, stored: list[Stored], path: str) -> Node | int:
        first = stored[0].item
        if isinstance(first, ObjectItem):
            return self._object(first, stored[0].contents, path)
        boxes = self._boxes(stored)
        if self._marks.rank is not None and any(box.lengths != first.shape for box in boxes):
            return self._part(first, boxes, path)
        if 0 not in first.shape and (problem := misfit(first.shape, tuple(boxes))):
            ranks = sorted({each.rank for each in stored})
            raise Conflict(
                f"{stored[0].name} with shape {list(first.shape)} is not saved exactly once by "
                f"ranks {ranks}: {problem}"
            )
        self._held_by(path, boxes)
        content = whole_content(
            first.dtype,
            first.shape,
            {box: each.contents[0] for box, each in boxes.items()},
            self._chunk_bytes,
        )
        return self._leaf(path, "tensor", content, first.dtype, first.shape)

    def _boxes(self, stored: Sequence[Stored]) -> dict[Box, Stored]:
        """The rank that wrote each box. Raises `Conflict` if ranks have different tensors under one
        name.
        """
        kinds = {
            (each.item.dtype, each.item.shape) if isinstance(each.item, BoxItem) else None
            for each in stored
        }
        if len(kinds) > 1:
            what = " and ".join(
                "an object" if kind is None else f"{kind[0]}{list(kind[1])}" for kind in kinds
            )
            raise Conflict(
                f"{stored[0].name} is {what} on different ranks; give different things different "
                "names"
            )
        found = {
            each.item.box: each
            for each in stored
            if isinstance(each.item, BoxItem) and 0 not in each.item.box.lengths
        }
        return dict(sorted(found.items()))

    def _object(self, item: ObjectItem, contents: Sequence[LeafContent], path: str) -> Node | int:
        if item.is_bytes:
            self._marks.raw.append(path)
        first, schema = len(self._columns), item.schema
        columns = zip(
            schema.paths, schema.kinds, schema.dtypes, schema.shapes, schema.aliases, strict=True
        )
        for (below, kind, dtype, shape, alias), content in zip(columns, contents, strict=True):
            self._leaf(
                path + below, kind, content, dtype, shape, alias + first if alias >= 0 else -1
            )
        if is_divided(schema.skeleton, schema):
            self._marks.items.append(path)
        return _shifted(schema.skeleton, first)

    def _part(self, item: BoxItem, boxes: Mapping[Box, Stored], path: str) -> Node:
        """A tensor of which only boxes exist: each becomes a tensor, named by its offsets."""
        self._marks.parts[path] = item.shape
        names = tuple(",".join(map(str, box.offsets)) for box in boxes)
        children = tuple(
            self._leaf(f"{path}/{name}", "tensor", each.contents[0], item.dtype, box.lengths)
            for name, (box, each) in zip(names, boxes.items(), strict=True)
        )
        return Node("dict", children, names)

    def _held_by(self, path: str, boxes: Mapping[Box, Stored]) -> None:
        if len(boxes) > 1:
            self.held[self._key][path] = {
                "mesh": None,
                "placements": [],
                "boxes": [[list(box.offsets), list(box.lengths)] for box in boxes],
                "ranks": [[each.rank] for each in boxes.values()],
            }

    def _leaf(
        self,
        path: str,
        kind: LeafKind,
        content: LeafContent,
        dtype: str = "",
        shape: Shape = (),
        alias: int = -1,
    ) -> int:
        self._columns.append((path, kind, dtype, shape, alias))
        self._contents.append(content)
        return len(self._columns) - 1


def whole_content(
    dtype: str, shape: Shape, boxes: Mapping[Box, LeafContent], chunk_bytes: int
) -> LeafContent:
    """The content of a tensor from its boxes, which tile it: chunks of the whole where no edge cuts
    one.
    """
    nbytes, width = geometry.nbytes_of(dtype, shape), geometry.width_of(dtype)
    if nbytes <= INLINE_BYTES:
        return LeafContent(inline=_assembled(shape, width, nbytes, boxes), raw_bytes=nbytes)
    ordered = tuple(boxes)
    if len(ordered) == 1:
        return LeafContent(ids=boxes[ordered[0]].ids, raw_bytes=nbytes)
    tiling = tile(shape, width, chunk_bytes, ordered)
    if not tiling.whole or tiling.cells:
        return LeafContent(
            ids=b"".join(boxes[box].ids for box in ordered), raw_bytes=nbytes, boxes=ordered
        )
    ids = bytearray(tiling.chunks * CHUNK_ID_BYTES)
    for span in tiling.spans:
        own = boxes[ordered[span.box]].ids[span.first * CHUNK_ID_BYTES : span.stop * CHUNK_ID_BYTES]
        ids[span.chunk * CHUNK_ID_BYTES : span.chunk * CHUNK_ID_BYTES + len(own)] = own
    return LeafContent(ids=bytes(ids), raw_bytes=nbytes)


def _assembled(shape: Shape, width: int, nbytes: int, boxes: Mapping[Box, LeafContent]) -> bytes:
    data = bytearray(nbytes)
    for box, content in boxes.items():
        at, own = 0, content.inline or b""
        for start, stop in byte_ranges(shape, box, width):
            data[start:stop] = own[at : at + stop - start]
            at += stop - start
    return bytes(data)


def _as_numbers(keys: list[Any]) -> list[Any]:
    """Keys with whole numbers instead of DCP's text."""
    if all(isinstance(key, str) and key.isdecimal() and str(int(key)) == key for key in keys):
        return [int(key) for key in keys]
    return keys


def _shifted(node: Node | int, by: int) -> Node | int:
    """A skeleton with leaf numbers starting at `by`."""
    if isinstance(node, int):
        return node + by
    return Node(
        node.type, tuple(_shifted(child, by) for child in node.children), node.keys, node.attrs
    )
