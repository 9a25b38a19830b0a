"""What a script holds of its state beside the dict is filled by a restore, whatever it is; what
cannot be filled is replaced, and the restore says where."""

import io
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.state.values import register_class, register_value
from tests.state.carrying import assert_same, carry


class History:
    """Stored by a codec of the caller's."""

    def __init__(self, items: Any = ()) -> None:
        self.items = list(items)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class WithLock:
    """A state of its own for pickle, without what only this process has."""

    def __init__(self, n: int = 0) -> None:
        self.n, self.lock = n, object()

    def __getstate__(self) -> dict[str, Any]:
        return {"n": self.n}


class Setting:
    def __init__(self, n: int = 0) -> None:
        self.n, self.sets = n, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.sets = getattr(self, "sets", 0) + 1


class Registry(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


@dataclass(frozen=True)
class Version:
    number: int


class Pickled:
    """Pickle makes it by a function, so that there is no state to set."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return Pickled, (self.n,)


register_value("in-place.History", History, lambda each: each.items, History)
register_value("in-place.Slotted", Slotted, lambda each: [each.a, each.b], lambda it: Slotted(*it))
register_value("in-place.Version", Version, lambda each: each.number, Version)

IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "deque": (lambda: deque([1.0, 2.0], 100), lambda: deque([3.0], 100)),
    "deque of tensors": (lambda: deque([torch.ones(1)], 3), lambda: deque(maxlen=3)),
    "set": (lambda: {3, "a"}, lambda: {1}),
    "list": (lambda: [1, [2, 3]], lambda: [4]),
    "text": (lambda: np.array(["a", "b"], "U3"), lambda: np.array(["", "x"], "U3")),
    "times": (
        lambda: np.array(["2026-01-02", "NaT"], "M8[us]"),
        lambda: np.zeros(2, "M8[us]"),
    ),
    "records": (
        lambda: np.array([(1, 2.0)], [("a", "<i4"), ("b", ">f8")]),
        lambda: np.zeros(1, [("a", "<i4"), ("b", ">f8")]),
    ),
    "big-endian": (lambda: np.arange(3, dtype=">i4"), lambda: np.zeros(3, ">i4")),
    "backwards": (lambda: np.arange(3.0), lambda: np.zeros(3)[::-1]),
    "every other record": (
        lambda: np.arange(3.0),
        lambda: np.zeros(3, [("a", "<f8"), ("b", "i1")])["a"],
    ),
    "bytearray": (lambda: bytearray(b"ab"), lambda: bytearray(b"c")),
    "BytesIO": (lambda: io.BytesIO(b"ab"), lambda: io.BytesIO(b"longer")),
    "Random": (lambda: random.Random(1), lambda: random.Random(2)),
    "registered": (lambda: History([1, torch.ones(1)]), lambda: History([2])),
    "registered with slots": (lambda: Slotted(1, [2]), lambda: Slotted(3, 4)),
}


def content(value: Any) -> Any:
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, Slotted):
        return value.a, value.b
    return vars(value) if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_a_script_holds_is_filled(kind: str) -> None:
    make, fresh = IN_PLACE[kind]
    there = fresh()
    target = {"a": [{"b": there}]}
    binding = carry({"a": [{"b": make()}]}).bind(target)
    carry({"a": [{"b": make()}]}).finish(binding)
    assert target["a"][0]["b"] is there
    assert_same(content(there), content(make()))
    assert binding.replaced_paths("s") == []


PICKLED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "state of its own": (lambda: WithLock(3), WithLock),
    "__setstate__": (lambda: Setting(3), Setting),
    "dict": (lambda: Registry(a=1, b=[2]), lambda: Registry(c=3)),
    "list": (lambda: Items([1, {2: 3}]), lambda: Items([4])),
    "set of objects": (lambda: {(1, frozenset({2}))} | {"x"}, lambda: {1}),
}


@pytest.mark.pickles
@pytest.mark.parametrize("kind", PICKLED)
def test_an_object_takes_the_state_of_a_pickled_one(kind: str) -> None:
    make, fresh = PICKLED[kind]
    there = fresh()
    lock = getattr(there, "lock", None)
    target = {"p": there}
    carry({"p": make()}, allow_pickle=True).restore(target, allow_pickle=True)
    assert target["p"] is there
    if isinstance(there, WithLock | Setting):
        assert there.n == 3
        assert getattr(there, "lock", None) is lock
    else:
        assert there == make()


def test_what_only_the_targets_object_had_goes_with_the_state_of_a_pickled_one() -> None:
    made, there = History([1]), History([2])
    there.more = 3  # type: ignore[attr-defined]
    carry({"h": made}).restore({"h": there})
    assert vars(there) == {"items": [1]}


REPLACED: dict[str, tuple[Any, Any]] = {
    "a deque of another length": (deque([1], 5), deque([2], 6)),
    "a deque of another length with tensors": (deque([torch.ones(1)], 5), deque(maxlen=6)),
    "an array of another shape": (np.arange(3.0), np.zeros(2)),
    "an array of another dtype": (np.arange(3.0), np.zeros(3, "f4")),
    "texts of another length": (np.array(["abc"]), np.array(["a"])),
    "a list for a deque": ([1, 2], deque([3])),
    "a list for a dict": ([1, torch.ones(1)], {1: 2}),
    "another bit generator": (
        np.random.Generator(np.random.PCG64(1)),
        np.random.Generator(np.random.Philox(1)),
    ),
    "pickle makes it anew": (Pickled(3), Pickled(4)),
}


@pytest.mark.pickles
@pytest.mark.parametrize("kind", REPLACED)
def test_a_restore_says_which_paths_hold_new_objects(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, there = REPLACED[kind]
    state = {"s": {"a": [there, {"n": 0}]}}
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"s": {"a": [made, {"n": 1}]}}, allow_pickle=True)
        with caplog.at_level(logging.WARNING, logger="ckptstore"):
            report = store.checkout().restore(state, allow_pickle=True)
    assert report.replaced == ("s/a/0",)
    assert "s/a/0" in caplog.text
    assert type(state["s"]["a"][0]) is type(made)
    assert state["s"]["a"][0] is not there


def test_a_read_only_array_is_replaced_and_said() -> None:
    there = np.zeros(3)
    there.flags.writeable = False
    target = {"a": there}
    carried = carry({"a": np.arange(3.0)})
    binding = carried.bind(target)
    carried.finish(binding)
    assert binding.replaced_paths("s") == ["s/a"]
    assert (there.tolist(), target["a"].tolist()) == ([0, 0, 0], [0, 1, 2])


@pytest.mark.parametrize(
    ("made", "there"),
    [
        (2, 1),
        ("b", "a"),
        ((1, "b"), (0, "a")),
        (None, 1),
        (Version(2), Version(1)),
        (slice(1, 2), slice(3)),
        (torch.float16, torch.float32),
        (frozenset({1}), frozenset({2})),
        ([1], None),
    ],
)
def test_values_that_never_change_are_replaced_in_silence(made: Any, there: Any) -> None:
    target = {"v": there}
    carried = carry({"v": made})
    binding = carried.bind(target)
    carried.finish(binding)
    assert target["v"] == made
    assert binding.replaced_paths("s") == []


def test_lists_within_lists_and_tuples_are_filled() -> None:
    inner, recent, seen = [0], deque([0], 3), {0}
    target = {"a": [inner, (recent, 1)], "b": (seen, [inner])}
    carry({"a": [[1, 2], (deque([3], 3), 4)], "b": ({5}, [[1, 2]])}).restore(target)
    assert target == {"a": [[1, 2], (deque([3]), 4)], "b": ({5}, [[1, 2]])}
    assert target["a"][0] is target["b"][1][0] is inner
    assert target["a"][1][0] is recent
    assert target["b"][0] is seen


def test_one_list_within_a_list_for_two_contents_takes_one_of_them() -> None:
    there = [0]
    target = {"c": [there, there]}
    carried = carry({"c": [[1], [3]]})
    binding = carried.bind(target)
    carried.finish(binding)
    assert target == {"c": [[1], [3]]}
    assert target["c"][0] is there
    assert binding.replaced_paths("s") == ["s/c"]


def test_what_cannot_be_filled_within_a_list_of_values_is_said() -> None:
    target = {"a": [(1, deque([0], 3))]}
    carried = carry({"a": [(1, deque([1], 4))]})
    binding = carried.bind(target)
    carried.finish(binding)
    assert target == {"a": [(1, deque([1]))]}
    assert binding.replaced_paths("s") == ["s/a"]


def test_what_cannot_be_filled_in_a_tuple_is_said() -> None:
    inner = [1]
    target = {"a": (np.zeros(1), [inner])}
    carried = carry({"a": (np.zeros(2), [[2]])})
    binding = carried.bind(target)
    carried.finish(binding)
    assert target["a"][1][0] is inner
    assert binding.replaced_paths("s") == ["s/a/0"]


def test_frozen_dataclasses_are_never_changed() -> None:
    @register_class
    @dataclass(frozen=True, eq=False)
    class Fixed:
        n: int

    there = Fixed(1)
    target = {"f": there}
    carry({"f": Fixed(2)}).restore(target)
    assert (there.n, target["f"].n) == (1, 2)


def test_an_object_sets_what_its_state_has_itself() -> None:
    class Holder:
        def __init__(self) -> None:
            self.recent = deque([0], 3)

        def state_dict(self) -> dict[str, Any]:
            return {"recent": self.recent, "array": np.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.recent = state["recent"]

    made, target = Holder(), Holder()
    made.recent.append(1)
    carried = carry({"h": made})
    binding = carried.bind({"h": target})
    carried.finish(binding)
    assert list(target.recent) == [0, 1]
    assert binding.replaced_paths("s") == []
