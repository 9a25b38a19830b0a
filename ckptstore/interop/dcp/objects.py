"""The objects of a commit that are no tensors to DCP, made again by the registry."""

import io
from collections.abc import Mapping
from typing import Any

import torch

from ckptstore.errors import Corrupt
from ckptstore.interop.dcp.names import Marks, Named
from ckptstore.restore.reader import Destination, Tree
from ckptstore.snapshot import Snapshot
from ckptstore.state import containers, tensors, values
from ckptstore.state.inflate import Inflater, decode_leaf
from ckptstore.state.leaves import Destination as TensorDestination


def objects_of(
    snapshot: Snapshot, items: Mapping[str, Named], *, allow_pickle: bool
) -> dict[str, Any]:
    """The object of each item, by its name; the tensors in them are read together."""
    made: dict[int, dict[int, Any]] = {}
    wanted: list[tuple[Tree, int, Destination, None]] = []
    for item in items.values():
        leaves = made.setdefault(id(item.tree), {})
        schema = item.tree.schema
        for leaf in containers.leaves_of(item.node):
            number = leaf if schema.aliases[leaf] < 0 else schema.aliases[leaf]
            if number in leaves:
                continue
            if schema.kinds[number] == "tensor":
                item.tree.check(number)  # before memory is taken for a shape that may be damaged
                leaves[number] = tensors.empty(schema.dtypes[number], schema.shapes[number])
                wanted.append((item.tree, number, TensorDestination(leaves[number]), None))
            else:
                leaves[number] = decode_leaf(
                    schema, number, snapshot.leaf_bytes(item.tree, number), values.NO_CLASSES
                )
    snapshot.land(wanted)
    return {name: _made(item, made[id(item.tree)], allow_pickle) for name, item in items.items()}


def dumped(value: Any) -> io.BytesIO:
    """An object as DCP's own planner would have written it, for those who read bytes."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def marks_of(snapshot: Snapshot) -> Marks:
    """What a commit's layout says of DCP's names. Raises `Corrupt`."""
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
    for leaf in containers.leaves_of(item.node):
        leaves[leaf] = found[leaf if schema.aliases[leaf] < 0 else schema.aliases[leaf]]
    return Inflater(schema, leaves, {}, values.NO_CLASSES, allow_pickle=allow_pickle).inflate(
        item.node
    )
