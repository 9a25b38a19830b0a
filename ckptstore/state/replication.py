"""Which whole leaves are replicas on all ranks, and which belong to one? Reads no tensor.

DistributedDataParallel keeps parameters equal and broadcasts the first rank's buffers; optimizers
of such parameters have equal state. Random number generators and data loaders differ by rank.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ckptstore.state.leaf_sources import FlatState, Mark
from ckptstore.state.leaves import TensorSource
from ckptstore.state.optimizers import is_named
from ckptstore.state.stateful import RNGState


@dataclass(frozen=True, slots=True)
class Globs:
    """What the caller knows, by globs of paths: leaves that are replicas, and leaves that are each
    rank's own.

    With `compare`, content decides about what nothing is known of; without it, that is each rank's
    own, equal or not.
    """

    replicated: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    compare: bool = True


def marked(
    app_state: Mapping[str, Any], flats: Mapping[str, FlatState], globs: Globs
) -> dict[str, FlatState]:
    """`flats` with marks."""
    known = _replicas(app_state.values())
    return {
        key: replace(flat, marks=_marks(app_state[key], flat, known, globs))
        for key, flat in flats.items()
    }


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The memory of parameters and buffers that DistributedDataParallel keeps equal, and the
    parameters themselves."""

    parameters: frozenset[int]
    buffers: frozenset[int]
    objects: frozenset[int]


def _replicas(values: Iterable[Any]) -> _Replicas:
    parallel = [
        module
        for value in values
        if isinstance(value, torch.nn.Module)
        for module in value.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    ignored = {name for module in parallel for name in module.parameters_to_ignore}
    named = [
        (name, parameter)
        for module in parallel
        for name, parameter in module.module.named_parameters()
        if name not in ignored
    ]
    buffers = [
        buffer
        for module in parallel
        if module.broadcast_buffers
        for buffer in module.module.buffers()
    ]
    return _Replicas(
        frozenset(parameter.data_ptr() for _, parameter in named) - {0},
        frozenset(buffer.data_ptr() for buffer in buffers) - {0},
        frozenset(id(parameter) for _, parameter in named),
    )


def _marks(value: Any, flat: FlatState, known: _Replicas, globs: Globs) -> dict[int, Mark]:
    count = len(flat.schema)
    if isinstance(value, RNGState) or _is_loader(value):
        return dict.fromkeys(range(count), "private")
    marks: dict[int, Mark] = {}
    if isinstance(value, torch.optim.Optimizer):
        if not is_named(flat.schema.skeleton):
            marks.update((i, "numbered") for i in flat.held)
        if known.objects.issuperset(
            id(each) for group in value.param_groups for each in group["params"]
        ):
            marks.update(
                (i, "replica")
                for i, kind in enumerate(flat.schema.kinds)
                if kind == "tensor" and i not in flat.held
            )
    elif known.parameters or known.buffers:
        for i, source in enumerate(flat.leaves):
            if isinstance(source, TensorSource) and (address := source.tensor.data_ptr()):
                if address in known.buffers:
                    marks[i] = "lead"
                elif address in known.parameters:
                    marks[i] = "replica"
    wanted = _matching(flat.schema.paths, globs.replicated)
    # Buffers that the first rank's count of may differ until the next forward broadcasts them.
    marks.update((i, "replica") for i in wanted if i not in flat.held and marks.get(i) != "lead")
    if not globs.compare and not _is_parallel(value):
        marks = {
            i: marks.get(i, "private") for i in range(count) if i in marks or i not in flat.held
        }
    marks.update((i, "private") for i in _matching(flat.schema.paths, globs.private))
    return marks


def _is_parallel(value: Any) -> bool:
    """Whether what `value` holds besides parameters and buffers is to be equal too:
    DistributedDataParallel makes ranks do the same."""
    return isinstance(value, torch.nn.Module) and any(
        isinstance(module, DistributedDataParallel) for module in value.modules()
    )


def _matching(paths: Sequence[str], globs: Sequence[str]) -> list[int]:
    return (
        [
            i
            for i, path in enumerate(paths)
            if any(fnmatch.fnmatchcase(path, glob) for glob in globs)
        ]
        if globs
        else []
    )


def _is_loader(value: Any) -> bool:
    """Whether `value` hands out data from a place that it remembers: it is iterated over, has a
    state, and is no container."""
    if isinstance(value, Mapping | Sequence | torch.nn.Module | torch.Tensor):
        return False
    return (
        hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
        and hasattr(value, "__iter__")
    )


def is_bound_to_world_size(value: Any) -> bool:
    """Whether `value` is a data loader that does not say it can go on with another number of ranks
    (`any_world_size = True`)."""
    return _is_loader(value) and not getattr(value, "any_world_size", False)
