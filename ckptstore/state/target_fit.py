"""Does a part of a target fit a node of a snapshot's skeleton? Pure comparisons; nothing moves."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckptstore.core.model import Node, Schema
from ckptstore.state import containers, paths, tensors, values
from ckptstore.state.containers import Parts
from ckptstore.state.tensor_subclasses import split_tensor


def children_of(node: Node, target: Any, classes: Mapping[str, type]) -> list[Any]:
    """For each child of `node`, its counterpart in `target`, or None."""
    if node.keys is None:
        there = (
            list(target)
            if isinstance(target, list | tuple) or type(target).__name__ == "deque"
            else []
        )
        return [there[i] if i < len(there) else None for i in range(len(node.children))]
    if node.type in ("namedtuple", "dataclass"):
        return [getattr(target, key, None) for key in node.keys]
    if not isinstance(target, dict):
        return [None] * len(node.children)
    return [
        target.get(key if type(key) is str else values.decode_key(key, classes))
        for key in node.keys
    ]


def has_places(node: Node, target: Any) -> bool:
    """Whether a sequence or record has all items of `node`, so that unselected items can stay."""
    if node.keys is not None:
        return all(hasattr(target, key) for key in node.keys)
    return type(target).__name__ == node.type and len(target) == len(node.children)


def parts_of(target: torch.Tensor) -> Parts | torch.Tensor | None:
    """The components of a tensor, or the strided tensor equal to it; None for a lazy parameter.

    Raises `InvalidInput` for an unsupported tensor.
    """
    if type(target) in (torch.Tensor, torch.nn.Parameter) and tensors.is_strided(target):
        return target
    return None if is_lazy(target) else split_tensor(target)


def describe_tensor(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} of "
    return f"{layout}{tensors.DTYPE_NAMES[tensor.dtype]}{list(tensor.shape)}"


def tensor_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, torch.Tensor) or containers.is_stateful(value):
        yield path
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensor_paths(child, f"{path}/{paths.segments([values.encode_key(key)])[0]}")
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from tensor_paths(child, f"{path}/{i}")


def describe_node(schema: Schema, node: Node | int) -> str:
    if isinstance(node, int):
        kind = schema.kinds[node]
        return (
            f"{schema.dtypes[node]}{list(schema.shapes[node])}" if kind == "tensor" else f"a {kind}"
        )
    shape = next((values.decode_value(value) for name, value in node.attrs if name == "shape"), "")
    inner = ", ".join(
        describe_node(schema, child) for child in node.children if isinstance(child, int)
    )
    return f"{node.type}{shape} of {inner}"


def is_like(schema: Schema, leaf: int, tensor: torch.Tensor) -> bool:
    return (
        tensor.shape == schema.shapes[leaf]
        and tensors.DTYPE_NAMES[tensor.dtype] == schema.dtypes[leaf]
    )


def is_other(schema: Schema, node: Node, parts: Parts) -> bool:
    """Whether shape, dtype or class differ, which a restore must not change silently."""
    there, here = dict(node.attrs), dict(parts.attrs)
    if any(there.get(name) != here.get(name) for name in ("shape", "dtype", "class")):
        return True
    pairs = zip(node.children, parts.children, strict=False)
    return any(
        isinstance(child, int) and schema.dtypes[child] != tensors.DTYPE_NAMES[below.dtype]
        for child, below in pairs
    )


def fits(schema: Schema, node: Node, parts: Parts) -> bool:
    """Whether each component of a composite tensor can be restored in place."""
    if tuple(parts.keys or ()) != (node.keys or ()) or tuple(sorted(parts.attrs)) != node.attrs:
        return False
    for child, below in zip(node.children, parts.children, strict=True):
        inner = parts_of(below)
        if isinstance(child, int):
            if (
                not isinstance(inner, torch.Tensor)
                or not is_like(schema, child, inner)
                or not tensors.is_writable_by_range(inner)
            ):
                return False
        elif (
            not isinstance(inner, Parts)
            or inner.type != child.type
            or not fits(schema, child, inner)
        ):
            return False
    return True
