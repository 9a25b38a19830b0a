"""Restores of some keys of a commit: the state names those it wants; a resume wants all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import InvalidInput

WEIGHT = torch.arange(6.0).view(2, 3)


def training(value: torch.Tensor | None = None, step: int = 0) -> dict[str, Any]:
    """The application state of a script, after one step of its optimizer."""
    model = nn.Linear(3, 2)
    if value is not None:
        nn.init.constant_(model.bias, step)
        model.weight.data.copy_(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if value is None else 0.25)
    return {"model": model, "optimizer": optimizer, "progress": {"step": step}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        opened.commit(training(WEIGHT, 7), step=7)
        yield opened


def rate(state: dict[str, Any]) -> float:
    return float(state["optimizer"].param_groups[0]["lr"])


@pytest.mark.parametrize("strict", [True, False])
def test_a_restore_takes_the_keys_that_the_state_has(store: ckptstore.Store, strict: bool) -> None:
    state = training()
    report = store.checkout(7).restore({"model": state["model"]}, strict=strict)
    assert torch.equal(state["model"].weight, WEIGHT)
    assert rate(state) == 0.5 and state["progress"] == {"step": 0}
    assert report.unexpected == ("optimizer", "progress") and report.missing == ()
    assert report.needed_bytes == 8 * 4


def test_some_keys_are_restored_under_other_names(store: ckptstore.Store) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

    model = Wrapper()
    store.checkout(7).restore({"model": model}, rename={"": "head."})
    assert torch.equal(model.head.weight, WEIGHT)


def test_what_is_below_a_key_must_fit_as_ever(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match="model/bias: in the commit, not wanted by the target"):
        store.checkout(7).restore({"model": nn.Linear(3, 2, bias=False)})
    with pytest.raises(InvalidInput, match=r"wanted by the target, not in the commit") as caught:
        store.checkout(7).restore({"modle": nn.Linear(3, 2)})
    assert "modle: wanted" in str(caught.value) and "did you mean 'model'?" in str(caught.value)
    assert "optimizer" not in str(caught.value)


def test_a_state_without_keys_is_refused(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match=r"the state .* is empty.*model, optimizer, progress"):
        store.checkout(7).restore({})


def test_a_resume_refuses_a_state_that_forgot_a_key(store: ckptstore.Store) -> None:
    state = training()
    optimizer = state.pop("optimizer")
    with pytest.raises(InvalidInput, match="optimizer") as caught:
        store.resume(state)
    assert state["progress"] == {"step": 0}, "nothing was changed"
    assert 'without=["optimizer"]' in str(caught.value)
    assert '.restore({"model": …})' in str(caught.value)
    snap = store.resume(state, without=["optimizer"])
    assert snap is not None and state["progress"] == {"step": 7}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert store.resume(training(), strict=False) is not None


@pytest.mark.parametrize("call", ["resume", "restore"])
@pytest.mark.parametrize("without", ["optimizer", ["optimizer"], ["optimizer", "elsewhere"]])
def test_a_key_that_is_left_out_stays_as_it_is(
    store: ckptstore.Store, call: str, without: Any
) -> None:
    state = training() | {"elsewhere": 3}
    restore = store.resume if call == "resume" else store.checkout(7).restore
    if "elsewhere" not in without:
        with pytest.raises(InvalidInput, match="elsewhere: wanted by the target"):
            restore(state, without=without)
        assert state.pop("elsewhere") == 3
    restore(state, without=without)
    assert torch.equal(state["model"].weight, WEIGHT) and rate(state) == 0.5
    assert state.get("elsewhere", 3) == 3 and state["progress"] == {"step": 7}


@pytest.mark.parametrize("wrong", [3, [3], [["optimizer"]], None])
def test_what_is_no_key_cannot_be_left_out(store: ckptstore.Store, wrong: Any) -> None:
    for call in (store.resume, store.checkout(7).restore):
        with pytest.raises(InvalidInput, match=r"without is .*wanted keys of the state"):
            call(training(), without=wrong)


def test_a_mistyped_key_to_leave_out_is_named(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match=r"without names 'optimiser'.*did you mean 'optimizer'"):
        store.checkout(7).restore(training(), without=["optimiser"])
