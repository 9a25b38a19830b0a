"""Which memory changes only in an optimizer's step, and how is that step delayed?

Only `optimizer.step` writes to parameters and to optimizer state; forward and backward do not. So
they may be copied until the step begins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckptstore.state import tensors
from ckptstore.state.leaf_sources import Source
from ckptstore.state.leaves import TensorSource
from ckptstore.state.shards import held_of, is_distributed


class StepHooks:
    """Calls `hold` before each step of any optimizer of this process, and before `load_state_dict`
    of those that it was given.

    Compiled steps call it as well.
    """

    def __init__(self, hold: Callable[[], object]) -> None:
        self._hold = hold
        self._steps: RemovableHandle | None = None
        self._loads: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def install(self, optimizers: Iterable[Optimizer]) -> None:
        """Where it is not installed yet."""
        self._steps = self._steps or register_optimizer_step_pre_hook(self._before)
        for optimizer in optimizers:
            if optimizer not in self._loads:
                self._loads[optimizer] = optimizer.register_load_state_dict_pre_hook(self._before)

    @cached_property
    def _before(self) -> Callable[..., None]:
        """A compiled step breaks its graph here instead of tracing threads. To say so imports
        torch's compiler, a second and a half."""

        def before(optimizer: Optimizer, *args: Any) -> None:
            self._hold()

        disabled: Callable[..., None] = torch.compiler.disable(before)
        return disabled

    def remove(self) -> None:
        for handle in (self._steps, *self._loads.values()):
            if handle:
                handle.remove()
        self._steps = None
        self._loads.clear()


def optimizers_in(app_state: Mapping[str, Any]) -> list[Optimizer]:
    """The optimizers among the values of an application state."""
    return [value for value in app_state.values() if isinstance(value, Optimizer)]


def changed_by_steps(optimizers: Sequence[Optimizer], sources: Sequence[Source]) -> frozenset[int]:
    """The numbers of the leaves that lie in memory which only steps of `optimizers` write: their
    parameters and their state."""
    written = chain.from_iterable(
        _memories_of(tensor) for optimizer in optimizers for tensor in _tensors_of(optimizer)
    )
    owned = {_storage(tensor) for tensor in written if tensors.is_strided(tensor)}
    return frozenset(
        n
        for n, source in enumerate(sources)
        if isinstance(source, TensorSource) and _storage(source.tensor) in owned
    )


def versions(sources: Sequence[Source], leaves: Iterable[int]) -> dict[int, int]:
    """torch's count of writes to each leaf's memory."""
    read = {n: source.tensor for n in leaves if isinstance(source := sources[n], TensorSource)}
    return {n: tensor._version for n, tensor in read.items() if not tensor.is_inference()}


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    yield from (p for group in optimizer.param_groups for p in group["params"])
    yield from chain.from_iterable(_tensors_in(value) for value in optimizer.state.values())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors_in, value))


def _memories_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that have memory: of a distributed one, what this rank holds of it."""
    return [part for _, part in held_of(tensor).parts] if is_distributed(tensor) else [tensor]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
