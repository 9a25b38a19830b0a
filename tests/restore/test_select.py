"""Part of a state selected by globs: only that is read, and the rest of the target stays."""

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import InvalidInput, NotFound
from ckptstore.core.text import selector
from ckptstore.snapshot import Snapshot, contents_of
from tests.restore.counting import least_bytes_read
from tests.state.carrying import assert_same

Pair = ckptstore.register_class(namedtuple("Pair", "a b"))  # type: ignore[type-var]


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.head.weight.data.fill_(7)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


MATCHES = [
    ("layers.*", "model/layers.0.weight", True),
    ("model/layers.*", "model/layers.0.weight", True),
    ("*.weight", "model/layers.0.weight", True),
    ("layers.?.weight", "model/layers.0.weight", True),
    ("layers.[12].weight", "model/layers.0.weight", False),
    ("weight", "model/layers.0.weight", False),
    ("model", "model/layers.0.weight", True),
    ("model/", "model/layers.0.weight", True),
    ("mod", "model/layers.0.weight", False),
    ("state/0", "optimizer/state/0/exp_avg", True),
    ("state/0", "optimizer/state/01/exp_avg", False),
    ("a[0]", "model/a[0]", True),
    ("a[0]", "model/a[0]/b", True),
    ("epoch", "epoch", True),
    ("*", "epoch", True),
]


@pytest.mark.parametrize(("glob", "path", "is_selected"), MATCHES)
def test_a_glob_matches_a_path_in_full_or_below_its_key_and_what_is_in_a_container(
    glob: str, path: str, is_selected: bool
) -> None:
    assert selector(glob)(path) is is_selected
    assert selector(["no-such", glob])(path) is is_selected


@pytest.mark.parametrize("wrong", ["", [], [""], 3, [3]])
def test_an_invalid_glob_is_refused(wrong: Any) -> None:
    with pytest.raises((InvalidInput, TypeError)):
        selector(wrong)


def test_a_state_dict_of_selected_leaves_has_these_only(store: ckptstore.Store) -> None:
    model = Net()
    snap = store.commit({"model": model, "epoch": 3})
    part = snap.state_dict("model", select="layers.*")
    assert list(part) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert_same(
        dict(part),
        {name: value for name, value in model.state_dict().items() if name.startswith("layers.")},
    )
    assert list(snap.state_dict(select=["epoch", "*.bias"])) == ["model", "epoch"]
    assert [leaf.path for leaf in snap.leaves("head.*")] == ["model/head.weight", "model/head.bias"]
    Net().load_state_dict(part, strict=False)


def test_a_function_says_which_paths_are_selected(store: ckptstore.Store) -> None:
    model, other = Net(), Net()
    snap = store.commit({"model": model, "epoch": 3})
    kept = other.layers[0].weight.detach().clone()
    snap.restore({"model": other}, select=lambda path: path.startswith("model/head."))
    assert_same(dict(other.head.state_dict()), dict(model.head.state_dict()))
    assert torch.equal(other.layers[0].weight, kept)
    assert [leaf.path for leaf in snap.leaves(lambda path: path == "epoch")] == ["epoch"]
    with pytest.raises(NotFound, match="wants no leaf"):
        snap.state_dict(select=lambda path: False)


def test_only_selected_leaves_are_read(store: ckptstore.Store) -> None:
    big = {f"layer{i}": torch.randn(512, 512) for i in range(8)}
    snap = store.commit({"model": big})
    reopened = store.checkout(snap.id)
    assert contents_of(reopened).trees
    nbytes, part = least_bytes_read(
        lambda: reopened.state_dict("model", select=["layer3", "layer5"])
    )
    assert nbytes <= 2 * big["layer0"].nbytes + 4096
    assert_same(part, {"layer3": big["layer3"], "layer5": big["layer5"]})


def nested() -> dict[str, Any]:
    return {
        "list": [torch.ones(1), {"x": torch.ones(2), "y": torch.ones(3)}, torch.ones(4)],
        "pair": Pair(torch.ones(5), torch.ones(6)),
        "tuple": (torch.ones(7), torch.ones(8)),
        "empty": {},
        "sparse": torch.eye(3).to_sparse(),
        "array": np.ones(3),
        0: "zero",
        "0": "text",
    }


SELECTIONS: list[tuple[Any, Any]] = [
    ("list/1/y", {"list": [None, {"y": torch.ones(3)}, None]}),
    ("pair/b", {"pair": Pair(None, torch.ones(6))}),
    ("tuple/0", {"tuple": (torch.ones(7), None)}),
    ("empty", {"empty": {}}),
    ("array", {"array": np.ones(3)}),
    ("%int:0", {0: "zero"}),
    (["0", "tuple"], {"tuple": (torch.ones(7), torch.ones(8)), "0": "text"}),
]


