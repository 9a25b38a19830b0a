"""How does a rank write DCP's items, and how are its objects read back?

Tensors are written in place, other objects by the registry; a message describes each item to the
coordinator. Objects come from the planner's `lookup_object`, so that nothing is pickled. A planner
that makes its own bytes (`resolve_data`, `transform_object`) is asked for them. Bytes of
`torch.save` with plain values become values again; others stay bytes.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore.commit.plan import Extent
from ckptstore.core import geometry
from ckptstore.core.model import Box, LeafContent, Schema, Shape, leaves_of
from ckptstore.distributed import framing
from ckptstore.distributed.external_commit import Part, contents_from, contents_to
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.dcp.names import Marks, Named
from ckptstore.interop.formats.pickles import load_torch
from ckptstore.interop.formats.sources import Loaded, Shelf
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.restore.reader import ReadRequest
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state import tensors
from ckptstore.state.flatten import flatten
from ckptstore.state.inflate import Inflater, decode_leaf
from ckptstore.state.leaf_sources import Source
from ckptstore.state.leaves import NOTHING, TensorSource
from ckptstore.state.leaves import Destination as TensorDestination
from ckptstore.state.paths import segment

_EMPTY = LeafContent(inline=b"")


@dataclass(frozen=True, slots=True)
class BoxItem:
    """A box of a tensor of `shape`."""

    dtype: str
    shape: Shape
    box: Box


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """A flattened object, its paths relative to the item; `is_bytes` marks bytes that the planner
    made.
    """

    schema: Schema
    is_bytes: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A written item: its kind, the content of each leaf, and the rank that wrote it."""

    name: str
    item: "BoxItem | ObjectItem"
    contents: Sequence[LeafContent]
    rank: int


Resolved: TypeAlias = tuple[BoxItem | ObjectItem, list[Source]]


def resolve(plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool) -> list[Resolved]:
    """The items of a rank's final plan, in its order, with the sources of their bytes.

    Raises `InvalidInput`, naming the item, for objects unknown to the registry unless
    `allow_pickle`, and for data that differs from the plan.
    """
    shelf = Shelf()
    return [
        _object(planner, item, allow_pickle)
        if item.type == WriteItemType.BYTE_IO
        else _tensor(planner, item, shelf, allow_pickle)
        for item in plan.items
    ]


def parts_of(resolved: Sequence[Resolved], *, alone: bool) -> list[Part]:
    """One part for each leaf of the items with bytes. A rank that saves `alone` treats its boxes as
    tensors.
    """
    return [part for item, sources in resolved for part in _parts(item, sources, alone)]


def messages_of(resolved: Sequence[Resolved], contents: Sequence[LeafContent]) -> list[bytes]:
    """The coordinator's message about each item; `contents` are those of `parts_of`."""
    messages, given = [], iter(contents)
    for item, sources in resolved:
        found = [_EMPTY if source is NOTHING else next(given) for source in sources]
        if isinstance(item, BoxItem):
            head: list[Any] = [
                item.dtype,
                list(item.shape),
                list(item.box.offsets),
                list(item.box.lengths),
            ]
            messages.append(framing.pack([head, b"", contents_to(found)]))
        else:
            messages.append(
                framing.pack([[item.is_bytes], encode_schema(item.schema), contents_to(found)])
            )
    return messages


def decode_message(name: str, rank: int, message: object) -> Stored:
    """The inverse of `messages_of` for one item; raises `Corrupt`."""
    if not isinstance(message, bytes):
        raise Corrupt(
            f"rank {rank} says nothing of {name}; do all ranks use a StoreWriter, and one version "
            "of ckptstore?"
        )
    head, schema_bytes, said = framing.unpack(message)
    contents = contents_from(said)
    if schema_bytes:
        return Stored(name, ObjectItem(decode_schema(schema_bytes), head[0]), contents, rank)
    dtype, shape, offsets, lengths = head
    box = Box(tuple(offsets), tuple(lengths))
    return Stored(name, BoxItem(dtype, tuple(shape), box), contents, rank)


