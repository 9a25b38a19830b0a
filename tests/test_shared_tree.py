"""Keys of plain values share a tree, and nobody can tell but by the document: random states of
plain and composite values under any names, committed, changed and read in every way."""

import glob
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.commit.transaction import TreeContent, stored_trees
from ckptstore.core.model import SHARED, LeafContent, Node, Schema
from ckptstore.errors import Corrupt, InvalidInput, NotFound, Thinned
from ckptstore.maintenance.retention import KeepLast
from ckptstore.objects.schema import decode_schema, encode_schema, join_schemas, parts_of
from ckptstore.plugins.reports.difference import differing
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import FlatState, segment
from ckptstore.store import Store
from tests.golden.reader import reader

TRICKY = (
    "",
    "/",
    ".",
    "a/b",
    "a",
    "a/",
    "%empty",
    "%2F",
    "%",
    "0.w",
    "é",
    "ü/ß",
    "0",
    "*",
    "\n",
)
NAMES = st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SHAPES = ((), (3,), (0, 2), (9, 30))
"""Of these only the last is in chunks, as tensors of float32."""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from(SHAPES))
    return torch.full(shape, float(draw(st.integers(0, 3)))).to(
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    )


PLAIN = (
    tensors()
    | tensors().map(lambda each: torch.nn.Parameter(each, requires_grad=False))
    | tensors().filter(lambda each: each.dtype != torch.bfloat16).map(lambda each: each.numpy())
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=700)
    | st.binary(max_size=700)
)
COMPOSITE = st.dictionaries(NAMES, PLAIN, max_size=3) | st.lists(tensors(), min_size=1, max_size=3)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """A state, in which tensors may be tied at the top, and to one within a container."""
    state: dict[str, Any] = draw(st.dictionaries(NAMES, PLAIN | COMPOSITE, min_size=1, max_size=8))
    tied = [value for value in state.values() if isinstance(value, torch.Tensor)]
    if tied and draw(st.booleans()):
        state[draw(NAMES)] = tied[0]
        state[draw(NAMES)] = {"tied": tied[0], "x": 1}
    return state