@pytest.mark.parametrize(("select", "wanted"), SELECTIONS)
def test_positions_stay_in_sequences_and_records(
    store: ckptstore.Store, select: Any, wanted: Any
) -> None:
    assert_same(store.commit({"s": nested()}).state_dict("s", select=select), wanted)


def test_a_tensor_of_several_leaves_comes_whole(store: ckptstore.Store) -> None:
    snap = store.commit({"s": nested()})
    part = snap.state_dict("s", select="sparse/values")
    assert list(part) == ["sparse"]
    assert torch.equal(part["sparse"].to_dense(), torch.eye(3))


def test_tied_tensors_stay_tied_when_the_first_of_them_is_left_out(store: ckptstore.Store) -> None:
    shared = torch.randn(300)
    snap = store.commit({"s": {"a": shared, "b": shared, "c": shared}})
    part = snap.state_dict("s", select=["b", "c"])
    assert torch.equal(part["b"], shared)
    assert part["b"].data_ptr() == part["c"].data_ptr()


def test_a_selection_that_matches_nothing_is_not_found_and_names_near_ones(
    store: ckptstore.Store,
) -> None:
    snap = store.commit({"model": Net()})
    with pytest.raises(NotFound, match=r"layer\.0\.weight.*did you mean 'layers\.0\.weight'"):
        snap.state_dict("model", select="layer.0.weight")
    with pytest.raises(NotFound, match="ls"):
        snap.restore({"model": Net()}, select="nothing*")


# -- restore --


def committed(store: ckptstore.Store, state: dict[str, Any]) -> Snapshot:
    return store.checkout(store.commit(state).id)


def test_a_module_gets_the_selected_leaves_and_keeps_the_rest(store: ckptstore.Store) -> None:
    trained, model = Net(), Net()
    trained.norm.num_batches_tracked.fill_(9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    report = committed(store, {"model": trained, "epoch": 1}).restore(
        {"model": model, "new": 5}, select=["layers.*", "norm.*"]
    )
    assert not report.missing and not report.unexpected
    for name, value in model.state_dict().items():
        assert torch.equal(
            value, before[name] if name.startswith("head") else trained.state_dict()[name]
        )
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_selected_leaf_without_a_place_is_unexpected(store: ckptstore.Store) -> None:
    snap = committed(store, {"model": Net(3)})
    with pytest.raises(InvalidInput, match=r"model/layers\.2\.weight: in the commit"):
        snap.restore({"model": Net(2)}, select="layers.*")
    assert snap.restore({"model": Net(2)}, select="layers.*", strict=False).unexpected == (
        "model/layers.2.weight",
        "model/layers.2.bias",
    )
    assert not snap.restore({"model": Net(2)}, select="layers.[01].*").unexpected


def test_a_plain_container_keeps_unselected_values(store: ckptstore.Store) -> None:
    snap = committed(store, {"s": nested()})
    target = {
        "list": [torch.zeros(1), {"x": torch.zeros(2), "y": torch.zeros(3), "z": 1}, "mine"],
        "stale": 1,
        "tuple": (1, 2),
    }
    kept, y = target["list"][0], target["list"][1]["y"]
    snap.restore({"s": target}, select=["list/1/y", "tuple/1"])
    assert target["list"][0] is kept and target["list"][2] == "mine" and target["list"][1]["y"] is y
    assert_same(target["list"][1], {"x": torch.zeros(2), "y": torch.ones(3), "z": 1})
    assert_same(target["tuple"], (1, torch.ones(8)))
    assert list(target) == ["list", "stale", "tuple"]


def test_a_part_of_a_sequence_needs_the_same_sequence(store: ckptstore.Store) -> None:
    snap = committed(store, {"s": nested()})
    for wrong in ({"list": [1]}, {"list": (1, 2, 3)}, {"list": None}, {}):
        with pytest.raises(InvalidInput, match="s/list"):
            snap.restore({"s": wrong}, select="list/1")


def test_an_optimizer_takes_a_part_of_its_state(store: ckptstore.Store) -> None:
    def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (_, one), (model, other) = trained(1), trained(2)
    bias = other.state[model.bias]["exp_avg"].clone()
    committed(store, {"optimizer": one}).restore({"optimizer": other}, select="state/0")
    assert_same(other.state_dict()["state"][0], one.state_dict()["state"][0])
    assert torch.equal(other.state[model.bias]["exp_avg"], bias)
    assert other.param_groups[0]["lr"] == 0.2


def test_a_state_without_any_selected_key_is_refused(store: ckptstore.Store) -> None:
    snap = committed(store, {"model": Net(), "other": {"x": 1}})
    with pytest.raises(InvalidInput, match="belongs to other"):
        snap.restore({"model": Net()}, select="other/*")
