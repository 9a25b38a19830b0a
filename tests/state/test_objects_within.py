"""An object that another's state holds is filled and handed over as itself; an object that cannot
give its state yet takes one all the same; classes are found in everything a target holds."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.state.stateful import StateDict, classes_in, register_value
from tests.state.carrying import carry


class Meter:
    def __init__(self, n: int = 0) -> None:
        self.n = n
        self.seen = torch.full((2,), float(n))

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n, self.seen = state["n"], state["seen"]


class Trainer:
    """Its state is all that it has, as that of torch's schedulers is."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_an_object_in_the_state_of_another_is_filled_and_handed_over() -> None:
    target = Trainer(step=0, meter=Meter(), by={"name": [Meter()]})
    meter, listed = target.meter, target.by["name"][0]
    carry(Trainer(step=5, meter=Meter(7), by={"name": [Meter(8)]})).restore(target)
    assert target.step == 5
    assert target.meter is meter
    assert target.by["name"] == [listed]
    assert (meter.n, listed.n) == (7, 8)
    assert meter.seen.tolist() == [7, 7]


def test_objects_within_objects_within_objects_are_filled(tmp_path: Path) -> None:
    def make(n: int) -> Trainer:
        inner = Trainer(n=n, meter=Meter(n))
        return Trainer(inner=inner, again=inner, progress=StateDict(n=n))

    target = make(0)
    inner, meter = target.inner, target.inner.meter
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"all": [make(3)]}).restore({"all": [target]})
    assert (inner.n, meter.n) == (3, 3)
    assert target.inner is target.again is inner
    assert inner.meter is meter
    assert isinstance(target.progress, StateDict)
    assert target.progress == {"n": 3}


def test_modules_and_optimizers_in_the_state_of_another_are_filled() -> None:
    def make(seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return Trainer(model=model, optimizer=optimizer, best=None)

    made, target = make(1), make(2)
    model, weight, optimizer = target.model, target.model.weight, target.optimizer
    carry(made).restore(target)
    assert target.model is model
    assert target.optimizer is optimizer
    assert weight is model.weight
    assert weight.equal(made.model.weight)
    state, wanted = optimizer.state_dict()["state"], made.optimizer.state_dict()["state"]
    assert all(state[0][name].equal(wanted[0][name]) for name in wanted[0])


def test_a_scheduler_that_wraps_another_goes_on() -> None:
    class Warmup(LambdaLR):
        """As in warmup-scheduler: the scheduler that follows is an attribute."""

        def __init__(self, optimizer: Any) -> None:
            self.after_scheduler = ExponentialLR(optimizer, 0.5)
            super().__init__(optimizer, lambda step: 1.0)

    def make() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return Warmup(optimizer)

    made, target = make(), make()
    for _ in range(3):
        made.optimizer.step()
        made.after_scheduler.step()
    carry({"scheduler": made}).restore({"scheduler": target})
    assert isinstance(target.after_scheduler, ExponentialLR)
    assert target.after_scheduler.last_epoch == 3
    target.after_scheduler.step()


@pytest.mark.parametrize("there", [None, {"n": 0}, 3])
def test_an_object_for_which_the_targets_state_has_none_is_refused_with_its_path(
    there: Any,
) -> None:
    target = Trainer(step=0, meter=there)
    binding = carry(Trainer(step=5, meter=Meter(7))).bind(target)
    assert [each.path for each in binding.mismatched] == ["s/meter"]
    assert vars(target) == {"step": 0, "meter": there}


def test_without_a_target_the_state_stands_for_the_object() -> None:
    got = carry({"t": Trainer(meter=Meter(7))}).inflate()
    assert got["t"]["meter"]["n"] == 7
    assert carry({"meter": Meter(7)}).restore({"meter": None})["meter"]["n"] == 7


def test_a_part_of_an_objects_state_reaches_the_objects_within(tmp_path: Path) -> None:
    target = Trainer(step=0, meter=Meter(), other=Meter())
    meter, other = target.meter, target.other
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"t": Trainer(step=5, meter=Meter(7), other=Meter(8))})
        store.checkout().restore({"t": target}, select="t/meter/**")
    assert (target.step, meter.n, other.n) == (0, 7, 0)
    assert target.meter is meter