def _parts(item: "BoxItem | ObjectItem", sources: Sequence[Source], alone: bool) -> list[Part]:
    if isinstance(item, BoxItem):
        shape = item.box.lengths if alone else item.shape
        box = None if item.box.lengths == shape else item.box
        extent = Extent(
            shape, geometry.width_of(item.dtype), sources[0].nbytes, _is_float(item.dtype), box
        )
        return [
            Part(
                extent,
                sources[0],
                geometry.nbytes_of(item.dtype, shape) if sources[0].nbytes else 0,
            )
        ]
    found = []
    for i, source in enumerate(sources):
        if source is NOTHING:
            continue
        dtype = item.schema.dtypes[i]
        if item.schema.kinds[i] == "tensor" and source.nbytes:
            extent = Extent(item.schema.shapes[i], source.width, source.nbytes, _is_float(dtype))
        else:
            extent = Extent((source.nbytes,), 1, source.nbytes, False)
        found.append(Part(extent, source, source.nbytes))
    return found


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _tensor(planner: SavePlanner, item: WriteItem, shelf: Shelf, allow_pickle: bool) -> Resolved:
    name, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk is None:
        raise InvalidInput(f"{name} is planned as a tensor without saying which part of it")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    tensor = _resolved(planner, item)
    if not tensors.is_strided(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return flattened(name, tensor, allow_pickle, is_bytes=False)
    if tuple(tensor.shape) != box.lengths:
        raise InvalidInput(
            f"{name}: the planner gives {list(tensor.shape)} of it; its plan says "
            f"{list(box.lengths)}"
        )
    return BoxItem(tensors.DTYPE_NAMES[tensor.dtype], tuple(data.size), box), [
        _source(planner, item, tensor, shelf)
    ]


def _source(planner: SavePlanner, item: WriteItem, tensor: torch.Tensor, shelf: Shelf) -> Source:
    if _lends(planner):
        return TensorSource(tensor)
    # The planner makes new data, so it is not all held at once.
    return Loaded(lambda: _resolved(planner, item), tensor.nbytes, tensor.itemsize, shelf)


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"the planner gives a {type(tensor).__qualname__} for the tensor {item.index.fqn}"
        )
    return tensor.detach()


def _object(planner: SavePlanner, item: WriteItem, allow_pickle: bool) -> Resolved:
    name = item.index.fqn
    if _lends(planner):
        return flattened(name, planner.lookup_object(item.index), allow_pickle, is_bytes=False)  # type: ignore[attr-defined]
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise InvalidInput(
            f"the planner gives a {type(data).__qualname__} for the object {name}; wanted "
            "io.BytesIO"
        )
    try:
        value = load_torch(
            io.BytesIO(data.getvalue()), name, allow_pickle=False
        )  # which runs no code
        return flattened(name, value, allow_pickle, is_bytes=False)
    except InvalidInput:
        return flattened(name, data.getvalue(), allow_pickle, is_bytes=True)


def _lends(planner: SavePlanner) -> bool:
    """Whether the planner returns the state dict's own objects."""
    cls: Any = type(planner)
    return (
        isinstance(planner, DefaultSavePlanner)
        and cls.resolve_data is DefaultSavePlanner.resolve_data
        and cls.transform_object is DefaultSavePlanner.transform_object
    )


def flattened(name: str, value: Any, allow_pickle: bool, *, is_bytes: bool) -> Resolved:
    """An object as an item, flattened by the registry."""
    flat = flatten({name: value}, allow_pickle=allow_pickle)[name]
    own, schema = len(segment(name)), flat.schema
    paths = tuple(path[own:] for path in schema.paths)
    return ObjectItem(Schema(schema.skeleton, paths, *_columns(schema)), is_bytes), flat.leaves


def _columns(schema: Schema) -> tuple[Any, ...]:
    return schema.kinds, schema.dtypes, schema.shapes, schema.aliases


def objects_of(
    snapshot: Snapshot, items: Mapping[str, Named], *, allow_pickle: bool
) -> dict[str, Any]:
    """The object of each item, by name. The tensors in them are read together."""
    made: dict[int, dict[int, Any]] = {}
    wanted: list[ReadRequest] = []
    for item in items.values():
        leaves = made.setdefault(id(item.tree), {})
        schema = item.tree.schema
        for leaf in leaves_of(item.node):
            number = leaf if schema.aliases[leaf] < 0 else schema.aliases[leaf]
            if number in leaves:
                continue
            if schema.kinds[number] == "tensor":
                item.tree.check(
                    number
                )  # before memory is allocated for a shape that may be damaged
                leaves[number] = tensors.empty(schema.dtypes[number], schema.shapes[number])
                wanted.append(ReadRequest(item.tree, number, TensorDestination(leaves[number])))
            else:
                data = contents_of(snapshot).leaf_bytes(item.tree, number)
                leaves[number] = decode_leaf(schema, number, data)
    contents_of(snapshot).read(wanted)
    return {name: _made(item, made[id(item.tree)], allow_pickle) for name, item in items.items()}


def dumped(value: Any) -> io.BytesIO:
    """An object in the bytes of DCP's own planner, for planners that read bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def marks_of(snapshot: Snapshot) -> Marks:
    """The marks of DCP's names in a commit's layout. Raises `Corrupt`."""
    layout = snapshot.layout
    try:
        return Marks() if layout is None or layout.dcp is None else Marks.of(layout.dcp)
    except (AttributeError, KeyError, TypeError) as error:
        raise Corrupt(
            f"the layout of commit {snapshot.id[:12]} is damaged: {error!r}; run `ckptstore fsck`"
        ) from error


def _made(item: Named, found: Mapping[int, Any], allow_pickle: bool) -> Any:
    schema = item.tree.schema
    leaves = [None] * len(schema)
    for leaf in leaves_of(item.node):
        leaves[leaf] = found[leaf if schema.aliases[leaf] < 0 else schema.aliases[leaf]]
    return Inflater(schema, leaves, allow_pickle=allow_pickle).inflate(item.node)