@st.composite
def changed(draw: st.DrawFn, state: dict[str, Any]) -> dict[str, Any]:
    """The state with some keys removed, some added or of another value, in another order."""
    new = {key: value for key, value in state.items() if draw(st.integers(0, 3))}
    new |= draw(
        st.dictionaries(st.sampled_from(list(state)) | NAMES, PLAIN | COMPOSITE, max_size=3)
    )
    keys = draw(st.permutations(list(new or state)))
    return {key: new[key] if new else state[key] for key in keys}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        alike = type(a) is type(b) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def blank(value: Any) -> Any:
    """A target for `value`, with other content."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(blank, value))
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(torch.full_like(value, 9), requires_grad=False)
    if isinstance(value, torch.Tensor | np.ndarray):
        return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else value * 0 + 9
    return None


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}/{segment(key)}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from leaves(each, f"{path}/{i}")
    else:
        yield path, value


def content(value: Any) -> Any:
    """What `read` has of a leaf: that a tensor was a parameter, or an array, is in the skeleton."""
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def check_names(state: dict[str, Any], snap: Snapshot) -> None:
    """The document has one tree for all plain values."""
    own = {key for key, value in state.items() if key and isinstance(value, dict | list)}
    names = {name for name, _ in contents_of(snap).document.trees}
    assert names == (own | {SHARED} if own < state.keys() else own)


def check_read(state: dict[str, Any], snap: Snapshot) -> None:
    assert snap.keys() == list(state)
    assert same(snap.state_dict(), state)
    found = dict(pair for key, value in state.items() for pair in leaves(value, segment(key)))
    assert [leaf.path for leaf in snap.leaves()] == list(found)
    for path, value in found.items():
        assert same(snap.read(path), content(value))
        assert path in {leaf.path for leaf in snap.leaves(glob.escape(path))}
    for key, value in state.items():
        assert same(snap.state_dict(key), value)
        assert same(snap.only([key]).state_dict(), {key: value})
        assert snap.only([key]).keys() == [key]
    for missing in {"no such key", *TRICKY} - state.keys():
        with pytest.raises(NotFound):
            snap.state_dict(missing)
    snap.verify()


def check_restored(state: dict[str, Any], snap: Snapshot, some: list[str]) -> None:
    target = {key: blank(value) for key, value in state.items()}
    tensors = {key: each for key, each in target.items() if isinstance(each, torch.Tensor)}
    report = snap.restore(target)
    assert same(target, state) and not report.missing and not report.unexpected
    assert all(target[key] is tensor for key, tensor in tensors.items())
    part = {key: blank(state[key]) for key in some}
    report = snap.restore(part)
    assert same(part, {key: state[key] for key in some})
    assert report.unexpected == tuple(key for key in state if key not in some)
    target = {key: blank(value) for key, value in state.items()}
    before = {key: blank(value) for key, value in state.items()}
    snap.restore(target, without=some)
    assert same(target, {key: (before if key in some else state)[key] for key in state})
    target = {**{key: blank(value) for key, value in state.items()}, "nobody has this": 5}
    with pytest.raises(InvalidInput, match="nobody has this"):
        snap.restore(target)
    assert same(target, {**before, "nobody has this": 5})
    assert snap.restore(target, strict=False).missing == ("nobody has this",)
    assert same(target, {**state, "nobody has this": 5})


def check_selected(state: dict[str, Any], snap: Snapshot, key: str) -> None:
    """One key, by its paths."""
    paths = [path for path, _ in leaves(state[key], segment(key))]
    if not paths:
        return
    target = {each: blank(value) for each, value in state.items()}
    before = {each: blank(value) for each, value in state.items()}
    snap.restore(target, select=lambda path: path in paths)
    assert same(target, {each: (state if each == key else before)[each] for each in state})
    assert same(snap.state_dict(select=lambda path: path in paths), {key: state[key]})


def check_difference(store: Store, old: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = (
        dict(pair for key, value in state.items() for pair in leaves(value, segment(key)))
        for state in (old, new)
    )
    found = {change.path for change in store.diff(1, 2).changes}
    both = before.keys() & after.keys()
    equal = {path for path in both if same(content(before[path]), content(after[path]))}
    assert found == (before.keys() | after.keys()) - equal
    found_in_order = [change.path for change in store.diff(1, 2).changes]
    added = [path for path in after if path in found]
    assert found_in_order == added + [path for path in before if path in found - after.keys()]


@settings(max_examples=25)
@given(states(), st.data())
def test_a_state_of_plain_and_composite_values_is_read_in_every_way(
    state: dict[str, Any], data: st.DataObject
) -> None:
    new = data.draw(changed(state))
    with tempfile.TemporaryDirectory() as place, ckptstore.open(Path(place) / "s") as store:
        first = store.commit(state, step=1)
        second = store.commit(new, step=2)
        for each, snap in ((state, store.checkout(1)), (new, store.checkout(2))):
            check_names(each, snap)
            check_read(each, snap)
            some = data.draw(st.lists(st.sampled_from(list(each)), min_size=1, unique=True))
            check_restored(each, snap, sorted(some, key=list(each).index))
            check_selected(each, snap, some[0])
        check_difference(store, state, new)
        again = dict(data.draw(st.permutations(list(state.items()))))
        assert store.commit(again, step=3).content_id == first.content_id
        assert store.checkout(3).keys() == list(again)
        assert (first.content_id == second.content_id) == (
            sorted(state) == sorted(new) and all(same(state[key], new[key]) for key in state)
        )
        independent = reader.Store(Path(place) / "s")
        for step, snap in ((1, first), (2, second)):
            paths = list(independent.leaves(independent.find(str(step))))
            assert paths == [leaf.path for leaf in snap.leaves()]
        assert not store.fsck(read_data="100%").findings


@settings(max_examples=20)
@given(states(), st.data())
def test_what_a_thinning_leaves_is_read(state: dict[str, Any], data: st.DataObject) -> None:
    found = dict(pair for key, value in state.items() for pair in leaves(value, segment(key)))
    if not found:
        return
    some = glob.escape(data.draw(st.sampled_from(list(found))))
    with tempfile.TemporaryDirectory() as place, ckptstore.open(Path(place) / "s") as store:
        gone = {leaf.path for leaf in store.commit(state, step=1).leaves(some)}
        for step in (2, 3):
            store.commit({"other": step}, step=step)
        store.forget(KeepLast(2).thin(some))
        snap = store.checkout(1)
        check_names(state, snap)
        assert {leaf.path for leaf in snap.leaves() if leaf.gone} == gone
        for path, value in found.items():
            if path in gone:
                with pytest.raises(Thinned):
                    snap.read(path)
            else:
                assert same(snap.read(path), content(value))
        whole = [key for key in state if not any(p.partition("/")[0] == segment(key) for p in gone)]
        target = {key: blank(state[key]) for key in whole}
        if whole:
            snap.restore(target)
        assert same(target, {key: state[key] for key in whole})
        assert not store.fsck(read_data="100%").findings


def schemas(state: dict[str, Any]) -> list[tuple[str, Schema]]:
    return [(key, flat.schema) for key, flat in sorted(flatten(state).items())]


@settings(max_examples=25)
@given(states())
def test_a_walk_makes_the_tree_that_keys_share(state: dict[str, Any]) -> None:
    apart = {tree.key: tree for tree in stored_trees(map(described, flatten(state).items()))}
    together = {tree.key: tree for tree in map(described, flatten(state, shared=True).items())}
    assert together.keys() == apart.keys()
    for name, tree in together.items():
        assert tree.schema == apart[name].schema and tree.contents == apart[name].contents
        assert tree.keys == (tuple(state) if name == SHARED else ())


def described(found: tuple[str, FlatState]) -> TreeContent:
    """A tree with its bytes in place of chunks."""
    key, flat = found
    contents = [LeafContent(inline=source.read_all()) for source in flat.leaves]
    return TreeContent(key, flat.schema, contents, flat.keys)


@given(states())
def test_schemas_are_joined_and_taken_apart_again(state: dict[str, Any]) -> None:
    parts = schemas(state)
    joined = join_schemas(parts)
    assert [(key, schema) for key, schema, _ in parts_of(joined)] == parts
    assert [leaves for _, _, leaves in parts_of(joined)] == [
        leaves for _, _, leaves in parts_of(decode_schema(encode_schema(joined)))
    ]
    assert len(joined) == sum(len(schema) for _, schema in parts)


def test_a_tree_that_nobody_can_share_is_corrupt() -> None:
    (_, one), (_, other) = schemas({"a": torch.ones(2), "b": torch.zeros(2)})
    joined = join_schemas([("a", one), ("b", other)])
    tied = Schema(*(getattr(joined, name) for name in Schema.__slots__[:-1]), aliases=(-1, 0))
    listed = Schema(Node("list", (0, 1)), *(getattr(joined, n) for n in Schema.__slots__[1:]))
    for wrong in (one, tied, listed):
        with pytest.raises(Corrupt, match="run `ckptstore fsck`"):
            list(parts_of(wrong))


@pytest.mark.parametrize("wrong", ["tied", "lacking", "more"])
def test_a_shared_tree_that_is_not_of_its_keys_is_seen_in_every_way_to_read_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        state = {"a": torch.ones(2), "b": torch.zeros(2)}
        snap, other = store.commit(state, step=1), store.commit({"c": 1, **state}, step=2)
        contents = contents_of(snap)
        read = contents.reader.trees

        def trees(refs: Any) -> Any:
            found = dict(read(refs))
            shared = found[SHARED]
            if wrong == "tied":
                schema = replace(shared.schema, aliases=(-1, 0))
                found[SHARED] = replace(shared, schema=schema)
            else:
                found[SHARED] = read(contents_of(other).document.trees)[SHARED]
            return found

        if wrong == "lacking":
            contents.document = replace(contents.document, keys=("a", "b", "d"))
        monkeypatch.setattr(contents.reader, "trees", trees)
        ways = (snap.state_dict, snap.verify, lambda: differing(contents, contents))
        for way in ways:
            if wrong == "more":
                way()
                continue
            with pytest.raises(Corrupt, match="ckptstore fsck"):
                way()
        if wrong == "more":
            assert same(snap.state_dict(), state)
