"""Restores under other names, by prefix or function, into modules and plain containers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import InvalidInput
from ckptstore.state.renaming import Renamer
from tests.state.carrying import assert_same


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


def net(**parts: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(parts))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


PREFIXES = [
    ({"old.": "new."}, "model/old.weight", "model/new.weight"),
    ({"model/old.": "model/new."}, "model/old.weight", "model/new.weight"),
    ({"": "backbone."}, "model/weight", "model/backbone.weight"),
    ({"module.": ""}, "model/module.weight", "model/weight"),
    ({"ema/": "model/"}, "ema/weight", "model/weight"),
    ({"a": "x", "a.b": "y"}, "model/a.b.c", "model/y.c"),
    ({"a": "b", "b": "a"}, "model/a", "model/b"),
    ({"old.": "new."}, "model/older.weight", "model/older.weight"),
    ({"epoch": "step"}, "epoch", "step"),
]


@pytest.mark.parametrize(("rename", "path", "wanted"), PREFIXES)
def test_the_longest_prefix_that_fits_is_replaced_below_the_key_or_from_it_on(
    rename: dict[str, str], path: str, wanted: str
) -> None:
    assert Renamer(rename)(path) == wanted


@pytest.mark.parametrize("wrong", [{}, {"a": 1}, "old", 3, {1: "a"}])
def test_an_invalid_rename_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="rename"):
        Renamer(wrong)


@pytest.mark.parametrize("wrong", ["", "model/", "/x", None])
def test_a_function_must_give_a_path(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"rename makes .* of model/weight"):
        Renamer(lambda path: wrong)("model/weight")


RENAMES: list[Any] = [
    {"old.": "new."},
    {"model/old.": "model/new."},
    lambda path: path.replace("old.", "new."),
]


@pytest.mark.parametrize("rename", RENAMES)
def test_a_module_takes_the_weights_of_one_with_other_names(
    store: ckptstore.Store, rename: Any
) -> None:
    old, new = (
        net(old=nn.Linear(3, 3), norm=nn.BatchNorm1d(3)),
        net(new=nn.Linear(3, 3), norm=nn.BatchNorm1d(3)),
    )
    address = new.new.weight.data_ptr()
    snap = store.commit({"model": old})
    with pytest.raises(InvalidInput, match=r"(?s)model/new\.weight.*rename="):
        snap.restore({"model": new})
    snap.restore({"model": new}, rename=rename)
    assert same(old, new)
    assert new.new.weight.data_ptr() == address


def test_a_wrapped_models_prefix_goes_and_comes(store: ckptstore.Store) -> None:
    inner, outer = nn.Linear(3, 3), net(backbone=nn.Linear(3, 3))
    store.commit({"model": inner}).restore({"model": outer}, rename={"": "backbone."})
    assert same(inner, outer)
    back = nn.Linear(3, 3)
    store.commit({"model": outer}).restore({"model": back}, rename={"backbone.": ""})
    assert same(back, outer)


def test_a_key_of_the_state_can_be_renamed(store: ckptstore.Store) -> None:
    model, ema, target = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    snap = store.commit({"model": model, "ema": ema, "step": 7})
    snap.restore({"model": target}, select="ema/*", rename={"ema/": "model/"})
    assert same(target, ema)
    state = {"at": 0}
    snap.restore(state, select="step", rename={"step": "at"})
    assert state == {"at": 7}
    with pytest.raises(InvalidInput, match="two keys of the commit to model"):
        snap.restore({"model": target}, rename={"ema/": "model/"})


def test_plain_containers_are_renamed_at_any_depth(store: ckptstore.Store) -> None:
    committed = {
        "a": {"w": torch.ones(2), "n": [1, {"x": torch.ones(3)}]},
        "b": OrderedDict(y=2),
        3: {"z": 1},
        "p/q": 5,
    }
    target: dict[str, Any] = {"c": {"v": torch.zeros(2)}}
    v = target["c"]["v"]
    rename = {"a/w": "c/v", "a/": "c/deep/", "b/": "d/", "3/": "4/", "p%2Fq": "r%2Fs"}
    store.commit({"s": committed}).restore({"s": target}, rename=rename)
    assert target["c"]["v"] is v
    wanted = {
        "c": {"v": torch.ones(2), "deep": {"n": [1, {"x": torch.ones(3)}]}},
        "d": OrderedDict(y=2),
        4: {"z": 1},
        "r/s": 5,
    }
    assert_same(target, wanted)


def test_a_nested_module_is_renamed_as_well(store: ckptstore.Store) -> None:
    one, other = net(old=nn.Linear(2, 2)), net(new=nn.Linear(2, 2))
    target = {"nets": {"second": other}}
    store.commit({"s": {"nets": {"first": one}}}).restore(
        {"s": target}, rename={"nets/first/old.": "nets/second/new."}
    )
    assert target["nets"]["second"] is other
    assert same(one, other)


def test_a_modules_metadata_is_renamed_with_its_leaves(store: ckptstore.Store) -> None:
    seen: list[Any] = []

    class Watching(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append((prefix, metadata))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    snap = store.commit({"model": net(old=Watching(2, 2))})
    Watching._version = 4
    for select in (None, "old.*"):
        snap.restore({"model": net(new=Watching(2, 2))}, rename={"old.": "new."}, select=select)
    assert seen == [("new.", {"version": 3})] * 2


CLASHES: list[tuple[Any, str]] = [
    (
        {"a.": "b."},
        r"model/a\.weight to model/b\.weight and model/b\.weight to model/b\.weight|both cannot be "
        r"there",
    ),
    ({"zzz.": "b."}, r"no path begins with 'zzz\.'"),
    ({"a.": "c.", "unused": "x"}, "no path begins with 'unused'"),
    (lambda path: "model/same", "both cannot be there"),
    (lambda path: path if "a." in path else f"other/{path}", "the leaves of one key"),
    (lambda path: "model", "stays below one"),
    (
        lambda path: path.replace("a.weight", "a.weight/b").replace("a.bias", "a.weight"),
        "both cannot be there",
    ),
]


@pytest.mark.parametrize(("rename", "message"), CLASHES)
def test_a_rename_that_cannot_be_is_refused_and_nothing_is_touched(
    store: ckptstore.Store, rename: Any, message: str
) -> None:
    snap = store.commit({"model": net(a=nn.Linear(2, 2), b=nn.Linear(2, 2))})
    target = net(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(InvalidInput, match=message):
        snap.restore({"model": target}, rename=rename)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


def test_a_list_is_not_taken_apart(store: ckptstore.Store) -> None:
    snap = store.commit(
        {"s": {"l": [torch.ones(1), torch.ones(2)], "sparse": torch.eye(2).to_sparse()}}
    )
    for prefix in ("l/0", "sparse/values"):
        with pytest.raises(InvalidInput, match="as a whole"):
            snap.restore({"s": {}}, rename={prefix: "x"})
    target: dict[str, Any] = {}
    snap.restore({"s": target}, rename={"l": "m", "sparse": "thin"})
    assert_same(target["m"], [torch.ones(1), torch.ones(2)])
    assert torch.equal(target["thin"].to_dense(), torch.eye(2))


def test_a_function_sees_every_leaf_once_and_may_change_nothing(store: ckptstore.Store) -> None:
    seen: list[str] = []

    def look(path: str) -> str:
        seen.append(path)
        return path

    rename: Callable[[str], str] = look
    module = net(a=nn.Linear(2, 2))
    store.commit({"model": module, "n": 1}).restore(
        {"model": net(a=nn.Linear(2, 2)), "n": 0}, rename=rename
    )
    assert seen == ["model/a.weight", "model/a.bias", "n"]


def test_tied_weights_are_renamed_together_or_apart(store: ckptstore.Store) -> None:
    shared = torch.randn(300)
    target = {"x": torch.zeros(300), "b": torch.zeros(300)}
    store.commit({"s": {"a": shared, "b": shared}}).restore({"s": target}, rename={"a": "x"})
    assert_same(target, {"x": shared, "b": shared})
