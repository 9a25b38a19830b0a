"""The items that a rank saves: made from its plan, written, and described to the coordinator.

Tensors are written in place, other objects as the registry divides them. Objects come from the
planner's `lookup_object`, so that nothing is pickled. A planner that makes its own bytes
(`resolve_data`, `transform_object`) is asked for them: bytes of `torch.save` with plain values
become values again, others stay bytes.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptstore.commit.plan import Extent
from ckptstore.core import geometry
from ckptstore.core.ids import SessionId, parse_session_id
from ckptstore.core.model import Box, LeafContent, Schema, Shape
from ckptstore.distributed import framing
from ckptstore.distributed.external_commit import Part, decode_contents, encode_contents
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.interop.formats.pickles import load_torch
from ckptstore.interop.formats.sources import Loaded, Shelf
from ckptstore.objects import canonical
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.state import tensors
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import Source
from ckptstore.state.leaves import NOTHING, TensorSource
from ckptstore.state.paths import segment
from ckptstore.store import Store, internals_of

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
    receipt: bytes
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


def write_items(
    store: Store, session: SessionId, rank: int, resolved: Sequence[Resolved], *, alone: bool
) -> bytes:
    """Hash and pack the items, durable on return. Returns the message to the coordinator.

    A rank that saves `alone` stores each box as a tensor of its own.
    """
    parts = [part for item, sources in resolved for part in _parts(item, sources, alone)]
    written = internals_of(store).runtime.parts_committer.write(session, rank, parts)
    given = iter(written.contents)
    heads: list[list[Any]] = []
    schemas: list[bytes] = []
    contents: list[LeafContent] = []
    for item, sources in resolved:
        contents += [_EMPTY if source is NOTHING else next(given) for source in sources]
        if item.box is None:
            heads.append([item.name, item.is_bytes])
            schemas.append(encode_schema(item.schema))
        else:
            heads.append([item.name, item.schema.dtypes[0], item.shape, *item.box])
    return framing.join(
        [
            session.encode(),
            written.receipt,
            canonical.encode(heads),
            framing.join(schemas),
            encode_contents(contents),
        ]
    )


def read_message(rank: int, message: object) -> RankItems:
    """The inverse of `write_items`. Raises `Corrupt`."""
    if not isinstance(message, bytes):
        raise Corrupt(
            f"rank {rank} sent no message about its items; do all ranks use a StoreWriter, and one "
            "version of ckptstore?"
        )
    session, receipt, encoded_heads, schemas, contents = framing.split(message, 5)
    heads = canonical.decode(encoded_heads)
    objects = iter(framing.split(schemas, sum(len(head) == 2 for head in heads)))
    items: list[Item] = []
    for name, *head in heads:
        if len(head) == 1:
            items.append(Item(name, decode_schema(next(objects)), is_bytes=head[0]))
        else:
            dtype, shape, offsets, lengths = head
            items.append(box_item(name, dtype, tuple(shape), Box(tuple(offsets), tuple(lengths))))
    leaves = iter(decode_contents(contents, sum(len(item.schema) for item in items)))
    stored = [Stored(item, [next(leaves) for _ in item.schema.paths], rank) for item in items]
    return RankItems(parse_session_id(session.decode()), receipt, stored)


def dumped(value: Any) -> io.BytesIO:
    """An object in the bytes of DCP's own planner, for planners that read bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _parts(item: Item, sources: Sequence[Source], alone: bool) -> Iterator[Part]:
    """One part for each leaf with bytes of its own."""
    schema = item.schema
    for i, source in enumerate(sources):
        if source is NOTHING:
            continue
        if schema.kinds[i] != "tensor" or not source.nbytes:
            yield Part(Extent((source.nbytes,), 1, source.nbytes, False), source, source.nbytes)
            continue
        dtype, shape, box = schema.dtypes[i], schema.shapes[i], None
        if item.box and not alone and shape != item.shape:
            shape, box = item.shape, item.box
        floating = dtype.startswith(("float", "bfloat"))
        extent = Extent(shape, geometry.width_of(dtype), source.nbytes, floating, box)
        yield Part(extent, source, geometry.nbytes_of(dtype, shape))


def _tensor(planner: SavePlanner, item: WriteItem, shelf: Shelf, allow_pickle: bool) -> Resolved:
    name, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk is None:
        raise InvalidInput(f"{name} is planned as a tensor without saying which part of it")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    tensor = _asked(planner, item)
    if not tensors.is_strided(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return object_item(name, tensor, allow_pickle)
    if tuple(tensor.shape) != box.lengths:
        raise InvalidInput(
            f"{name}: the planner gives {list(tensor.shape)} of it; its plan says "
            f"{list(box.lengths)}"
        )
    source: Source = TensorSource(tensor)
    if not _lends(planner):
        # The planner makes new data, so it is not all held at once.
        source = Loaded(lambda: _asked(planner, item), tensor.nbytes, tensor.itemsize, shelf)
    dtype = tensors.DTYPE_NAMES[tensor.dtype]
    return box_item(name, dtype, tuple(data.size), box), [source]


def _asked(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"the planner gives a {type(tensor).__qualname__} for the tensor {item.index.fqn}"
        )
    return tensor.detach()


def _object(planner: SavePlanner, item: WriteItem, allow_pickle: bool) -> Resolved:
    name = item.index.fqn
    if _lends(planner):
        return object_item(name, planner.lookup_object(item.index), allow_pickle)  # type: ignore[attr-defined]
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise InvalidInput(
            f"the planner gives a {type(data).__qualname__} for the object {name}; wanted "
            "io.BytesIO"
        )
    try:  # without running code
        value = load_torch(io.BytesIO(data.getvalue()), name, allow_pickle=False)
        return object_item(name, value, allow_pickle)
    except InvalidInput:
        return object_item(name, data.getvalue(), allow_pickle, is_bytes=True)


def _lends(planner: SavePlanner) -> bool:
    """Whether the planner returns the state dict's own objects."""
    return keeps(planner, DefaultSavePlanner, "resolve_data", "transform_object")


def keeps(planner: Any, base: type, *methods: str) -> bool:
    """Whether a planner is DCP's own, as far as `methods` go."""
    return isinstance(planner, base) and all(
        getattr(type(planner), method) is getattr(base, method) for method in methods
    )
