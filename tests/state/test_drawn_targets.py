"""Any nested state, restored into a target of the same form: what comes out equals what was
committed, fact by fact, and everything that a script could hold of the target is filled, or its
path is reported. In the process that committed, and in a new one.

A form is JSON, from which both processes build states that differ by their seed.
"""

import io
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore.state.values import register_class
from tests.state.describing import describe
from tests.state.fresh import Fresh
from tests.state.test_attributes import Frozen, Point, Tuned, WithSlot, marked


@register_class
@dataclass
class Plain:
    a: Any
    b: Any = None


@register_class
@dataclass(frozen=True)
class Fixed:
    a: Any


class Holder:
    """An object whose state is all that it has, other objects among it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _slotted(draw: random.Random, a: Any) -> Any:
    made = WithSlot(draw.random())
    made.more = a
    return made


def _bit_generator(draw: random.Random) -> np.random.Generator:
    made = np.random.default_rng(draw.getrandbits(100))
    made.spawn(draw.randrange(3))
    return made


def _stream(draw: random.Random) -> io.BytesIO:
    made = io.BytesIO(draw.randbytes(draw.randrange(5)))
    made.seek(draw.randrange(9))
    return marked(made, name=str(draw.random()))


LEAVES: dict[str, Any] = {
    "int": lambda draw: draw.getrandbits(70),
    "float": lambda draw: draw.random(),
    "text": lambda draw: str(draw.random()),
    "tensor": lambda draw: torch.full((3,), draw.random()),
    "tensor with attributes": lambda draw: marked(
        torch.full((2,), draw.random()), name=draw.getrandbits(9)
    ),
    "parameter": lambda draw: nn.Parameter(torch.full((2,), draw.random())),
    "array": lambda draw: np.full((2, 2), draw.random()),
    "array of any length": lambda draw: np.full(draw.randrange(3), draw.random()),
    "array of text": lambda draw: np.array([str(draw.random())[:4]] * 2, "U4"),
    "array of times": lambda draw: np.array([draw.getrandbits(40)], "M8[us]"),
    "numbers": lambda draw: [draw.random() for _ in range(draw.randrange(4))],
    "lists": lambda draw: [[draw.random()] for _ in range(draw.randrange(4))],
    "recent": lambda draw: deque((draw.random() for _ in range(draw.randrange(6))), 4),
    "recent pairs": lambda draw: deque([(1, [draw.random()])], 4),
    "set": lambda draw: {draw.randrange(9) for _ in range(draw.randrange(5))},
    "frozenset": lambda draw: frozenset({draw.randrange(9)}),
    "counts": lambda draw: marked(Counter({draw.randrange(9): 1}), total_seen=draw.random()),
    "bytes": lambda draw: bytearray(draw.randbytes(draw.randrange(9))),
    "stream": _stream,
    "numpy's generator": _bit_generator,
    "Python's generator": lambda draw: random.Random(draw.random()),
    "torch's generator": lambda draw: torch.Generator("cpu").manual_seed(draw.getrandbits(60)),
    "frozen after init": lambda draw: Frozen(draw.random()),
}

CONTAINERS: dict[str, tuple[int, Any]] = {
    "list": (2, lambda draw, *below: list(below)),
    "tuple": (2, lambda draw, *below: below),
    "dict": (2, lambda draw, a, b: {"a": a, 2: b}),
    "ordered": (2, lambda draw, a, b: marked(OrderedDict(a=a, b=b), more=draw.random())),
    "deque": (2, lambda draw, *below: deque(below, 3)),
    "namedtuple": (2, lambda draw, a, b: marked(Point(a, b), more=draw.random())),
    "dataclass": (2, lambda draw, a, b: Plain(a, b)),
    "subclass": (1, lambda draw, a: Tuned(draw.random(), a)),
    "frozen": (1, lambda draw, a: Fixed(a)),
    "slots": (1, _slotted),
    "object": (1, lambda draw, a: Holder(a)),
    "object with values": (1, lambda draw, a: Holder({"n": draw.random(), "below": [a]})),
    "twice": (1, lambda draw, a: {"one": a, "again": [a]}),
}

forms = st.recursive(
    st.sampled_from(sorted(LEAVES)).map(lambda name: [name]),
    lambda below: st.one_of(
        *(
            st.tuples(st.just(name), *[below] * count).map(list)
            for name, (count, _) in CONTAINERS.items()
        )
    ),
    max_leaves=12,
)


def build(form: list[Any], draw: random.Random) -> Any:
    name, *below = form
    if name in LEAVES:
        return LEAVES[name](draw)
    _, make = CONTAINERS[name]
    return make(draw, *(build(each, draw) for each in below))


FILLED = (
    list,
    dict,
    set,
    deque,
    bytearray,
    torch.Tensor,
    np.ndarray,
    io.BytesIO,
    random.Random,
    np.random.Generator,
    torch.Generator,
    Plain,
    Tuned,
    WithSlot,
    Holder,
)


def held(value: Any, path: str, within: bool = False) -> Iterator[tuple[str, Any]]:
    """Everything that can be filled, by its path; of what another object's state holds, objects:
    that takes new containers with them."""
    if isinstance(value, FILLED) and (isinstance(value, Holder) or not within):
        yield path, value
    below: Any = ()
    if isinstance(value, Holder):
        within, below = True, [("data", value.data)]
    elif isinstance(value, dict):
        below = value.items()
    elif is_dataclass(value):
        below = [(each.name, getattr(value, each.name)) for each in fields(value)]
        below += [(name, getattr(value, name)) for name in ("own", "more") if hasattr(value, name)]
    elif isinstance(value, list | tuple | deque):
        names = getattr(value, "_fields", range(len(value)))
        below = zip(names, value, strict=True)
    for name, child in below:
        yield from held(child, f"{path}/{name}", within)


def restore(snap: ckptstore.Snapshot, form: list[Any], seed: int) -> tuple[str, list[str]]:
    """What a target is after the restore, and the paths where another object stands now although
    the report says it of none of its places."""
    state = {"s": build(form, random.Random(seed))}
    before = dict(held(state["s"], "s"))
    report = snap.restore(state)
    after = dict(held(state["s"], "s"))
    others = [path for path in before if path in after and after[path] is not before[path]]
    reported = {id(before[path]) for path in report.replaced if path in before}
    return describe(state["s"]), [path for path in others if id(before[path]) not in reported]


def restored(place: str, commit: str, form: list[Any], seed: int) -> Any:
    """In the other process."""
    with ckptstore.open(place, read_only=True) as store:
        return restore(store.checkout(commit), form, seed)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path_factory.mktemp("drawn") / "store") as store:
        yield store


def check(store: ckptstore.Store, form: list[Any], seed: int, again: Any) -> None:
    made = build(form, random.Random(seed))
    snap = store.commit({"s": made})
    described, unsaid = again(snap, form, seed + 1)
    assert described.splitlines() == describe(made).splitlines()
    assert list(unsaid) == []


@given(forms, st.integers(0, 2**32))
def test_a_target_becomes_what_was_committed(
    store: ckptstore.Store, form: list[Any], seed: int
) -> None:
    note(repr(form))

    check(store, form, seed, restore)


@given(forms, st.integers(0, 2**32))
def test_a_target_in_another_process_becomes_what_was_committed(
    store: ckptstore.Store, fresh: Fresh, form: list[Any], seed: int
) -> None:
    note(repr(form))

    def again(snap: ckptstore.Snapshot, form: list[Any], seed: int) -> Any:
        call = "tests.state.test_drawn_targets:restored"
        return fresh.call(call, store.url, snap.id, form, seed)

    check(store, form, seed, again)


@pytest.mark.parametrize("name", [*LEAVES])
def test_every_kind_of_leaf_is_filled(tmp_path: Path, name: str) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        made = build(["list", [name], [name]], random.Random(1))
        snap = store.commit({"s": made})
        described, unsaid = restore(snap, ["list", [name], [name]], 2)
    assert (described, unsaid) == (describe(made), [])
