"""Which weights need no copy and no hash, because torch reports no write since the last commit?

Only an `nn.Parameter` directly on a module counts that requires no grad, is in no optimizer, shares
its memory with nothing, and has the storage and `_version` of its last hash. Nothing else is
trusted, since many writes leave `_version` unchanged (docs/async.md).
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ckptstore.core.model import INLINE_BYTES
from ckptstore.state import tensors
from ckptstore.state.leaf_sources import Source
from ckptstore.state.leaves import KnownSource, TensorSource

logger = logging.getLogger("ckptstore")

CHECK_EVERY = 20
"""Interval, in commits, at which all trusted weights are hashed anyway."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The identity and version of a parameter when its chunks had these ids."""

    address: int
    version: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    ids: bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A frozen parameter, its leaf's number, and its version at the call."""

    leaf: int
    path: str
    parameter: torch.Tensor
    version: int


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
        optimizers = [value for value in app_state.values() if isinstance(value, Optimizer)]
        in_optimizers = {
            id(p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        modules = [value for value in app_state.values() if isinstance(value, torch.nn.Module)]
        everything = {
            id(t): t for module in modules for t in (*module.parameters(), *module.buffers())
        }
        storages = {id(t): _storage(t) for t in everything.values() if tensors.is_strided(t)}
        sharers = Counter(storages.values())
        leaves = {
            n: _storage(source.tensor)
            for n, source in enumerate(sources)
            if isinstance(source, TensorSource)
        }
        showing = Counter(leaves.values())
        frozen = {
            storages[id(p)]: p
            for p in everything.values()
            if _is_frozen(p)
            and id(p) not in in_optimizers
            and sharers[storages[id(p)]] == 1
            and not self._is_suspect(p)
        }
        found = []
        for n, storage in leaves.items():
            parameter, source = frozen.get(storage), sources[n]
            if (
                parameter is None
                or showing[storage] > 1
                or source.nbytes <= INLINE_BYTES
                or not isinstance(source, TensorSource)
            ):
                continue
            if _place(parameter) == _place(source.tensor):
                found.append(Candidate(n, paths[n], parameter, parameter._version))
        return found

    def known(self, candidates: Sequence[Candidate]) -> dict[int, KnownSource]:
        """Sources for those candidates that are as they were last time; none of them when a full
        check is due."""
        with self._lock:
            self._commits += 1
            if self._commits % CHECK_EVERY == 0:
                return {}
            seen = ((candidate, self._as_seen(candidate)) for candidate in candidates)
            return {
                candidate.leaf: KnownSource(candidate.parameter.detach(), was.ids)
                for candidate, was in seen
                if was
            }

    def remember(self, candidates: Sequence[Candidate], ids: Mapping[int, bytes]) -> None:
        """A commit found these ids. One that differs from what was trusted is an alarm: somebody
        wrote without torch noticing."""
        with self._lock:
            for candidate in candidates:
                was = self._as_seen(candidate)
                if was and was.ids != ids[candidate.leaf]:
                    self._betray(candidate)
                self._seen[candidate.parameter] = _seen(candidate, ids[candidate.leaf])

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

    def _as_seen(self, candidate: Candidate) -> _Seen | None:
        """What was seen of the parameter, if it is as it was then."""
        seen: _Seen | None = self._seen.get(candidate.parameter)
        return seen if seen is not None and seen == _seen(candidate, seen.ids) else None

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
        for group in optimizer.param_groups:
            for parameter in group["params"]:
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


def _seen(candidate: Candidate, ids: bytes) -> _Seen:
    parameter = candidate.parameter
    return _Seen(
        parameter.data_ptr(), candidate.version, tuple(parameter.shape), parameter.dtype, ids
    )


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
