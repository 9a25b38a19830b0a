"""Large lists and dicts of plain values are one leaf each, and each value still has a path."""

import copy
import operator
import random
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import InvalidInput, NotFound, Thinned
from ckptstore.contents import CommitContents
from ckptstore.snapshot import contents_of
from ckptstore.state import flatten, values
from ckptstore.state.in_place import can_change
from ckptstore.state.stateful import items_of
from tests.state.carrying import assert_same

COUNT = flatten.PLAIN_ITEMS + 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


def history(count: int = COUNT) -> list[Any]:
    return [{"step": i, "loss": 1 / (i + 1), "note": None} for i in range(count)]


def kinds(snapshot: ckptstore.Snapshot) -> dict[str, str]:
    trees = contents_of(snapshot).stored_trees.values()
    return {p: k for t in trees for p, k in zip(t.schema.paths, t.schema.kinds, strict=True)}


PLAIN: dict[str, Callable[[], Any]] = {
    "dicts of the same keys": history,
    "dicts of other keys": lambda: [{"a": i} if i % 2 else {"b": [i]} for i in range(COUNT)],
    "dicts in another order": lambda: [*history(), {"loss": 0.5, "note": "", "step": 1}],
    "strings": lambda: {f"sample/{i}%": f"{i} é" for i in range(COUNT)},
    "numbers as keys": lambda: {i - 5: i / 7 for i in range(COUNT)},
    "lists": lambda: {str(i): [i, (0.5, 1j, b"x"), {1, 2}, frozenset({"a"})] for i in range(COUNT)},
    "nested": lambda: [{"of": history(3), "n": {"a": {}, "b": []}} for _ in range(COUNT)],
    "tables in a table": lambda: {str(i): history(40) if i < 9 else i for i in range(COUNT)},
    "large integers": lambda: [{"n": i << 60} for i in range(COUNT)],
    "booleans and integers": lambda: [{"n": i % 2 == 0 if i % 3 else i % 2} for i in range(COUNT)],
    "numpy scalars": lambda: [{"loss": np.float64(i), "n": np.int32(i)} for i in range(COUNT)],
    "empty dicts": lambda: [{} for _ in range(COUNT)],
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_values_are_one_leaf_and_come_back_whole_by_path_and_in_place(
    make: Callable[[], Any], store: ckptstore.Store
) -> None:
    state = {"log": {"h": make(), "w": torch.ones(2)}, "own": make()}
    snapshot = store.commit(state)
    assert kinds(snapshot) == {"log/h": "plain", "log/w": "tensor", "own": "plain"}
    assert_same(snapshot.state_dict(), state)
    assert_same(snapshot.state_dict("own"), state["own"])
    apart = flatten.flatten(state)
    assert [leaf.path for leaf in snapshot.leaves()] == [
        path for flat in apart.values() for path in flat.schema.paths
    ]
    for flat in apart.values():
        for i in random.Random(0).sample(range(len(flat.leaves)), min(5, len(flat.leaves))):
            path = flat.schema.paths[i]
            if flat.schema.kinds[i] == "value":
                wanted = values.decode_leaf(flat.leaves[i].read_all())
                assert_same(snapshot.read(path), wanted)
    target: dict[str, Any] = {"log": {"h": type(state["own"])(), "w": torch.zeros(2)}, "own": None}
    held = target["log"]["h"]
    snapshot.restore(target)
    assert_same(target, state)
    assert target["log"]["h"] is held
    snapshot.verify()
    report = store.fsck(read_data="all")
    assert not report.findings


APART: dict[str, Callable[[], Any]] = {
    "few": lambda: history(COUNT - 1),
    "a tensor": lambda: [*history(), {"step": torch.ones(3), "loss": 1.0, "note": None}],
    "large bytes": lambda: [*history(), {"step": b"x" * 600, "loss": 1.0, "note": None}],
    "keys of two types": lambda: {1: 0, **{str(i): i for i in range(COUNT)}},
    "a deque": lambda: [*history(), {"step": deque([{}]), "loss": 1.0, "note": None}],
    "an ordered dict": lambda: [*history(), OrderedDict(step=1)],
    "numbers": lambda: list(range(COUNT)),
}


@pytest.mark.parametrize("make", APART.values(), ids=APART)
def test_other_values_are_leaves_of_their_own(
    make: Callable[[], Any], store: ckptstore.Store
) -> None:
    state = {"log": {"h": make()}}
    snapshot = store.commit(state)
    assert "plain" not in kinds(snapshot).values()
    assert_same(snapshot.state_dict(), state)


def test_what_cannot_be_stored_is_named_by_its_own_path(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match=r"^log/h/7/note: .*surrogate"):
        store.commit({"log": {"h": [*history(7), {"note": "\ud800"}, *history()]}})
    with pytest.raises(InvalidInput, match=r"^log/h/7/note: a builtins.object cannot"):
        store.commit({"log": {"h": [*history(7), {"note": object()}, *history()]}})
    ring: list[Any] = history()
    ring[5] = {"ring": ring}
    with pytest.raises(InvalidInput, match="which holds it"):
        store.commit({"log": {"h": ring}})


def test_the_difference_is_told_below_the_leaf(store: ckptstore.Store) -> None:
    state: dict[str, Any] = {"log": {"h": history(), "same": history()}}
    store.commit(state, step=1)
    state["log"]["h"][3]["loss"] = 7.0
    state["log"]["h"].append({"step": 0, "loss": 1.0, "note": "x"})
    store.commit(state, step=2)
    found = store.diff(1, 2)
    assert [(each.change, each.path) for each in found.changes] == [
        ("changed", "log/h/3/loss"),
        *(("added", f"log/h/{COUNT}/{name}") for name in ("step", "loss", "note")),
    ]
    store.commit({"log": {"h": history(3), "same": history()}}, step=3)  # few, and so no leaf
    found = store.diff(1, 3)
    assert {each.change for each in found.changes} == {"removed"}
    assert len(found.changes) == 3 * (COUNT - 3)


def test_a_part_is_selected_by_paths_below_the_leaf(store: ckptstore.Store) -> None:
    snapshot = store.commit({"log": {"h": history(), "n": 1}})
    assert snapshot.read(f"log/h/{COUNT - 1}/loss") == 1 / COUNT
    assert snapshot.state_dict("log", select="h/1/*")["h"][1] == history()[1]
    target = {"log": {"h": [{"step": -1, "loss": -1.0} for _ in range(COUNT)]}}
    snapshot.restore(target, select="log/h/*/loss")
    assert target["log"]["h"][2] == {"step": -1, "loss": 1 / 3}
    for path in ("log/h", f"log/h/{COUNT}/loss", "log/h/1", "log/h/01/loss"):
        with pytest.raises(NotFound):
            snapshot.read(path)


def test_a_target_gets_what_it_lacks_and_a_target_with_tensors_is_told(
    store: ckptstore.Store,
) -> None:
    snapshot = store.commit({"log": {"h": history()}})
    target: dict[str, Any] = {"log": {"h": [{"step": torch.ones(2)}]}}
    with pytest.raises(InvalidInput, match="log/h/0/step"):
        snapshot.restore(target)
    empty: dict[str, Any] = {"log": {}}
    snapshot.restore(empty)
    assert empty == {"log": {"h": history()}}


def test_a_thinning_takes_the_leaf_and_what_is_below_is_told_to_be_gone(
    store: ckptstore.Store,
) -> None:
    for step in range(4):
        store.commit({"log": {"h": [*history(), {"step": step}], "n": step}}, step=step)
    store.forget(ckptstore.KeepLast(2).thin("log/h"))
    assert [leaf.path for leaf in store.checkout(0).leaves() if leaf.gone] == ["log/h"]
    with pytest.raises(Thinned, match="log/h"):
        store.checkout(0).read("log/h/3/loss")
    found = store.diff(0, 3)
    assert found.thinned == ("log/h",)
    assert [each.path for each in found.changes] == ["log/n"]


class Tracker:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def test_an_object_takes_its_plain_state(store: ckptstore.Store) -> None:
    tracker = Tracker()
    tracker.rows = history()
    snapshot = store.commit({"t": tracker})
    assert kinds(snapshot) == {"t/rows": "plain"}
    other = Tracker()
    snapshot.restore({"t": other})
    assert_same(other.rows, tracker.rows)


def test_a_commit_in_the_background_has_the_values_of_its_call(store: ckptstore.Store) -> None:
    state: dict[str, Any] = {"log": {"h": history()}, "w": torch.ones(1000)}
    pending = store.commit_async(state)
    state["log"]["h"][0]["loss"] = "later"
    state["log"]["h"].append({"later": 1})
    assert_same(pending.wait().state_dict("log"), {"h": history()})


def test_a_store_of_plain_values_is_sent_thinned_collected_and_indexed_anew(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    state = {"log": {"h": history(), "w": torch.ones(2000)}}
    for step in range(3):
        state["log"]["h"][step]["loss"] = "x"
        store.commit(state, step=step)
    store.gc(grace_s=0)
    store.reindex()
    assert_same(store.checkout(2).state_dict(), state)
    with ckptstore.open(tmp_path / "mirror") as mirror:
        store.push(mirror.url)
        assert_same(mirror.checkout(2).state_dict(), state)
        assert not mirror.fsck(read_data="all").findings


BITS = st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack(">d", data)[0])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | BITS
    | st.text()
    | st.binary(max_size=20)
    | st.complex_numbers()
)
KEYS = st.text(max_size=3) | st.integers()
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), below, max_size=4)
        | st.dictionaries(st.integers(), below, max_size=4)
        | st.lists(st.fixed_dictionaries({"a": below, "b": below}), max_size=5)
        | st.frozensets(st.integers() | st.text(), max_size=3)
        | st.sets(st.integers(), max_size=40)
        | st.lists(st.floats(), min_size=32, max_size=40)
    ),
    max_leaves=20,
)