class Late:
    """Cannot give its state before it was set up, as objects of Ignite and TorchRL cannot."""

    def __init__(self, *, ready: bool) -> None:
        if ready:
            self.weight, self.mode = torch.ones(2), "on"

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.mode = state["weight"], state["mode"]


class LateModule(nn.Module):
    def __init__(self, *, ready: bool) -> None:
        super().__init__()
        if ready:
            self.weight = nn.Parameter(torch.ones(2))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"weight": self.weight.detach()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.weight = nn.Parameter(state["weight"])


@pytest.mark.parametrize("make", [Late, LateModule])
@pytest.mark.parametrize("within", [False, True])
def test_an_object_that_cannot_give_its_state_yet_takes_one(make: Any, within: bool) -> None:
    target = make(ready=False)
    wrap = (lambda each: [each]) if within else lambda each: each
    carry({"late": wrap(make(ready=True))}).restore({"late": wrap(target)})
    assert target.weight.tolist() == [1, 1]


@pytest.mark.parametrize("make", [Late, LateModule])
@pytest.mark.parametrize("within", [False, True])
def test_what_an_object_raises_at_a_commit_says_where_it_is(make: Any, within: bool) -> None:
    late = make(ready=False)
    state, path = ({"a": [late]}, "s/a/0") if within else (late, "s")
    with pytest.raises(AttributeError, match="weight") as caught:
        carry(state)
    (noted,) = caught.value.__notes__
    assert noted.startswith(f"raised when the state of {path} was asked for, for a commit: bring")


class Mode(Enum):
    TRAIN = 1


@dataclass
class Note:
    text: str = ""


class Callback:
    """Makes new containers whenever it is asked for its state."""

    def __init__(self, make: Any = lambda: {"mode": Mode.TRAIN}) -> None:
        self.make = make

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.make()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.make = lambda: state["x"]


def test_classes_are_found_in_every_state_made_on_the_way() -> None:
    # The state of one object is gone before the next one's is made, in the same memory.
    plain = [Callback(lambda: {"mode": 1}) for _ in range(50)]
    found = classes_in([each for one in plain for each in (one, Callback())])
    assert found(f"{__name__}.Mode") is Mode


def test_two_objects_of_one_list_bring_their_classes() -> None:
    def make() -> list[Any]:
        return [torch.optim.Adam([torch.zeros(1)]), Callback()]

    carry({"callbacks": make()}).restore({"callbacks": make()})


@pytest.mark.parametrize(
    "hold",
    [lambda each: deque([each]), lambda each: {"a": (each,)}, lambda each: {each: 1}],
)
def test_classes_are_found_in_all_containers(hold: Any) -> None:
    assert classes_in(hold(Mode.TRAIN))(f"{__name__}.Mode") is Mode


def test_classes_are_found_although_an_object_cannot_give_its_state() -> None:
    target = {"late": Late(ready=False), "note": Note()}
    carry({"late": Late(ready=True), "note": Note("x")}).restore(target)
    assert target["note"] == Note("x")


def refuse(argument: Any) -> Any:
    raise KeyError("gone")


class Refusing:
    """Its codec refuses it, on the way in or out."""

    def __init__(self, way: str) -> None:
        self.way = way


register_value(
    "within.Refusing",
    Refusing,
    lambda each: refuse(each) if each.way == "encode" else each.way,
    lambda way: refuse(way) if way == "decode" else Refusing(way),
)


def test_what_a_codec_of_the_callers_raises_names_the_codec() -> None:
    with pytest.raises(
        InvalidInput, match=r"^s/a: the codec 'within.Refusing' cannot encode .*Key"
    ):
        carry({"a": Refusing("encode")})
    carried = carry({"a": Refusing("decode")})
    with pytest.raises(InvalidInput, match=r"the codec 'within.Refusing' cannot decode .*KeyErr"):
        carried.inflate()
