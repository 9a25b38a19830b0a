"""An optimizer's state is committed under the names of its parameters, and finds them again in any
order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import ckptstore
from ckptstore.errors import InvalidInput
from tests.state.carrying import assert_same


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


def module(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes or (3, 4)))


def step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, i + 1.0)
    optimizer.step()
    return optimizer


def paths(snapshot: ckptstore.Snapshot, select: str) -> list[str]:
    return [leaf.path for leaf in snapshot.leaves(select)]


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    return {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def test_an_optimizers_state_is_named_as_in_the_module_that_is_committed_with_it(
    store: ckptstore.Store,
) -> None:
    model = module()
    optimizer = step(AdamW(model.parameters()))
    snapshot = store.commit({"optimizer": optimizer, "model": model})
    assert "optimizer/state/1.bias/exp_avg" in paths(snapshot, "optimizer/*")
    state = snapshot.state_dict("optimizer")
    assert (
        list(state["state"])
        == state["param_groups"][0]["params"]
        == ["0.weight", "0.bias", "1.weight", "1.bias"]
    )


def test_torch_takes_a_named_state_dict_as_it_is(store: ckptstore.Store) -> None:
    model = module()
    optimizer = step(AdamW(model.named_parameters(), lr=0.5))
    state = store.commit({"model": model, "optimizer": optimizer}).state_dict("optimizer")
    assert state["param_groups"][0]["param_names"] == state["param_groups"][0]["params"]
    other = AdamW(module().parameters())
    other.load_state_dict(state)
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert other.param_groups[0]["lr"] == 0.5


def test_parameters_given_in_another_order_get_their_own_state(store: ckptstore.Store) -> None:
    model, other = module(), module()
    optimizer = step(AdamW(model.parameters()))
    shuffled = AdamW(list(other.parameters())[::-1])
    store.commit({"model": model, "optimizer": optimizer}).restore(
        {"model": other, "optimizer": shuffled}
    )
    assert_same(moments(shuffled, other), moments(optimizer, model))
    assert [p.shape for p in shuffled.param_groups[0]["params"]] == [
        p.shape for p in reversed(list(model.parameters()))
    ]


def test_a_wrapper_around_the_module_changes_no_name(store: ckptstore.Store) -> None:
    model = module()
    optimizer = step(AdamW(model.parameters()))
    plain = store.commit({"model": model, "optimizer": optimizer})
    compiled: Any = torch.compile(model, backend="eager")
    assert store.commit({"model": compiled, "optimizer": optimizer}).content_id == plain.content_id


def test_an_optimizer_of_two_modules_says_which(store: ckptstore.Store) -> None:
    one, two = module(3), module(3)
    optimizer = step(AdamW([*one.parameters(), *two.parameters()]))
    snapshot = store.commit({"one": one, "two": two, "optimizer": optimizer})
    assert "optimizer/state/two.0.bias/exp_avg" in paths(snapshot, "optimizer/*")
    assert paths(
        store.commit({"x": {"model": one, "o": [step(SGD(one.parameters(), momentum=0.9))]}}),
        "x/o/*",
    )[:1] == ["x/o/0/state/0.weight/momentum_buffer"]


def test_an_optimizer_without_its_module_keeps_its_numbers(store: ckptstore.Store) -> None:
    model = module()
    optimizer = step(AdamW(model.parameters()))
    assert "optimizer/state/3/exp_avg" in paths(
        store.commit({"optimizer": optimizer}), "optimizer/*"
    )
    parameter = nn.Parameter(torch.ones(2))
    both = step(AdamW([*model.parameters(), parameter]))
    assert "optimizer/state/4/exp_avg" in paths(
        store.commit({"model": model, "optimizer": both}), "optimizer/*"
    )


def test_numbered_parameters_are_restored_by_position(store: ckptstore.Store) -> None:
    model, other = module(), module()
    optimizer, fresh = step(AdamW(model.parameters())), AdamW(other.parameters())
    snapshot = store.commit({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert "optimizer/state/0/exp_avg" in paths(snapshot, "optimizer/*")
    snapshot.restore({"model": other, "optimizer": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_names_that_the_target_does_not_know_at_all_are_taken_in_order(
    store: ckptstore.Store,
) -> None:
    model = module()
    optimizer = step(AdamW(model.parameters()))
    snapshot = store.commit({"model": model, "optimizer": optimizer})
    alone = AdamW(module().parameters())
    snapshot.restore({"optimizer": alone}, select="optimizer/*")
    assert_same(alone.state_dict(), optimizer.state_dict())
    wrapped = nn.ModuleDict({"net": module()})
    renamed = AdamW(wrapped.parameters())
    snapshot.restore({"model": wrapped, "optimizer": renamed}, rename={"model/": "model/net."})
    assert_same(renamed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("several", [False, True])
def test_state_follows_parameters_that_are_renamed_in_another_order(
    store: ckptstore.Store, several: bool
) -> None:
    """Both layers have one shape, so nothing but names tells their moments apart."""
    layers = {name: nn.Linear(3, 3) for name in ("a", "b", "c", "d")}
    model = nn.ModuleDict({name: layers[name] for name in ("a", "b")})
    more = nn.ModuleDict({name: layers[name] for name in ("c", "d")})
    optimizer = step(AdamW([*model.parameters(), *more.parameters()][: 8 if several else 4]))
    snapshot = store.commit({"m": model, "more": more, "optimizer": optimizer})
    wanted = {name: optimizer.state[layers[name].weight]["exp_avg"].clone() for name in ("a", "b")}

    other = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("b", "a")})
    rest = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("d", "c")})
    fresh = AdamW([*other.parameters(), *rest.parameters()][: 8 if several else 4])
    snapshot.restore(
        {"m": other, "more": rest, "optimizer": fresh}, rename={"m/a.": "m/b.", "m/b.": "m/a."}
    )
    assert torch.equal(other["b"].weight, model["a"].weight)
    for name, new in (("a", "b"), ("b", "a")):
        assert torch.equal(fresh.state[other[new].weight]["exp_avg"], wanted[name])
    if several:
        c = optimizer.state[more["c"].weight]["exp_avg"]
        assert torch.equal(fresh.state[rest["c"].weight]["exp_avg"], c)


def test_a_parameter_that_one_side_lacks_is_said_and_left_out_when_lenient(
    store: ckptstore.Store,
) -> None:
    model, other = module(3, 4), module(3, 4, 5)
    optimizer, larger = (
        step(SGD(model.parameters(), momentum=0.9)),
        step(SGD(other.parameters(), momentum=0.5)),
    )
    kept = moments(larger, other)["2.bias"]["momentum_buffer"].clone()
    snapshot = store.commit({"model": model, "optimizer": optimizer})
    with pytest.raises(InvalidInput, match=r"optimizer/state/2\.bias: wanted by the target"):
        snapshot.restore({"model": other, "optimizer": larger})
    snapshot.restore({"model": other, "optimizer": larger}, strict=False)
    assert_same(moments(larger, other)["1.bias"], moments(optimizer, model)["1.bias"])
    assert torch.equal(moments(larger, other)["2.bias"]["momentum_buffer"], kept)
    assert larger.param_groups[0]["momentum"] == 0.9 and len(larger.param_groups[0]["params"]) == 6
    back = store.commit({"model": other, "optimizer": larger})
    with pytest.raises(InvalidInput, match=r"optimizer/state/2\.bias: in the commit, not wanted"):
        back.restore({"model": model, "optimizer": optimizer})
    report = back.restore({"model": model, "optimizer": optimizer}, strict=False)
    assert {"optimizer/state/2.weight", "optimizer/state/2.bias"} < set(report.unexpected)
    assert len(optimizer.state) == 4


def test_one_parameters_state_can_be_selected(store: ckptstore.Store) -> None:
    model, other = module(), module()
    optimizer, fresh = (
        step(AdamW(model.parameters(), lr=0.5)),
        AdamW(list(other.parameters())[::-1], lr=0.1),
    )
    snapshot = store.commit({"model": model, "optimizer": optimizer})
    snapshot.restore({"model": other, "optimizer": fresh}, select="optimizer/state/1.weight/*")
    assert_same(moments(fresh, other), {"1.weight": moments(optimizer, model)["1.weight"]})
    snapshot.restore({"model": other, "optimizer": fresh}, select="optimizer/param_groups/*")
    assert fresh.param_groups[0]["lr"] == 0.5


def test_other_groups_are_refused(store: ckptstore.Store) -> None:
    model = module()
    snapshot = store.commit({"model": model, "optimizer": AdamW(model.parameters())})
    groups = AdamW(
        [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    )
    with pytest.raises(InvalidInput, match=r"optimizer/param_groups: .* groups differ"):
        snapshot.restore({"model": model, "optimizer": groups})
