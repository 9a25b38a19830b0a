"""Optimizers' states in every form: named, numbered, flat, and of an optimizer's own. Each is
restored by name, or refused before anything has changed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ckptstore
from ckptstore.errors import InvalidInput
from tests.state.carrying import assert_same
from tests.state.test_parameters import module, moments, step


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


def grouped(model: nn.Module, *groups: str, lrs: tuple[float, ...] = (0.5, 0.25)) -> AdamW:
    """An AdamW whose groups have parameters by the ends of their names."""
    listed = [
        {
            "params": [p for name, p in model.named_parameters() if name.endswith(tuple(ends))],
            "lr": lr,
        }
        for ends, lr in zip([each.split() for each in groups], lrs, strict=False)
    ]
    return AdamW(listed)


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def refused(
    snapshot: ckptstore.Snapshot, state: dict[str, Any], match: str, **options: Any
) -> None:
    """The restore is refused, and nothing has changed."""
    optimizer, weights = state["optimizer"], state.get("model", nn.Identity()).state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    before = [repr(optimizer.state_dict()), rates(optimizer)]
    with pytest.raises(InvalidInput, match=match) as caught:
        snapshot.restore(state, **options)
    assert "nothing was changed" in str(caught.value)
    assert [repr(optimizer.state_dict()), rates(optimizer)] == before
    for name, value in weights.items():
        assert torch.equal(state["model"].state_dict()[name], value)


def test_groups_in_another_order_get_the_options_of_their_parameters(
    store: ckptstore.Store,
) -> None:
    model, other = module(), module()
    optimizer = step(grouped(model, "weight", "bias"))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    target = grouped(other, "bias", "weight", lrs=(3.0, 4.0))
    snapshot.restore({"model": other, "optimizer": target})
    assert rates(target) == [0.25, 0.5]
    assert_same(moments(target, other), moments(optimizer, model))


def test_a_scheduler_that_goes_by_the_order_of_groups_makes_another_order_refused(
    store: ckptstore.Store,
) -> None:
    """Its base rates would be exchanged at the next step."""
    model, other = module(), module()
    optimizer = step(grouped(model, "weight", "bias"))
    scheduler = LambdaLR(optimizer, lambda n: 1.0)
    snapshot = store.commit({"model": model, "optimizer": optimizer, "extra": [scheduler]}, step=1)
    target = grouped(other, "bias", "weight")
    extra = [LambdaLR(target, lambda n: 1.0)]
    state = {"model": other, "optimizer": target, "extra": extra}
    refused(snapshot, state, "groups differ: LambdaLR goes by the order of groups")
    again = grouped(other, "weight", "bias", lrs=(3.0, 4.0))
    extra = [LambdaLR(again, lambda n: 1.0)]
    snapshot.restore({"model": other, "optimizer": again, "extra": extra})
    assert rates(again) == [0.5, 0.25]


@pytest.mark.parametrize(
    ("committed", "target"),
    [
        (("weight", "bias"), ("weight bias",)),
        (("weight bias",), ("weight", "bias")),
        (("0.weight 0.bias", "1.weight 1.bias"), ("weight", "bias")),
    ],
    ids=["two to one", "one to two", "across"],
)
def test_parameters_that_are_divided_otherwise_are_refused_with_both_sides(
    store: ckptstore.Store, committed: tuple[str, ...], target: tuple[str, ...]
) -> None:
    model, other = module(), module()
    optimizer = step(grouped(model, *committed))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    state = {"model": other, "optimizer": grouped(other, *target, lrs=(3.0, 4.0))}
    refused(
        snapshot,
        state,
        rf"optimizer/param_groups: the commit has {len(committed)} group.*0\.weight.*lr=0\.5.*"
        rf"the target has {len(target)} group.*lr=3\.0.*groups differ.*strict=False",
    )
    report = snapshot.restore(state, strict=False)
    assert_same(moments(state["optimizer"], other), moments(optimizer, model))
    if len(committed) == 1:
        assert rates(state["optimizer"]) == [0.5, 0.5]
    else:
        assert rates(state["optimizer"]) == [3.0, 4.0][: len(target)]
        assert "optimizer/param_groups/0" in report.missing


def test_a_group_that_was_added_since_keeps_its_options_when_lenient(
    store: ckptstore.Store,
) -> None:
    model, other = module(3, 4), module(3, 4, 5)
    optimizer = step(grouped(model, "0.weight 0.bias", "1.weight 1.bias"))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    target = grouped(
        other, "2.weight 2.bias", "0.weight 0.bias", "1.weight 1.bias", lrs=(7.0, 8.0, 9.0)
    )
    state = {"model": other, "optimizer": target}
    refused(snapshot, state, r"optimizer/state/2\.weight: wanted by the target, not in the commit")
    report = snapshot.restore(state, strict=False)
    assert rates(target) == [7.0, 0.5, 0.25]
    assert set(moments(target, other)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert "optimizer/state/2.bias" in report.missing


def test_a_group_that_would_be_lost_is_refused_although_it_has_no_state(
    store: ckptstore.Store,
) -> None:
    model = module()
    snapshot = store.commit({"model": model, "optimizer": grouped(model, "weight", "bias")}, step=1)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    state = {"model": model, "optimizer": AdamW(weights)}
    refused(snapshot, state, "groups differ")
    snapshot.restore(state, strict=False)
    assert rates(state["optimizer"]) == [0.5]


def test_moments_of_numbers_go_to_parameters_of_their_shape_only(store: ckptstore.Store) -> None:
    big, small = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)
    optimizer = step(SGD(big.parameters(), lr=0.1, momentum=0.9))
    snapshot = store.commit({"optimizer": optimizer}, step=1)
    refused(
        snapshot,
        {"optimizer": SGD(small.parameters(), lr=0.1, momentum=0.9)},
        r"optimizer/state/0/momentum_buffer: the commit has float32\[4, 4\], the target has "
        r"a parameter of shape \[1, 4\]",
    )


def test_numbers_in_other_groups_are_refused(store: ckptstore.Store) -> None:
    model = module()
    state = step(grouped(model, "weight", "bias")).state_dict()
    snapshot = store.commit({"model": model.state_dict(), "optimizer": state}, step=1)
    other = module()
    for target in (AdamW(other.parameters()), grouped(other, "0.weight", "0.bias 1.weight 1.bias")):
        refused(
            snapshot,
            {"model": other, "optimizer": target},
            "2 groups .*2 parameters.*groups differ: the commit has no names",
        )
    same = grouped(other, "weight", "bias", lrs=(3.0, 4.0))
    snapshot.restore({"model": other, "optimizer": same})
    assert rates(same) == [0.5, 0.25]


def test_without_names_an_order_that_shapes_do_not_prove_is_refused(
    store: ckptstore.Store,
) -> None:
    model, other = module(3, 3), module(3, 3)
    optimizer = step(AdamW(model.parameters()))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    target = AdamW(list(other.parameters())[::-1])
    refused(
        snapshot,
        {"optimizer": target},
        r"0\.weight of shape \[3, 3\], .* shape \[3\] in its place, without names.*without=",
    )
    weight = other[0].weight.clone()
    straight = {"optimizer": AdamW(other.parameters())}
    refused(snapshot, straight, r"0\.weight and 1\.weight .*alike in shape.*without names")
    snapshot.restore({"model": other, "optimizer": target}, without=["model"])
    assert_same(moments(target, other), moments(optimizer, model))
    assert torch.equal(other[0].weight, weight)
    refused(
        snapshot, {"optimizer": AdamW(list(other.parameters())[:2])}, "4 parameters .*2 without"
    )


def test_an_optimizer_that_was_given_names_needs_no_module(store: ckptstore.Store) -> None:
    model, other = module(3, 3), module(3, 3)
    optimizer = step(AdamW(model.named_parameters()))
    target = AdamW(list(other.named_parameters())[::-1])
    for state in ({"model": model, "optimizer": optimizer}, {"optimizer": optimizer}):
        store.commit(state, step=len(state)).restore({"optimizer": target})
        assert_same(moments(target, other), moments(optimizer, model))
        target = AdamW(list(other.named_parameters())[::-1])


def test_renamed_leaves_of_an_optimizer_take_their_groups_with_them(store: ckptstore.Store) -> None:
    layers = {name: nn.Linear(3, 3, bias=False) for name in ("a", "b")}
    model = nn.ModuleDict(layers)
    optimizer = step(grouped(model, "a.weight", "b.weight"))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    other = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("a", "b")})
    target = grouped(other, "b.weight", "a.weight", lrs=(3.0, 4.0))
    swapped = {"a.weight": "b.weight", "b.weight": "a.weight"}

    def rename(path: str) -> str:
        return re.sub(r"[ab]\.weight", lambda found: swapped[found[0]], path)

    snapshot.restore({"model": other, "optimizer": target}, rename=rename)
    assert torch.equal(other["b"].weight, model["a"].weight)
    for old, new in (("a", "b"), ("b", "a")):
        assert_same(target.state[other[new].weight], optimizer.state[model[old].weight])
    assert rates(target) == [0.5, 0.25]


@pytest.mark.parametrize("flat", [True, False])
def test_states_that_torchs_functions_name_are_restored_by_name(
    store: ckptstore.Store, flat: bool
) -> None:
    model, other = module(3, 3), module(3, 3)
    optimizer = step(grouped(model, "weight", "bias"))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    snapshot = store.commit({"model": model, "optimizer": state}, step=1)
    target = grouped(other, "1.bias 0.bias", "1.weight 0.weight", lrs=(3.0, 4.0))
    snapshot.restore({"model": other, "optimizer": target})
    assert_same(
        {name: dict(sorted(each.items())) for name, each in moments(target, other).items()},
        {name: dict(sorted(each.items())) for name, each in moments(optimizer, model).items()},
    )
    assert rates(target) == [0.25, 0.5]
    target = AdamW(list(other.parameters())[::-1])
    chosen = "1.weight"
    snapshot.restore(
        {"model": other, "optimizer": target}, select=lambda path: chosen in path, without="model"
    )
    assert set(moments(target, other)) == {chosen}
    wanted = moments(optimizer, model)[chosen]["exp_avg"]
    assert torch.equal(moments(target, other)[chosen]["exp_avg"], wanted)
    other = module(3, 3)
    across = grouped(other, "0.weight 0.bias", "1.weight 1.bias", lrs=(3.0, 4.0))
    refused(snapshot, {"model": other, "optimizer": across}, "groups differ")


@pytest.mark.parametrize(
    "state", [{}, {"state": {}}, {"step": 3, "moments": torch.ones(2)}, [1, torch.ones(2)]]
)
def test_another_form_under_an_optimizers_key_is_refused(
    store: ckptstore.Store, state: Any
) -> None:
    model, other = module(), module()
    snapshot = store.commit({"model": model, "optimizer": state}, step=1)
    refused(
        snapshot,
        {"model": other, "optimizer": AdamW(other.parameters())},
        "optimizer: the commit has another form of state .*AdamW, which takes .*param_groups",
    )


class Lookahead(Optimizer):
    """An optimizer around another, with a state of its own form."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.pace = inner, 2
        self.param_groups, self.defaults, self.state = inner.param_groups, {}, inner.state

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "pace": self.pace}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.pace = state_dict["pace"]


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_with_a_form_of_its_own_loads_itself(
    store: ckptstore.Store, strict: bool
) -> None:
    model, other = module(), module()
    wanted, target = (Lookahead(Adam(each.parameters())) for each in (model, other))
    step(wanted.inner)
    wanted.pace = 7
    snapshot = store.commit({"model": model, "optimizer": wanted}, step=1)
    snapshot.restore({"model": other, "optimizer": target}, strict=strict)
    assert target.pace == 7
    assert_same(target.state_dict(), wanted.state_dict())


