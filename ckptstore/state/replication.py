"""Which whole leaves are replicas on all ranks, and which belong to one? Reads no tensor.

DistributedDataParallel keeps parameters equal and broadcasts the first rank's buffers; optimizers
of such parameters have equal state. Random number generators and data loaders differ by rank.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
    """What DistributedDataParallel keeps equal: the memory of parameters and buffers, by address,
    and the parameters themselves, by identity."""

    memory: dict[int, Mark] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)


def _replicas(values: Iterable[Any]) -> _Replicas:
    known = _Replicas()
    for module in chain.from_iterable(map(_parallel_in, values)):
        for name, parameter in module.module.named_parameters():
            if name not in module.parameters_to_ignore:
                known.parameters.add(id(parameter))
                known.memory.setdefault(parameter.data_ptr(), "replica")
        for buffer in module.module.buffers() if module.broadcast_buffers else ():
            known.memory[buffer.data_ptr()] = "lead"
    known.memory.pop(0, None)  # of what has no elements
    return known


def _parallel_in(value: Any) -> list[DistributedDataParallel]:
    modules = value.modules() if isinstance(value, torch.nn.Module) else ()
    return [each for each in modules if isinstance(each, DistributedDataParallel)]


def _marks(value: Any, flat: FlatState, known: _Replicas, globs: Globs) -> dict[int, Mark]:
    count = len(flat.schema)
    if isinstance(value, RNGState) or _is_loader(value):
        return dict.fromkeys(range(count), "private")
    marks: dict[int, Mark] = {}
    if isinstance(value, torch.optim.Optimizer):
        if not is_named(flat.schema.skeleton):
            marks.update((i, "numbered") for i in flat.held)
        if known.parameters.issuperset(
            id(each) for group in value.param_groups for each in group["params"]
        ):
            marks.update(
                (i, "replica")
                for i, kind in enumerate(flat.schema.kinds)
                if kind == "tensor" and i not in flat.held
            )
    elif known.memory:
        marks.update(
            (i, mark)
            for i, source in enumerate(flat.leaves)
            if isinstance(source, TensorSource)
            and (mark := known.memory.get(source.tensor.data_ptr()))
        )
    wanted = _matching(flat.schema.paths, globs.replicated)
    # Buffers that the first rank's count of may differ until the next forward broadcasts them.
    marks.update((i, "replica") for i in wanted if i not in flat.held and marks.get(i) != "lead")
    if not globs.compare and not _parallel_in(value):
        # Otherwise DistributedDataParallel makes ranks do the same, so that the rest is equal too.
        marks = {
            i: marks.get(i, "private") for i in range(count) if i in marks or i not in flat.held
        }
    marks.update((i, "private") for i in _matching(flat.schema.paths, globs.private))
    return marks


def _matching(paths: Sequence[str], globs: Sequence[str]) -> list[int]:
    return [
        i
        for i, path in enumerate(paths if globs else ())
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs)
    ]


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
