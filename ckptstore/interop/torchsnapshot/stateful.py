"""What does an application state consist of in TorchSnapshot? Stateful objects, a stateful dict,
and torch's random generator.
"""

from collections import UserDict
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

import ckptstore.state.stateful


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


AppState: TypeAlias = dict[str, Any]
"""Stateful objects by their keys."""


class StateDict(UserDict[str, Any]):
    """A stateful dictionary, for tensors and values outside of modules and optimizers.

    A restore sets the keys that the snapshot has and leaves others alone, as in TorchSnapshot. (A
    restored `ckptstore.StateDict` equals what was committed.)
    """

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState(ckptstore.state.stateful.RNGState):
    """torch's random generator on the CPU, under the key `rng_state`, as in TorchSnapshot.

    After a restore it has the state that it had after the snapshot was taken. `ckptstore.RNGState`,
    which includes the generators of Python, numpy and CUDA, may replace it.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"rng_state": torch.get_rng_state()}