@given(st.data())
def test_any_plain_value_comes_back_with_its_types_and_bits(data: st.DataObject) -> None:
    many = values._MANY, values._BLOCKS
    blocks = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    values._MANY, values._BLOCKS = data.draw(st.integers(1, 4)), blocks
    try:
        value = data.draw(
            st.lists(VALUES, max_size=8)
            | st.dictionaries(st.text(max_size=3), VALUES, max_size=8)
            | st.lists(st.fixed_dictionaries({"x": VALUES, "y": SCALARS}), max_size=8)
        )
        encoded = values.encode_plain(value)
        assert encoded is not values.NOT_A_VALUE
        assert_same(values.decode_leaf(values.encode_leaf(encoded)), value)
    finally:
        values._MANY, values._BLOCKS = many


ROW = st.dictionaries(st.sampled_from("abc"), st.integers() | st.lists(st.integers()), max_size=3)
NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=2) | st.sets(st.integers(), max_size=2),
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abcd"), below, max_size=4)
        | st.lists(ROW, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def targets(draw: st.DrawFn) -> dict[str, Any]:
    """What a restore fills: other values of the same keys, some of them in two places."""
    state: dict[str, Any] = {"h": draw(NESTED), "g": draw(NESTED), "n": draw(NESTED)}
    if draw(st.booleans()):
        found = [each for each, _ in walked(state) if isinstance(each, list | dict)]
        other = draw(st.sampled_from(found))
        into = draw(st.sampled_from(found))
        if not any(each is into for each, _ in walked(other)):  # no ring
            if isinstance(into, list):
                into.append(other)
            else:
                into["a"] = other
    if draw(st.booleans()):
        state["n"] = torch.ones(2)
    return state


def walked(value: Any, path: str = "") -> Iterator[tuple[Any, str]]:
    yield value, path
    for key, each in items_of(value):
        yield from walked(each, f"{path}/{key}")


def restored(snapshot: ckptstore.Snapshot, target: dict[str, Any], strict: bool) -> list[Any]:
    """What becomes of a target: its values, which objects stand where, the report or refusal."""
    held = {id(each): place for each, place in walked(target)}
    kept = [each for each, _ in walked(target)]  # so that no new object has the id of an old one
    told: tuple[Any, ...]
    try:
        said = snapshot.restore({"log": target}, strict=strict)
        told = said.missing, said.unexpected, sorted(said.replaced)
    except InvalidInput as error:
        told = (str(error),)
    found = [(place, held.get(id(each))) for each, place in walked(target) if can_change(each)]
    del kept
    return [shown(target), found, told]


def shown(value: Any) -> str:
    """Its repr, but for sets, where equal ones are alike: a copy may list its items in another
    order."""
    if isinstance(value, set):
        return f"{{{sorted(value)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {shown(each)}' for key, each in value.items())}}}"
    return repr(value)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NESTED, NESTED, targets(), st.booleans())
def test_a_target_takes_a_plain_leaf_in_one_pass_as_leaf_by_leaf(
    store: ckptstore.Store, h: Any, g: Any, target: dict[str, Any], strict: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatten, "PLAIN_ITEMS", 0)
        snapshot = store.commit({"log": {"h": h, "g": g, "n": 1}}, step=1)
        other = copy.deepcopy(target)
        in_one_pass = restored(snapshot, target, strict)
        patch.setattr(CommitContents, "restored_to", lambda contents, *given: contents.trees)
        assert in_one_pass == restored(snapshot, other, strict)


def test_a_target_of_the_same_rows_takes_them_in_one_pass(store: ckptstore.Store) -> None:
    snapshot = store.commit({"log": {"h": history(20_000)}})
    target: dict[str, Any] = {"log": {"h": [{"step": 0, "loss": 0.0} for _ in range(20_000)]}}
    rows = list(target["log"]["h"])
    with pytest.MonkeyPatch.context() as without:
        without.setattr("ckptstore.restore.plain.flatten_value", None)  # a leaf for each value
        snapshot.restore(target)
    assert target == {"log": {"h": history(20_000)}}
    assert all(map(operator.is_, target["log"]["h"], rows))
