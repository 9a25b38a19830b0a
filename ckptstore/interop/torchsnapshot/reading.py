"""How is one object read from a snapshot, in place if possible?"""

import logging
from typing import Any

import torch

from ckptstore.contents import Region
from ckptstore.core.geometry import intersect
from ckptstore.core.model import Box, Node, Shape, leaves_of
from ckptstore.core.text import near
from ckptstore.errors import InvalidInput
from ckptstore.interop.torchsnapshot.errors import NoSuchObject
from ckptstore.interop.torchsnapshot.views import Index, Item
from ckptstore.snapshot import Snapshot
from ckptstore.state import tensors
from ckptstore.state.containers import NAMES
from ckptstore.state.shards import held_of, is_distributed

logger = logging.getLogger("ckptstore")

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of DistributedDataParallel and torch.compile; a commit has the names without them."""


def read(
    index: Index, path: str, out: Any, *, memory_budget_bytes: int | None, allow_pickle: bool
) -> Any:
    """The object under `path` in one rank's state, in `out` if that is a tensor that can hold it.

    The memory budget is raised to the minimum for reading from the store. Raises `NoSuchObject`.
    """
    found = _find(index, path)
    if found is None:
        raise NoSuchObject(
            f"the rank has nothing at {path!r} in this snapshot{near(path, index.items)}; "
            "get_manifest() has what there is"
        )
    item, steps = found
    leaf = item.leaf
    if memory_budget_bytes is not None:
        memory_budget_bytes = max(memory_budget_bytes, 3 * index.trees[item.key].chunk_bytes)
    if leaf is not None and index.trees[item.key].schema.kinds[leaf] == "tensor":
        return _read_tensor(index, item, leaf, out, memory_budget_bytes)
    value = _read_object(index, item, memory_budget_bytes, allow_pickle)
    for step in steps:
        value = value[step]
    return _landed(value, out)


def _find(index: Index, path: str) -> tuple[Item, list[int]] | None:
    """The item at `path`, or above it in a list of values, with the remaining indices."""
    for spelled in (path, _without_wrappers(path)):
        steps: list[int] = []
        at = spelled
        while at:
            item = index.items.get(at)
            if item is not None:
                return (
                    (item, steps) if not steps or _is_in_list(index.value_of(item), steps) else None
                )
            at, _, last = at.rpartition("/")
            if not last.isdecimal():
                break
            steps.insert(0, int(last))
    return None


def _without_wrappers(path: str) -> str:
    key, slash, name = path.partition("/")
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return key + slash + name


def _is_in_list(value: Any, steps: list[int]) -> bool:
    """Whether nested lists of `value` have an element at `steps`."""
    for step in steps:
        if type(value) is not list or step >= len(value):
            return False
        value = value[step]
    return True


def _read_object(
    index: Index, item: Item, memory_budget_bytes: int | None, allow_pickle: bool
) -> Any:
    if isinstance(item.node, Node) and item.node.type == NAMES:
        return index.value_of(item)
    if isinstance(item.node, int):
        return index.snapshot.read(
            index.path_of(item, item.node),
            memory_budget_bytes=memory_budget_bytes,
            allow_pickle=allow_pickle,
        )
    paths = [index.path_of(item, leaf) for leaf in leaves_of(item.node)]
    value = index.snapshot.state_dict(
        item.key,
        select=paths or None,
        memory_budget_bytes=memory_budget_bytes,
        allow_pickle=allow_pickle,
    )
    for step in item.trail:
        value = value[step]
    return value


def _read_tensor(
    index: Index, item: Item, leaf: int, out: Any, memory_budget_bytes: int | None
) -> Any:
    schema, snapshot, path = index.trees[item.key].schema, index.snapshot, index.path_of(item, leaf)
    shape, dtype = schema.shapes[leaf], schema.dtypes[leaf]
    if isinstance(out, torch.Tensor) and is_distributed(out):
        _fill_parts(snapshot, path, shape, out, memory_budget_bytes)
        return out
    if _can_hold(out, dtype, shape):
        snapshot.read_into(out.detach(), path, memory_budget_bytes=memory_budget_bytes)
        return out
    value = snapshot.read(path, memory_budget_bytes=memory_budget_bytes)
    return _landed(value, out)


def _fill_parts(
    snapshot: Snapshot, path: str, shape: Shape, out: Any, memory_budget_bytes: int | None
) -> None:
    """Read this rank's part of a divided tensor; if `out` has another shape, the overlap."""
    held = held_of(out)
    if len(held.shape) != len(shape):
        raise InvalidInput(
            f"{path} has the shape {list(shape)}, obj_out {list(held.shape)}: wanted as many "
            "dimensions"
        )
    if held.shape != shape:
        logger.warning(
            "%s has the shape %s and obj_out %s: what both have is read",
            path,
            list(shape),
            list(held.shape),
        )
    for box, part in held.parts:
        both = intersect(box, Box((0,) * len(shape), shape))
        if both is None:
            continue
        target = part[_region(both, box.offsets)] if shape else part
        snapshot.read_into(
            target,
            path,
            _region(both, (0,) * len(shape)) if shape else None,
            memory_budget_bytes=memory_budget_bytes,
        )


def _region(box: Box, origin: Shape) -> Region:
    return tuple(
        slice(start - first, start - first + n)
        for start, first, n in zip(box.offsets, origin, box.lengths, strict=True)
    )


def _can_hold(out: Any, dtype: str, shape: Shape) -> bool:
    return (
        isinstance(out, torch.Tensor)
        and type(out) in (torch.Tensor, torch.nn.Parameter)
        and tensors.is_strided(out)
        and tensors.is_writable_by_range(out)
        and tuple(out.shape) == shape
        and tensors.DTYPE_NAMES[out.dtype] == dtype
    )


def _landed(value: Any, out: Any) -> Any:
    """`out` with the values of a compatible tensor, else `value`: as documented, `out` is ignored
    if it does not fit.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(out, torch.Tensor):
        return value
    if (out.shape, out.dtype, out.layout) != (value.shape, value.dtype, value.layout):
        mine, theirs = (f"{each.dtype}{list(each.shape)}" for each in (out, value))
        logger.warning("obj_out is %s and the object %s: a new tensor is returned", mine, theirs)
        return value
    with torch.no_grad():
        return out.copy_(value)