def test_what_an_optimizer_raises_names_its_path(store: ckptstore.Store) -> None:
    model, other = module(), module()
    wanted, target = (Lookahead(Adam(each.parameters())) for each in (model, other))
    state = {**wanted.state_dict()}
    del state["pace"]
    snapshot = store.commit({"model": model, "optimizer": state}, step=1)
    with pytest.raises(InvalidInput, match=r"optimizer: Lookahead refuses .*KeyError.*without="):
        snapshot.restore({"model": other, "optimizer": target})


def test_lbfgs_keeps_one_row_for_all_of_its_parameters(store: ckptstore.Store) -> None:
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    optimizer = torch.optim.LBFGS(model.values())
    optimizer.step(lambda: sum(p.detach().sum() for p in model.values()))
    snapshot = store.commit({"model": model, "optimizer": optimizer}, step=1)
    other = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    target = torch.optim.LBFGS([other["b"], other["a"]])
    refused(snapshot, {"model": other, "optimizer": target}, "one row for the parameters a, b")


def test_an_enabled_grad_scaler_refuses_the_state_of_a_disabled_one_before_anything_changed(
    store: ckptstore.Store,
) -> None:
    model = module()
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    snapshot = store.commit({"model": model, "scaler": off}, step=1)
    other = module()
    weight = other[0].weight.clone()
    with pytest.raises(InvalidInput, match=r"scaler: .*disabled GradScaler.*without="):
        snapshot.restore({"model": other, "scaler": on})
    assert torch.equal(other[0].weight, weight)
    snapshot.restore({"model": other, "scaler": on}, without="scaler")
    snapshot.restore({"model": other, "scaler": off})
