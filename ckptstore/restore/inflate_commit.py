"""A nested state made anew from a commit: whole or a part of it, as it was committed, converted, or
mapped into memory."""

from typing import TYPE_CHECKING, Any

from ckptstore.core.ids import CommitId
from ckptstore.restore.mmap import Unmappable
from ckptstore.restore.projection import View
from ckptstore.restore.reader import Reader, ReadRequest
from ckptstore.state import dtype_cast, tensors
from ckptstore.state.containers import leaves_of
from ckptstore.state.inflate import inflate

if TYPE_CHECKING:
    import torch


def assemble(
    reader: Reader,
    commit: CommitId,
    view: View,
    *,
    dtype: "torch.dtype | None" = None,
    mmap: bool = False,
    allow_pickle: bool = False,
    memory_budget_bytes: int | None = None,
) -> Any:
    """The state that `view` describes. Tensors that shared memory share it again.

    With `mmap`, tensors are mapped where they can be, unverified, and read where they cannot.
    """
    schema = view.schema
    values: list[Any] = [None] * len(schema)
    leaves = list(leaves_of(schema.skeleton))
    owners = [i for i in leaves if schema.kinds[i] == "tensor" and schema.aliases[i] < 0]
    converted = frozenset() if dtype is None else dtype_cast.convertible(schema, dtype)
    wanted = []
    for i in owners:
        values[i] = mapped(reader, commit, view, i) if mmap else None
        if values[i] is None:
            view.tree.check(i)
            name = (
                tensors.DTYPE_NAMES[dtype]
                if dtype is not None and i in converted
                else schema.dtypes[i]
            )
            values[i] = tensors.empty(name, schema.shapes[i])
            wanted.append(
                ReadRequest(view.tree, i, dtype_cast.destination(values[i], schema.dtypes[i]))
            )
    reader.read(wanted, commit, memory_budget_bytes=memory_budget_bytes)
    for i in leaves:
        if schema.kinds[i] != "tensor":
            values[i] = reader.leaf_bytes(
                view.tree, i, commit, memory_budget_bytes=memory_budget_bytes
            )
        elif schema.aliases[i] >= 0:
            values[i] = values[schema.aliases[i]]
    return inflate(schema, values, allow_pickle=allow_pickle)


def mapped(reader: Reader, commit: CommitId, view: View, leaf: int) -> "torch.Tensor | None":
    """The tensor of a leaf over mapped memory, or None if it must be read."""
    try:
        return tensors.tensor_from(
            reader.map(view.tree, leaf, commit), view.schema.dtypes[leaf], view.schema.shapes[leaf]
        )
    except Unmappable:
        return None
