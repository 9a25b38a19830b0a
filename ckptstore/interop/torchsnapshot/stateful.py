"""What an application state consists of, as TorchSnapshot has it: stateful objects, a dict that is
one, and torch's random generator."""

from collections import UserDict
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

import ckptstore.state.stateful


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is what `state_dict` returns, and which takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


AppState: TypeAlias = dict[str, Any]
"""Stateful objects by their keys."""


class StateDict(UserDict[str, Any]):
    """A dictionary that is stateful: for tensors and values that no module or optimizer has.

    Restoring it sets the keys that the snapshot has and leaves others alone, as in TorchSnapshot.
    (`ckptstore.StateDict` becomes what was committed.)
    """

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.update(state_dict)


class RNGState(ckptstore.state.stateful.RNGState):
    """torch's random generator on the CPU, under the key `rng_state`, as TorchSnapshot has it.

    It is the same after a restore as it was after the snapshot was taken. `ckptstore.RNGState`,
    which has the generators of Python, numpy and CUDA as well, may be used in its place.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"rng_state": torch.get_rng_state()}
