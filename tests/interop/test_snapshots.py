"""TorchSnapshot's documented behavior on one rank: its examples with another import, and the
meaning of paths.
"""

import copy
import os
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
from ckptstore.cli.call import Exit
from ckptstore.interop.torchsnapshot import (
    PendingSnapshot,
    RNGState,
    Snapshot,
    StateDict,
    Stateful,
    knobs,
)
from ckptstore.interop.torchsnapshot.locator import tag_of
from ckptstore.interop.torchsnapshot.manifest import ChunkedTensorEntry
from ckptstore.interop.torchsnapshot.tricks import DistributedDataParallelAdapter
from tests.cli.running import call
from tests.interop import simple_example
from tests.support.servers.s3 import S3Server, new_url


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


# -- paths --


def test_the_store_of_a_path_is_the_one_above_or_a_new_one_beside(tmp_path: Path) -> None:
    first = Snapshot.take(str(tmp_path / "runs" / "epoch_1"), {"s": StateDict(x=1)})
    assert sorted(path.name for path in (tmp_path / "runs").glob("epoch*")) == ["epoch_1"]
    Snapshot.take(f"fs://{tmp_path}/runs/exp7/epoch_2", {"s": StateDict(x=2)})
    with ckptstore.open(tmp_path / "runs") as store:
        assert set(store.tags()) == {"epoch_1", "exp7/epoch_2"}
        assert store.checkout("exp7/epoch_2").parents == (first.commit.id,)
        assert store.checkout(tmp_path / "runs" / "epoch_1").state_dict("s") == {"x": 1}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.log").write_text("started")
    Snapshot.take(str(tmp_path / "work" / "last"), {"s": StateDict(x=3)})
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [
        ".ckptstore",
        "last",
        "train.log",
    ]
    assert Snapshot(str(tmp_path / "work" / "last")).read_object("0/s/x") == 3
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore", "log"],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.OK and "last" in done.stdout


def test_a_directory_that_the_script_made_gets_the_pointer(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    path = str(tmp_path / "step_1")
    Snapshot.take(path, {"s": StateDict(x=1)})
    assert [entry.name for entry in (tmp_path / "step_1").iterdir()] == [".snapshot_metadata"]
    assert Snapshot(path).read_object("0/s/x") == 1


def test_a_path_that_is_taken_again_means_the_new_commit_and_the_old_one_stays(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "last")
    old = Snapshot.take(path, {"s": StateDict(x=1)}, step=1, metrics={"loss": 0.5})
    Snapshot.take(path, {"s": StateDict(x=2)}, step=2)
    assert Snapshot(path).read_object("0/s/x") == 2
    assert old.read_object("0/s/x") == 1, "a handle means the commit it was made with"
    assert (old.commit.step, old.commit.metrics) == (1, {"loss": 0.5})
    assert Snapshot(str(tmp_path / "1")).read_object("0/s/x") == 1, (
        "a path into the store may be any ref"
    )


def test_a_path_means_what_was_taken_last_however_it_was_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    for x in range(5):
        Snapshot.async_take(path, {"s": StateDict(x=-x)})
        Snapshot.take(path, {"s": StateDict(x=x)})
        assert Snapshot(path).read_object("0/s/x") == x


def test_deleting_the_file_does_not_delete_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    Snapshot.take(str(path), {"s": StateDict(x=1)})
    path.unlink()
    assert Snapshot(str(path)).read_object("0/s/x") == 1
    with ckptstore.open(tmp_path / "runs") as store:
        store.untag("a")
    with pytest.raises(ckptstore.NotFound, match="there is no snapshot at"):
        Snapshot(str(path)).get_manifest()


@pytest.mark.parametrize(
    "name",
    ["10", "latest", ".hidden", "epoch=3 loss=0.5", "a+b", "ü", "x" * 210, "a..b", "snapshot/1"],
)
def test_any_name_can_be_a_snapshots(tmp_path: Path, name: str) -> None:
    path = tmp_path / "runs" / name
    Snapshot.take(str(path), {"s": StateDict(x=name)})
    path.unlink()
    assert Snapshot(str(path)).read_object("0/s/x") == name
    names = [
        "10",
        "snapshot/10",
        "a+b",
        "a=b",
        "a+2Bb",
        "a+3Db",
        "latest",
        "é",
        "+C3+A9",
        "y" * 201,
        "y" * 202,
    ]
    assert len(set(map(tag_of, names))) == len(names)


def test_what_else_lies_at_a_path_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"precious")
    with pytest.raises(ckptstore.Conflict, match="is there and is not a snapshot of ckptstore"):
        Snapshot.take(str(tmp_path / "weights.pt"), {"s": StateDict()})
    assert (tmp_path / "weights.pt").read_bytes() == b"precious"
    Snapshot.take(str(tmp_path / "runs" / "a"), {"s": StateDict()})
    for name in ("log", "packs/x", "ckptstore.json"):
        with pytest.raises((ckptstore.InvalidInput, ckptstore.Conflict)):
            Snapshot.take(str(tmp_path / "runs" / name), {"s": StateDict()})
    with pytest.raises(ckptstore.InvalidInput, match="is a store"):
        Snapshot.take(str(tmp_path / "runs"), {"s": StateDict()})


def test_a_directory_of_torchsnapshot_is_told_from_a_snapshot(tmp_path: Path) -> None:
    with peer() as torchsnapshot:
        torchsnapshot.Snapshot.take(
            str(tmp_path / "old"), {"s": torchsnapshot.StateDict(x=torch.ones(3))}
        )
    with pytest.raises(ckptstore.InvalidInput, match=r"ckptstore import .*old --tag old"):
        Snapshot(str(tmp_path / "old")).restore({"s": StateDict()})
    with pytest.raises(ckptstore.Conflict):
        Snapshot.take(str(tmp_path / "old"), {"s": StateDict()})
    store = str(tmp_path / "runs")
    assert call("init", store).code == Exit.OK
    assert call("-s", store, "import", str(tmp_path / "old"), "--tag", "old").code == Exit.OK
    assert torch.equal(Snapshot(f"{store}/old").read_object("0/s/x"), torch.ones(3))


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


def test_a_bucket_holds_snapshots_too(s3: S3Server) -> None:
    url, options = new_url(), s3.options()
    snapshot = Snapshot.take(
        f"{url}/runs/a", {"s": StateDict(w=torch.ones(4))}, storage_options=options
    )
    assert (
        Snapshot.take(
            f"{url}/runs/deep/b", {"s": StateDict(w=torch.ones(4))}, storage_options=options
        ).commit.new_bytes
        == 0
    )
    assert torch.equal(
        Snapshot(f"{url}/runs/a", storage_options=options).read_object("0/s/w"), torch.ones(4)
    )
    assert snapshot.commit.tags == ("a",)


def test_a_store_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    for x in (1, 2):
        Snapshot.take(str(tmp_path / "runs" / "a"), {"s": StateDict(x=x)})
        assert Snapshot(str(tmp_path / "runs" / "a")).read_object("0/s/x") == x
        subprocess.run(["rm", "-r", str(tmp_path / "runs")], check=True)
    assert not os.path.lexists(tmp_path / "runs")


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
