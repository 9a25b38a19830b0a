"""The application state of a snapshot: stateful objects by their keys, two of TorchSnapshot's
among them.
"""

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from ckptstore.errors import InvalidInput
from ckptstore.state import stateful as native


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


class RNGState(native.RNGState):
    """torch's random generator on the CPU, under the key `rng_state`, as in TorchSnapshot.

    After a restore it has the state that it had after the snapshot was taken. `ckptstore.RNGState`,
    which includes the generators of Python, numpy and CUDA, may replace it.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"rng_state": torch.get_rng_state()}


class UnusableState(InvalidInput, RuntimeError):
    """An application state, or prepared tensors of it, cannot be a snapshot: change the call."""


def check_stateful(app_state: Mapping[str, Any]) -> None:
    """Raise `TypeError` for anything but a dict of stateful values, `UnusableState` for two random
    generators."""
    if not isinstance(app_state, Mapping):
        raise TypeError(
            f"app_state is a {type(app_state)}; wanted a dict of stateful objects by their keys: "
            f"{{'model': model}}"
        )
    for key, value in app_state.items():
        if not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is a {type(value)}; wanted something stateful: put it into a "
                "StateDict(…)"
            )
    if len(generators := generators_of(app_state)) > 1:
        raise UnusableState(
            f"app_state has several RNGState objects ({', '.join(generators)}) for the same "
            "generator; keep one"
        )


def generators_of(app_state: Mapping[str, Any]) -> dict[str, native.RNGState]:
    """The random generators in the state, by key."""
    return {key: value for key, value in app_state.items() if isinstance(value, native.RNGState)}


@contextmanager
def undisturbed(app_state: Mapping[str, Any]) -> Iterator[None]:
    """Restore the random generator of the state, if any, after the block: taking a snapshot must
    not advance it.
    """
    before = [
        (generator, generator.state_dict()) for generator in generators_of(app_state).values()
    ]
    try:
        yield
    finally:
        for generator, state in before:
            generator.load_state_dict(state)
