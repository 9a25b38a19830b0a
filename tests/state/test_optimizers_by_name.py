"""Whatever the order of a model's parameters and of an optimizer's groups: each parameter gets its
own state and options, or the restore is refused and nothing has changed."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import ckptstore
from ckptstore.errors import InvalidInput
from tests.state.carrying import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*a commit of run.*")

KINDS: dict[str, Any] = {
    "SGD": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "plain SGD": lambda groups: SGD(groups, lr=0.1),
    "Adam": lambda groups: Adam(groups, lr=0.1, amsgrad=True),
    "AdamW": lambda groups: AdamW(groups, lr=0.1),
    "Adagrad": lambda groups: Adagrad(groups, lr=0.1),
    "LBFGS": lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]], lr=0.1),
}
SHAPES = {"a": (2, 2), "b": (2, 2), "c": (2,), "d": (3,), "e": (2, 2)}


@dataclass
class Training:
    """A model of which each parameter has values of its own, and its optimizer."""

    model: nn.ParameterDict
    optimizer: Optimizer

    def step(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            terms = (value.pow(2).sum() * (ord(name) - 90) for name, value in self.model.items())
            loss = torch.stack(list(terms)).sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS takes a tensor too

    def by_name(self) -> dict[str, Any]:
        """Weights, state and options of each parameter."""
        names = {id(value): name for name, value in self.model.items()}
        found: dict[str, Any] = {}
        for group in self.optimizer.param_groups:
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for parameter in group["params"]:
                state = dict(self.optimizer.state.get(parameter, {}))
                weight = parameter.detach()
                found[names[id(parameter)]] = copy.deepcopy([weight, state, options])
        return found


@dataclass(frozen=True)
class Plan:
    """The order of a model's parameters, and how an optimizer divides them."""

    order: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    kind: str
    lrs: tuple[float, ...]
    steps: int
    gives_names: bool

    def made(self, seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.ParameterDict({name: torch.randn(SHAPES[name]) for name in self.order})
        named = self.gives_names and self.kind != "LBFGS"
        groups = [
            {"params": [(n, model[n]) if named else model[n] for n in names], "lr": lr}
            for names, lr in zip(self.groups, self.lrs, strict=False)
        ]
        training = Training(model, KINDS[self.kind](groups))
        for _ in range(self.steps):
            training.step()
        return training


@st.composite
def plans(draw: st.DrawFn, names: tuple[str, ...], kind: str, lrs: tuple[float, ...]) -> Plan:
    order = tuple(draw(st.permutations(names)))
    given = draw(st.permutations(names)) if draw(st.booleans()) else list(order)
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=2)))
    ends = [0, *cuts, len(names)]
    groups = tuple(tuple(given[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    return Plan(order, groups, kind, lrs, draw(st.integers(0, 2)), draw(st.booleans()))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    count = draw(st.integers(2, len(SHAPES)))
    names = tuple(draw(st.permutations(sorted(SHAPES)))[:count])
    kind = draw(st.sampled_from(sorted(KINDS)))
    lrs = draw(st.sampled_from([(0.5, 0.25, 0.125), (0.5, 0.5, 0.5)]))
    committed = draw(plans(names, kind, lrs))
    target = draw(plans(names, kind, (1.0, 2.0, 3.0)))
    if draw(st.booleans()):  # the same division, in another order
        groups = draw(st.permutations([draw(st.permutations(g)) for g in committed.groups]))
        target = Plan(
            target.order,
            tuple(map(tuple, groups)),
            kind,
            target.lrs,
            target.steps,
            target.gives_names,
        )
    return committed, target


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    pair=pairs(),
    way=st.sampled_from(["with", "alone", "left"]),
    strict=st.sampled_from([True, True, False]),
    select=st.sampled_from(
        [None, None, None, None, "optimizer/state/*", "optimizer/param_groups/*/lr"]
    ),
)
def test_state_and_options_follow_names_or_are_refused(
    store: ckptstore.Store, pair: tuple[Plan, Plan], way: str, strict: bool, select: str | None
) -> None:
    old, new = pair[0].made(0), pair[1].made(1)
    wanted, before = old.by_name(), new.by_name()
    snapshot = store.commit({"model": old.model, "optimizer": old.optimizer}, step=1)
    state = {"model": new.model, "optimizer": new.optimizer}
    if way == "alone":
        del state["model"]
    without = ["model"] if way == "left" else []
    try:
        snapshot.restore(state, strict=strict, without=without, select=select)
    except InvalidInput:
        assert_same(new.by_name(), before)
        return
    except ckptstore.errors.NotFound:
        assert select is not None, "an optimizer without a step has nothing to select"
        return
    for name, (weight, moments, options) in new.by_name().items():
        assert_same(weight, (wanted if way == "with" and select is None else before)[name][0])
        if (select is None and (strict or wanted[name][1])) or (select and "state" in select):
            assert_same(moments, wanted[name][1] or ({} if strict else before[name][1]))
        if select is None and strict:
            assert_same(options, wanted[name][2])
        elif select is None or "lr" in select:
            assert options["lr"] in (wanted[name][2]["lr"], before[name][2]["lr"])
