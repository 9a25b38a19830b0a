"""What a caller says about a commit beside its state, checked."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

from ckptstore.core.ids import CommitId, check_tag
from ckptstore.errors import InvalidInput

_STEPS = 2**53 + 1
"""What a log entry can hold as a number."""


@dataclass(frozen=True, slots=True)
class Label:
    """A run and what else describes one commit of it. Without parents it descends from the run's newest commit."""

    run: str
    step: int | None = None
    message: str = ""
    metrics: tuple[tuple[str, float], ...] = ()
    tags: tuple[str, ...] = ()
    parents: tuple[CommitId, ...] = ()


def label_of(run: str, step: object, tag: str | Sequence[str], message: object, metrics: Mapping[str, float] | None) -> Label:
    """A label without parents; raises `InvalidInput` for what cannot be one."""
    tags = tuple(check_tag(name) for name in ([tag] if isinstance(tag, str) else tag))
    return Label(run, _step(step), _message(message), _metrics(metrics), tags)


def _step(step: object) -> int | None:
    if step is None:
        return None
    with suppress(TypeError):
        if not isinstance(step, bool) and (number := index(step)) in range(_STEPS):  # type: ignore[arg-type]  # numpy's and torch's whole numbers as well
            return number
    raise InvalidInput(f"step is {step!r:.80}; wanted a whole number from 0 to {_STEPS - 1}, or None")


def _message(message: object) -> str:
    if isinstance(message, str):
        return message
    raise InvalidInput(f"message is {message!r}; wanted a string")


def _metrics(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    pairs = []
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"a metric's name is {name!r}; wanted a string")
        try:
            pairs.append((name, _number(value)))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInput(f"metric {name!r} is {value!r:.80}; wanted a number") from error
    return tuple(sorted(pairs))


def _number(value: Any) -> float:
    """A number as it is, or the one element of a tensor, which may be part of a graph."""
    return float(value.item() if hasattr(value, "item") else value)
