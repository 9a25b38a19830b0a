"""The application state of a snapshot: stateful objects by their keys."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ckptstore.errors import InvalidInput
from ckptstore.state.stateful import RNGState


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


AppState: TypeAlias = dict[str, Any]
"""Stateful objects by their keys."""


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


def generators_of(app_state: Mapping[str, Any]) -> dict[str, RNGState]:
    """The random generators in the state, by key."""
    return {key: value for key, value in app_state.items() if isinstance(value, RNGState)}


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
