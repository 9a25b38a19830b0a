"""One object under two paths of a target takes two equal contents, and refuses two different ones:
the second would replace the first."""

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import StateDict
from ckptstore.errors import InvalidInput


class Meter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


MAKERS: dict[str, Callable[[int], Any]] = {
    "list": lambda n: [n, n + 1],
    "list of tensors": lambda n: [torch.full((3,), float(n))],
    "dict": lambda n: {"a": n},
    "dict of a list": lambda n: {"a": [n]},
    "OrderedDict": lambda n: OrderedDict(a=n),
    "deque": lambda n: deque([torch.full((3,), float(n))]),
    "bytearray": lambda n: bytearray([n]),
    "StateDict": lambda n: StateDict(a=n),
    "object": lambda n: Meter(n),
}

PLACES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "keys": lambda a, b: {"a": a, "b": b},
    "one dict": lambda a, b: {"k": {"a": a, "b": b}},
    "a list": lambda a, b: {"k": [a, b]},
    "deep and shallow": lambda a, b: {"k": {"x": [{"a": a}]}, "b": b},
}


def plain(value: Any) -> Any:
    if isinstance(value, Meter):
        return value.value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | deque) else value


@pytest.mark.parametrize(
    ("kind", "place"),
    # A list of lists of numbers is one value, and replaced as a whole.
    [each for each in product(MAKERS, PLACES) if each != ("list", "a list")],
)
def test_two_contents_for_one_object_are_refused(kind: str, place: str, tmp_path: Path) -> None:
    make, state = MAKERS[kind], PLACES[place]
    held = make(7)
    target = state(held, held)
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit(state(make(1), make(2)), step=1)
        with pytest.raises(InvalidInput, match="nothing was changed"):
            snapshot.restore(target)
        assert plain(held) == plain(make(7))
        equal = store.commit(state(make(1), make(1)), step=2)
        equal.restore(target)
        assert plain(held) == plain(make(1))
        apart = state(make(7), make(8))
        snapshot.restore(apart)
        assert plain(apart) == plain(state(make(1), make(2)))
