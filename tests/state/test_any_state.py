"""Whatever can be stored comes back bit for bit and type for type, in a process that knows of it
only what the store says.

`describe` says what an object is, on the one side of what was committed, on the other of what was
restored, without code of ckptstore's.
"""

import io
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from difflib import unified_diff
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import ckptstore
from tests.state.carrying import carry
from tests.state.describing import describe, digest
from tests.state.drawing import composite, lazy, states, tensor
from tests.state.fresh import Fresh
from tests.state.test_composites import COMPOSITES
from tests.state.test_structures import ARRAYS, STRUCTURES
from tests.state.test_tensors import CONJUGATES, LAYOUTS, STORED
from tests.state.test_values import VALUES, Heavy, Plain
from tests.state.training import Case, Run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path_factory.mktemp("any") / "store") as store:
        yield store


_opened: dict[str, ckptstore.Store] = {}


def restored(place: str, commit: str, *, whole: bool = False) -> list[str]:
    """In the other process: what the commit gives as new objects, and in place of nothing; digests,
    or everything about them."""
    if place not in _opened:
        _opened[place] = ckptstore.open(place, read_only=True)
    snap = _opened[place].checkout(commit)
    target: dict[str, Any] = {"s": None}
    snap.restore(target)
    say = describe if whole else digest
    return [say(snap.state_dict("s")), say(target["s"])]


def check(store: ckptstore.Store, fresh: Fresh, state: Any) -> None:
    """Commit `state`, have it restored over there, compare."""
    snap = store.commit({"s": state})
    if fresh.call("tests.state.test_any_state:restored", store.url, snap.id) == [digest(state)] * 2:
        return
    wanted = describe(state).splitlines()
    for text in fresh.call("tests.state.test_any_state:restored_whole", store.url, snap.id):
        got = text.splitlines()
        assert got == wanted, "\n".join(
            unified_diff(wanted, got, "committed", "restored", lineterm="", n=1)
        )


def restored_whole(place: str, commit: str) -> list[str]:
    return restored(place, commit, whole=True)


def tied() -> Any:
    weight = torch.randn(4, 4)
    parameter = nn.Parameter(weight)
    return {
        "a": weight,
        "view": weight.view(4, 4),
        "parameter": [parameter, parameter],
        "transposed": weight.t(),
        "part": weight[:2],
    }


def module_state() -> Any:
    module = nn.Sequential(
        OrderedDict(embed=nn.Embedding(7, 4), norm=nn.BatchNorm1d(4), extra=Extra())
    )
    return module.state_dict()


class Extra(nn.Module):
    """Has extra state that is neither tensor nor plain value."""

    def get_extra_state(self) -> Any:
        return io.BytesIO(b"extra")

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


def optimizer_states() -> Any:
    runs = {name: Run(Case(name), seed=1) for name in ("AdamW fused", "Adafactor", "LBFGS")}
    for run in runs.values():
        run.train(2)
    return {name: run.optimizer.state_dict() for name, run in runs.items()}


TABLES: dict[str, Callable[[], Any]] = {
    "structures": lambda: dict(enumerate(STRUCTURES)),
    "values": lambda: dict(enumerate(value for value, _ in VALUES)),
    "keys": lambda: {value: i for i, (value, _) in enumerate(VALUES) if is_key(value)},
    "arrays": lambda: dict(enumerate(ARRAYS)),
    "dtypes": lambda: {
        name: {layout: tensor(name, layout, seed=i) for layout in LAYOUTS}
        for i, name in enumerate(STORED)
    },
    "lazy views": lambda: {view: lazy(view, seed=1) for view in CONJUGATES},
    "composites": lambda: {name: composite(name, seed=i) for i, name in enumerate(COMPOSITES)},
    "composites twice": lambda: {
        name: [one := composite(name, seed=1), one] for name in COMPOSITES
    },
    "user codecs": lambda: [Plain(1), Heavy({"t": torch.ones(3)}), deque([Heavy([Plain("a")])], 2)],
    "tied": tied,
    "module": module_state,
    "optimizers": optimizer_states,
    "random": lambda: ckptstore.RNGState().state_dict(),
    "large": lambda: {
        "array": np.arange(5 << 18, dtype=np.uint8),
        "tensor": torch.arange(1 << 18).view(512, 512).t(),
        "bytes": bytes(5 << 18),
    },
}


def is_key(value: Any) -> bool:
    """Whether a value may be a key: hashable, equal to itself, and not 1 once more under another
    type."""
    try:
        hash(value)
    except TypeError:
        return False
    return bool(np.all(value == value)) and not (
        isinstance(value, int | float | complex | np.generic) and value in (0, 1)
    )


@pytest.mark.parametrize("table", TABLES)
def test_everything_in_the_tables_comes_back_in_another_process(
    table: str, store: ckptstore.Store, fresh: Fresh
) -> None:
    check(store, fresh, TABLES[table]())


def test_any_state_comes_back_in_another_process(store: ckptstore.Store, fresh: Fresh) -> None:
    @settings(max_examples=settings().max_examples * 2 // 5)
    @given(states)
    def any_state(state: Any) -> None:
        check(store, fresh, state)

    any_state()


@given(states)
def test_any_state_has_paths_that_tell_its_leaves_apart_and_bytes_that_do_not_change(
    state: Any,
) -> None:
    carried = carry(state)
    assert len(set(carried.schema.paths)) == len(carried.schema)
    again = carry(carried.inflate())
    assert again.schema == carried.schema
    assert again.content == carried.content


def test_a_difference_of_one_bit_type_or_tie_is_seen() -> None:
    """The yardstick itself."""
    weight = torch.tensor([1.0, -0.0])
    base = {"w": [weight, weight], "n": 1, "f": 0.0, "d": {"a": 1, "b": 2}}
    others = [
        {**base, "w": [weight, weight.clone()]},
        {**base, "w": [weight.abs(), weight.abs()]},
        {**base, "w": (weight, weight)},
        {**base, "n": True},
        {**base, "n": 1.0},
        {**base, "f": -0.0},
        {**base, "d": {"b": 2, "a": 1}},
        {**base, "d": OrderedDict(a=1, b=2)},
        {**base, "w": [nn.Parameter(weight), weight]},
        {**base, "w": [weight.bfloat16(), weight.bfloat16()]},
    ]
    assert len({digest(state) for state in (base, *others)}) == len(others) + 1
    assert digest(base) == digest({**base, "w": [other := weight.clone(), other]})
