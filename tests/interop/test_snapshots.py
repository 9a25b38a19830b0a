"""TorchSnapshot's documented behavior on one rank: its examples with another import."""

import copy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.interop.torchsnapshot import (
    PendingSnapshot,
    RNGState,
    Snapshot,
    StateDict,
    Stateful,
    knobs,
)
from ckptstore.interop.torchsnapshot.manifest import ChunkedTensorEntry
from ckptstore.interop.torchsnapshot.tricks import DistributedDataParallelAdapter
from tests.interop import simple_example


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]  # a module's call is untyped


def trained(steps: int = 1) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 128)).sum().backward()
        optimizer.step()
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@contextmanager
def peer() -> Iterator[Any]:
    """The real TorchSnapshot, without its warnings about a newer torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchsnapshot

        yield torchsnapshot


# -- getting started --


def test_getting_started_take_and_restore(tmp_path: Path) -> None:
    model, optimizer = trained()
    app_state = {"model": model, "optimizer": optimizer, "extra_state": StateDict(iterations=12)}
    snapshot = Snapshot.take(path=str(tmp_path / "path" / "to" / "snapshot"), app_state=app_state)
    other, other_optimizer = trained(0)
    memory = other.layers[0].weight.data_ptr()
    fresh = {"model": other, "optimizer": other_optimizer, "extra_state": StateDict(iterations=0)}
    Snapshot(path=snapshot.path).restore(app_state=fresh)
    assert (
        equal(other.state_dict(), model.state_dict())
        and other.layers[0].weight.data_ptr() == memory
    )
    assert equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert fresh["extra_state"]["iterations"] == 12
    snapshot.restore(app_state=fresh)


def test_getting_started_content_access_within_a_budget(tmp_path: Path) -> None:
    model, _ = trained()
    Snapshot.take(str(tmp_path / "snap"), {"model": model})
    snapshot = Snapshot(path=str(tmp_path / "snap"))
    assert "0/model/layers.0.weight" in snapshot.get_manifest()
    assert torch.equal(snapshot.read_object(path="0/model/layers.0.weight"), model.layers[0].weight)
    out = torch.zeros(64, 128)
    assert (
        snapshot.read_object("0/model/layers.0.weight", obj_out=out, memory_budget_bytes=1000)
        is out
    )
    assert torch.equal(out, model.layers[0].weight)
    with pytest.raises(RuntimeError, match=r"did you mean 'model/layers\.0\.weight'"):
        snapshot.read_object("0/model/layers_0.weight")
    with pytest.raises(KeyError, match="wanted RANK/KEY"):
        snapshot.read_object("model/layers.0.weight")


def test_getting_started_async_take(tmp_path: Path) -> None:
    model, _ = trained()
    wanted = copy.deepcopy(model.state_dict())
    pending = Snapshot.async_take(path=str(tmp_path / "snap"), app_state={"model": model})
    assert isinstance(pending, PendingSnapshot)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    snapshot = pending.wait()
    assert (
        pending.done() and snapshot.path == str(tmp_path / "snap") and Path(snapshot.path).is_file()
    )
    snapshot.restore({"model": model})
    assert equal(model.state_dict(), wanted)


class Drawing:
    """Draws from the random generator whenever its state is read or set."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(2)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.rand(3)


@pytest.mark.parametrize("generator", [RNGState, ckptstore.RNGState])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_getting_started_reproducibility(
    tmp_path: Path, generator: Any, asynchronous: bool
) -> None:
    app_state = {"effectful": Drawing(), "rng_state": generator(), "z": Drawing()}
    path = str(tmp_path / "snap")
    snapshot = (
        Snapshot.async_take(path, app_state).wait()
        if asynchronous
        else Snapshot.take(path, app_state)
    )
    after_take = torch.rand(1)
    snapshot.restore(app_state)
    assert torch.equal(torch.rand(1), after_take)
    with pytest.raises(RuntimeError, match="several RNGState"):
        Snapshot.take(path, {"a": RNGState(), "b": RNGState()})


def test_one_rng_state_takes_what_the_other_committed(tmp_path: Path) -> None:
    for take, restore in ((RNGState(), ckptstore.RNGState()), (ckptstore.RNGState(), RNGState())):
        snapshot = Snapshot.take(str(tmp_path / "snap"), {"rng": take})
        drawn = torch.rand(1)
        snapshot.restore({"rng": restore})
        assert torch.equal(torch.rand(1), drawn)


def test_the_simple_example_resumes_in_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simple_example.main(str(tmp_path), 4, None)
    whole = [line.split(" ") for line in capsys.readouterr().out.splitlines()]
    assert len(whole) == 4 and all(Path(path).is_file() for path, _ in whole)
    command = [sys.executable, simple_example.__file__, str(tmp_path), "4", whole[1][0]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split(" ")[1] for line in done.stdout.splitlines()] == [
        loss for _, loss in whole[2:]
    ]


