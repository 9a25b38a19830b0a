"""Which classes can a restore use? Those of the target: documents only name classes, and none is
imported."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from ckptstore.state import containers, values
from ckptstore.state.flatten import state_of


class TargetClasses(Mapping[str, type]):
    """The classes of the objects in a target, by name; collected when the first is asked for."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._found: dict[str, type] | None = None

    def _classes(self) -> dict[str, type]:
        if self._found is None:
            self._found = {}
            self._collect(self._target, self._found, set())
        return self._found

    def _collect(self, value: Any, found: dict[str, type], seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        cls = type(value)
        if isinstance(value, Enum | torch.Tensor) or is_dataclass(cls) or hasattr(cls, "_fields"):
            found[values.class_name(cls)] = cls
        if containers.is_stateful(value):
            value = state_of(value)
        if isinstance(value, dict):
            factory = getattr(value, "default_factory", None)
            if isinstance(factory, type):
                found[values.class_name(factory)] = factory
            below: Any = (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            below = value
        else:
            below = (
                [getattr(value, field.name, None) for field in fields(cls)]
                if is_dataclass(cls)
                else ()
            )
        for child in below:
            self._collect(child, found, seen)

    def __getitem__(self, name: str) -> type:
        return self._classes()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes())

    def __len__(self) -> int:
        return len(self._classes())
