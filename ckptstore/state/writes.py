"""Which memory does training write, and when? So that it is copied later, or not at all.

Only `optimizer.step` writes to parameters and to optimizer state; forward and backward do not. So
these may be copied until the step begins (`StepHooks`).

A weight needs no copy and no hash if torch reports no write to it since the last commit
(`FrozenWeights`). Only an `nn.Parameter` directly on a module counts that requires no grad, is in
no optimizer, shares its memory with nothing, and has the storage and `_version` of its last hash.
Nothing else is trusted, since many writes leave `_version` unchanged (docs/async.md).
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ckptstore.core.forks import cached_property
from ckptstore.core.identity import IdentityDict
from ckptstore.core.model import INLINE_BYTES
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import Source
from ckptstore.state.shards import held_of, is_distributed
from ckptstore.state.stateful import parameters_of
from ckptstore.state.tensors import TensorSource

logger = logging.getLogger("ckptstore")

CHECK_EVERY = 20
"""Interval, in commits, at which all trusted weights are hashed anyway."""


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
    owned = {
        _storage(part)
        for optimizer in optimizers
        for tensor in _tensors_of(optimizer)
        for part in _memories_of(tensor)
    }
    return frozenset(
        n
        for n, source in enumerate(sources)
        if isinstance(source, TensorSource) and _storage(source.tensor) in owned
    )


def versions(sources: Sequence[Source], leaves: Iterable[int]) -> dict[int, int]:
    """torch's count of writes to each leaf's memory."""
    read = {n: source.tensor for n in leaves if isinstance(source := sources[n], TensorSource)}
    return {n: tensor._version for n, tensor in read.items() if not tensor.is_inference()}


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [*parameters_of(optimizer)]
    containers: list[Any] = [optimizer.state]
    for each in containers:  # which grows meanwhile
        for value in each.values() if isinstance(each, Mapping) else each:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, Mapping | list | tuple):
                containers.append(value)
    return found


def _memories_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that have memory: of a distributed one, what this rank holds of it."""
    return [part for _, part in held_of(tensor).parts] if is_distributed(tensor) else [tensor]


_Seen: TypeAlias = tuple[int, torch.Size, torch.dtype, int]
"""A parameter's address, shape, dtype and version: what its chunks' ids are known for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A frozen parameter, its leaf's number, and what it was at the call."""

    leaf: int
    path: str
    parameter: torch.Tensor
    seen: _Seen


class FrozenWeights:
    """What one store object remembers of frozen weights, from one commit to the next. Threads may
    share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = WeakIdKeyDictionary()
        self._betrayed = WeakIdKeyDictionary()
        self._commits = 0

    def candidates(
        self, app_state: Mapping[str, Any], sources: Sequence[Source], paths: Sequence[str]
    ) -> list[Candidate]:
        """The leaves that are frozen weights now."""
        _watch_optimizers()
        optimizers = optimizers_in(app_state)
        stepped = chain.from_iterable(map(parameters_of, optimizers))
        in_optimizers = IdentityDict((parameter, True) for parameter in stepped)
        modules = [value for value in app_state.values() if isinstance(value, torch.nn.Module)]
        storages = IdentityDict(
            (tensor, _storage(tensor))
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if tensors.is_strided(tensor)
        )
        sharers = Counter(storage for _, storage in storages.items())
        frozen = {
            storage: tensor
            for tensor, storage in storages.items()
            if _is_frozen(tensor) and tensor not in in_optimizers and not self._is_suspect(tensor)
        }
        shown = {n: each.tensor for n, each in enumerate(sources) if isinstance(each, TensorSource)}
        shown_storages = {n: _storage(tensor) for n, tensor in shown.items()}
        showing = Counter(shown_storages.values())
        return [
            Candidate(n, paths[n], parameter, (*_place(parameter), parameter._version))
            for n, storage in shown_storages.items()
            if (parameter := frozen.get(storage)) is not None
            and sharers[storage] == showing[storage] == 1
            and parameter.nbytes > INLINE_BYTES
            and _place(parameter) == _place(shown[n])
        ]

    def known(self, candidates: Sequence[Candidate]) -> dict[int, TensorSource]:
        """Sources for those candidates that are as they were last time; none of them when a full
        check is due."""
        with self._lock:
            self._commits += 1
            if self._commits % CHECK_EVERY == 0:
                return {}
            return {
                candidate.leaf: TensorSource(candidate.parameter.detach(), ids)
                for candidate in candidates
                if (ids := self._ids_of(candidate)) is not None
            }

    def remember(self, candidates: Sequence[Candidate], ids: Mapping[int, bytes]) -> None:
        """A commit found these ids. One that differs from what was trusted is an alarm: somebody
        wrote without torch noticing."""
        with self._lock:
            for candidate in candidates:
                if self._ids_of(candidate) not in (None, ids[candidate.leaf]):
                    self._betray(candidate)
                self._seen[candidate.parameter] = candidate.seen, ids[candidate.leaf]

    def forget(self) -> None:
        """Hash everything next time, since known chunks may have left the store."""
        with self._lock:
            self._seen = WeakIdKeyDictionary()

    def _betray(self, candidate: Candidate) -> None:
        self._betrayed[candidate.parameter] = True
        logger.error(
            "%s has changed although torch counted no write to it: the commits since the last full "
            "check, at most %d, hold its old values; "
            "it is not trusted any more. Commit without trust_version where weights are written "
            "behind torch's back",
            candidate.path,
            CHECK_EVERY,
        )

    def _ids_of(self, candidate: Candidate) -> bytes | None:
        """The ids that the parameter had, if it is as it was then."""
        seen, ids = self._seen.get(candidate.parameter, (None, None))
        return ids if seen == candidate.seen else None

    def _is_suspect(self, parameter: torch.Tensor) -> bool:
        """Whether it is known to be written by somebody. Asked of an empty dictionary, a look-up
        would cost more than all else."""
        return any(known and parameter in known for known in (_stepped, self._betrayed))


_stepped = WeakIdKeyDictionary()
"""Parameters of every optimizer that has stepped since the first commit that trusted versions."""


@cache
def _watch_optimizers() -> None:
    """Notice the parameters of optimizers that are not in the application state, too."""

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in parameters_of(optimizer):
            _stepped[parameter] = True

    register_optimizer_step_pre_hook(torch.compiler.disable(note))


def _is_frozen(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.nn.Parameter
        and not tensor.requires_grad
        and not tensor.is_inference()
        and tensors.is_strided(tensor)
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _storage(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins, which its views share; 0 for one that has none of its
    own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # sparse ones
        return 0
