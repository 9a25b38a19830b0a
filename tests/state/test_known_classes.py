"""Classes that torch was told to trust need no second registration, and what a new process could
not restore is said at the commit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import ckptstore
from ckptstore.errors import InvalidInput


class Halves(TwoTensor):
    """A quantized state, as libraries of optimizers have them."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> "Halves":
        return Halves(inner["a"], inner["b"])


class TorchsOwn(TwoTensor):
    """One that torch itself defines, as far as its module says."""


TorchsOwn.__module__ = "torch.quantized"


class Quantized(torch.optim.SGD):
    """Keeps its momentum in a tensor class of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["moment"] = Halves(torch.ones(3), torch.ones(3))


class Named(torch.Tensor):
    label: str


@pytest.fixture
def trusted() -> Iterator[None]:
    with torch.serialization.safe_globals([Halves]):
        yield


def made(*, stepped: bool) -> dict[str, Any]:
    model = torch.nn.Linear(3, 1)
    optimizer = Quantized(model.parameters(), lr=0.1)
    if stepped:
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "register_class" in each.getMessage()]


def test_what_a_new_process_cannot_restore_is_said_once_at_the_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        state = made(stepped=False)
        store.commit(state, step=0)
        assert not _warnings(caplog)
        state["optimizer"].step()
        for step in (1, 2):
            store.commit(state, step=step)
        (told,) = _warnings(caplog)
        assert told.startswith("optimizer has the state 'moment' as a ")
        assert "register_class(Halves)" in told
        with pytest.raises(InvalidInput, match="neither registered nor in the target"):
            store.checkout(2).restore(made(stepped=False))


def test_subclasses_of_torchs_own_are_said_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = made(stepped=True)
    for each in state["optimizer"].state.values():
        each["moment"] = TorchsOwn(torch.ones(3), torch.ones(3))
    with ckptstore.open(tmp_path / "s") as store:
        store.commit_async(state, step=1).wait()
    (told,) = _warnings(caplog)
    assert "register_class(TorchsOwn)" in told


@pytest.mark.usefixtures("trusted")
def test_torchs_safe_globals_are_consent_for_their_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        store.commit(made(stepped=True), step=1)
        assert not _warnings(caplog)
        fresh = made(stepped=False)
        store.checkout(1).restore(fresh)
        moments = [each["moment"] for each in fresh["optimizer"].state.values()]
        assert {type(each) for each in moments} == {Halves}


def test_a_class_that_the_parameters_have_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(Halves(torch.ones(3), torch.ones(3)))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["moment"] = Halves(torch.ones(3), torch.ones(3))
    with ckptstore.open(tmp_path / "s") as store:
        store.commit({"w": parameter, "optimizer": optimizer}, step=1)
    assert not _warnings(caplog)


def test_the_way_out_that_a_tensor_with_attributes_is_told_works(tmp_path: Path) -> None:
    tensor = torch.ones(3).as_subclass(Named)
    tensor.label = threading.Lock()  # plain values are kept
    with (
        ckptstore.open(tmp_path / "s") as store,
        pytest.raises(InvalidInput, match=r"register_value\(…, \S*Named, …\)"),
    ):
        store.commit({"t": {"a": tensor}}, step=1)
    code = """
import torch, ckptstore, sys
class Named(torch.Tensor): pass
def decode(state):
    tensor = state["data"].as_subclass(Named)
    tensor.label = state["label"]
    return tensor
ckptstore.register_value(
    "named", Named, lambda t: {"data": t.as_subclass(torch.Tensor), **vars(t)}, decode
)
with ckptstore.open(sys.argv[1]) as store:
    store.commit({"t": {"a": decode({"data": torch.ones(3), "label": "x"})}}, step=1)
    back = store.checkout(1).state_dict("t")["a"]
    assert type(back) is Named and back.label == "x" and back.tolist() == [1, 1, 1]
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