def test_a_part_of_the_state_is_restored_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    Snapshot.take(
        str(tmp_path / "snap"),
        {"model": model, "optimizer": optimizer, "progress": StateDict(epoch=3)},
    )
    progress = StateDict(epoch=0, mine=1)
    Snapshot(str(tmp_path / "snap")).restore({"progress": progress})
    assert progress.data == {"epoch": 3, "mine": 1}
    other, _ = trained(0)
    Snapshot(str(tmp_path / "snap")).restore({"model": other})
    assert equal(other.state_dict(), model.state_dict())
    with pytest.raises(
        ckptstore.InvalidInput, match="lr_schedule: wanted by the target, not in the commit"
    ):
        Snapshot(str(tmp_path / "snap")).restore({"lr_schedule": StateDict()})


def test_strict_says_whether_a_module_may_lack_something(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "snap", {"m": torch.nn.Linear(3, 3, bias=False)})
    target = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="m/bias"):
        snapshot.restore({"m": target})
    snapshot.restore({"m": target}, strict=False)
    assert torch.equal(target.weight, snapshot.read_object("0/m/weight"))


def test_a_state_that_is_not_stateful_is_a_type_error(tmp_path: Path) -> None:
    for call_with in (
        lambda state: Snapshot.take(str(tmp_path / "s"), state),
        Snapshot(str(tmp_path / "s")).restore,
    ):
        with pytest.raises(TypeError, match="app_state\\['n'\\] is a <class 'int'>"):
            call_with({"n": 1})
    assert (
        isinstance(StateDict(), Stateful)
        and isinstance(torch.nn.Linear(1, 1), Stateful)
        and not isinstance({}, Stateful)
    )


# -- the environment --


def test_the_knobs_that_mean_something_are_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES", "1000")
    snapshot = Snapshot.take(
        str(tmp_path / "s"), {"s": StateDict(w=torch.arange(70.0).view(7, 10))}
    )
    snapshot.restore({"s": StateDict(w=torch.zeros(7, 10))})
    with knobs.override_max_chunk_size_bytes(200):
        chunked = snapshot.get_manifest()["0/s/w"]
    assert isinstance(chunked, ChunkedTensorEntry) and chunked.shape == [7, 10]
    assert [(chunk.offsets, chunk.sizes, chunk.tensor.byte_range) for chunk in chunked.chunks] == [
        ([0, 0], [4, 10], [0, 160]),
        ([4, 0], [3, 10], [160, 280]),
    ]
    monkeypatch.setenv("TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES", "much")
    with pytest.raises(ValueError, match="wanted a number of bytes"):
        Snapshot.take(str(tmp_path / "s"), {"s": StateDict()})


def test_snapshots_and_native_commits_are_one_thing(tmp_path: Path) -> None:
    model, optimizer = trained()
    with ckptstore.open(tmp_path / "runs") as store:
        native = store.commit({"model": model, "optimizer": optimizer}, step=3, tag="good")
        taken = Snapshot.take(
            str(tmp_path / "runs" / "taken"), {"model": model, "optimizer": optimizer}
        )
        assert taken.commit.content_id == native.content_id and taken.commit.new_bytes == 0
        for path in ("good", "3", "latest"):
            other, other_optimizer = trained(0)
            Snapshot(str(tmp_path / "runs" / path)).restore(
                {"model": other, "optimizer": other_optimizer}
            )
            assert equal(other_optimizer.state_dict(), optimizer.state_dict())
        other, other_optimizer = trained(0)
        store.checkout("taken").restore({"model": other, "optimizer": other_optimizer})
        assert equal(other.state_dict(), model.state_dict())


# -- adapters --


def test_tensors_are_prepared_before_they_are_stored(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def halve(path: str, tensor: torch.Tensor, tracing: bool) -> torch.Tensor:
        seen.append((path, tracing))
        return tensor.half() if path.startswith("model") else tensor

    model, optimizer = trained()
    for take in (
        Snapshot.take,
        lambda *args, **kwargs: Snapshot.async_take(*args, **kwargs).wait(),
    ):
        snapshot = take(
            str(tmp_path / "s"),
            {"model": model, "optim": optimizer},
            _custom_tensor_prepare_func=halve,
        )
        assert torch.equal(
            snapshot.read_object("0/model/layers.0.weight"), model.layers[0].weight.half()
        )
        assert equal(snapshot.get_state_dict_for_key("optim"), optimizer.state_dict())
    assert ("model/layers.2.bias", False) in seen and ("optim/state/0/sum", False) in seen
    model.half()
    snapshot.restore({"model": model})
    with pytest.raises(RuntimeError, match="must keep the shape"):
        Snapshot.take(
            str(tmp_path / "s"),
            {"model": model},
            _custom_tensor_prepare_func=lambda path, tensor, tracing: tensor[:1],
        )


def test_prefixes_of_ddp_go(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    state = StateDict({f"module.{name}": value for name, value in linear.state_dict().items()})
    Snapshot.take(str(tmp_path / "s"), {"m": state})
    adapter = DistributedDataParallelAdapter(torch.nn.Linear(2, 2))
    Snapshot(str(tmp_path / "s")).restore({"m": adapter})
    assert equal(adapter.module.state_dict(), linear.state_dict())
