"""What torchtitan's manager reads and writes beside commits, what it refuses, and which versions it
knows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager

import ckptstore
from ckptstore.interop.torchtitan import NoCheckpoint, StoreCheckpointManager
from tests.trainers.torchtitan_parts import Training

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
"""torchdata 0.11 calls the first, torchtitan the second, torch itself the others."""


def test_the_directories_are_pointers_that_any_tool_can_follow(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(2)
    training.close()
    pointer = tmp_path / "checkpoint" / "step-2"
    assert (pointer / ".metadata").is_file()
    with ckptstore.open_pointer(pointer) as snapshot:
        weight = snapshot.read("model/weight")
        assert snapshot.keys() == [
            "train_state", "model", "optimizer", "dataloader", "lr_scheduler", "random"
        ]  # fmt: skip
    assert torch.equal(weight, training.model.weight)


def test_a_step_is_loaded_by_its_number(tmp_path: Path) -> None:
    training = Training(tmp_path, keep_latest_k=0)
    training.train(6)
    training.close()
    again = Training(tmp_path)
    assert again.manager.load(step=4)
    assert again.progress.step == 4
    with pytest.raises(FileNotFoundError, match="load_step=5") as missing:
        again.manager.load(step=5)
    assert isinstance(missing.value, NoCheckpoint | ckptstore.NotFound)
    again.close()


def test_load_only_and_disabled_managers_save_nothing(tmp_path: Path) -> None:
    training = Training(tmp_path, load_only=True)
    training.train(4)
    assert training.manager.store.log() == []
    training.close()
    off = StoreCheckpointManager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path / "off"),
    )
    assert not off.load() and not off.save(10)
    off.close()
    assert not (tmp_path / "off").exists()


def test_a_run_begun_with_dcp_goes_on_with_commits(tmp_path: Path, world: None) -> None:
    first = Training(tmp_path, manager=CheckpointManager, last_save_model_only=False)
    first.train(4)
    first.close()
    second = Training(tmp_path)
    assert second.manager.load()
    assert second.progress.step == 4
    second.train(6)
    second.close()
    third = Training(tmp_path)
    assert third.manager.load() and third.progress.step == 6
    third.close()


def test_another_training_starts_from_a_pointer_or_from_dcp(tmp_path: Path, world: None) -> None:
    pre = Training(tmp_path / "pre")
    pre.train(4)
    pre.close()
    dcp.save(pre.model.state_dict(), checkpoint_id=tmp_path / "dcp")
    for place in (tmp_path / "pre" / "checkpoint" / "step-4", tmp_path / "dcp"):
        tune = Training(tmp_path / f"tune-{place.name}", initial_load_path=str(place))
        assert tune.manager.load()
        assert torch.equal(tune.model.weight, pre.model.weight)
        assert tune.progress.step == 0
        tune.close()
    with pytest.raises(ValueError, match="is not a directory"):
        Training(tmp_path / "x", initial_load_path=str(tmp_path / "none")).manager.load()


class Adapter:
    """As torchtitan's adapters to the names of Hugging Face."""

    def __init__(self, files: dict[str, int] | None = None) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = files, None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return dcp.HuggingFaceStorageReader(path)


@pytest.mark.parametrize("files", [None, {"hf.weight": 1, "hf.bias": 2}])
def test_the_last_step_is_exported_for_hugging_face_and_read_back(
    tmp_path: Path, files: dict[str, int] | None, world: None
) -> None:
    training = Training(tmp_path, adapter=Adapter(files), last_save_in_hf=True)
    training.manager.save(3, last_step=True)
    training.close()
    exported = tmp_path / "checkpoint" / "step-3"
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"hf.weight", "hf.bias"}
    assert len(set(index["weight_map"].values())) == len(files or "1")
    assert not (exported / "sharded").exists()
    with ckptstore.open_pointer(exported) as snapshot:
        assert torch.equal(snapshot.read("model/weight"), training.model.weight)
    tune = Training(
        tmp_path / "tune",
        adapter=Adapter(files),
        initial_load_in_hf=True,
        initial_load_path=str(exported),
    )
    assert tune.manager.load()
    assert torch.equal(tune.model.weight, training.model.weight)
    tune.close()


def test_another_number_of_data_parallel_ranks_is_refused_with_the_way_on(tmp_path: Path) -> None:
    training = Training(tmp_path, rank=0, ranks=2)
    training.train(2)
    training.close()
    for rank, ranks in ((0, 4), (1, 4), (0, 1)):
        again = Training(tmp_path, rank=rank, ranks=ranks)
        before = again.model.weight.detach().clone()
        with pytest.raises(ckptstore.InvalidInput, match=r"exclude_from_loading=\['dataloader'\]"):
            again.manager.load()
        assert torch.equal(again.model.weight, before)
        again.close()
    anew = Training(tmp_path, rank=3, ranks=4, exclude_from_loading=["dataloader"])
    assert anew.manager.load()
    assert anew.progress.step == 2
    anew.close()


def test_another_model_is_refused_and_unchanged(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(2)
    training.close()
    for model, wanted in (
        (nn.Sequential(nn.Linear(16, 128)), "another model or optimizer"),
        (nn.Linear(16, 64), "float32"),
    ):
        other = Training(tmp_path, model)
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(ckptstore.InvalidInput, match=wanted):
            other.manager.load()
        assert all(map(torch.equal, before, model.parameters()))
        other.close()


class Split(nn.Linear):
    """Its state dict has other tensors than its parameters, as torchtitan's fused projections."""

    def _save_to_state_dict(self, found: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        found[f"{prefix}upper"], found[f"{prefix}lower"] = self.weight.detach() * 2, self.bias * 1

    def _load_from_state_dict(self, found: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight.copy_(found[f"{prefix}upper"] / 2)
        self.bias.copy_(found[f"{prefix}lower"])


def test_tensors_that_only_the_state_dict_has_come_back(tmp_path: Path) -> None:
    training = Training(tmp_path, Split(16, 128))
    training.train(4)
    training.close()
    again = Training(tmp_path, Split(16, 128))
    assert again.manager.load()
    assert torch.equal(again.model.weight, training.model.weight)
    assert torch.equal(again.model.bias, training.model.bias)
    again.train(6)
    again.close()


def test_trainings_share_a_store_in_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        training = Training(tmp_path / name, store=str(tmp_path / "shared"), run=name)
        assert not training.manager.load()
        training.train(2)
        training.close()
    with ckptstore.open(tmp_path / "shared", read_only=True) as store:
        assert sorted(store.runs()) == ["a", "b"]


def test_a_configuration_that_cannot_work_is_refused() -> None:
    make = StoreCheckpointManager.Config
    assert make(keep_latest_k=1).keep_latest_k == 1
    assert make(async_mode="ASYNC_WITH_PINNED_MEM").async_mode == "async_with_pinned_mem"
    for options in ({"keep_latest_k": -1}, {"async_mode": "sometimes"}, {"interval": 0}):
        with pytest.raises(ValueError, match=r"keep_latest_k|async_mode|interval"):
            make(**options)


def test_the_contract_of_later_managers_is_kept_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainers.torchtitan_later", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["step-10", "step-11", "step-4", "step-8"]


def test_the_example_runs_as_it_is() -> None:
    example = Path(__file__).parents[2] / "examples" / "trainers" / "torchtitan_loop.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "goes on from step 12" in done.stdout


@pytest.mark.parametrize(
    ("checkpointer", "said"),
    [
        ("", "needs torchtitan 0.3.0 or newer"),
        (
            "class BaseCheckpointManager:\n"
            "    __abstractmethods__ = frozenset({'store_all'})\n"
            "class ModelWrapper: pass\n"
            "DATALOADER = LR_SCHEDULER = MODEL = OPTIMIZER = ''\n",
            "does not know",
        ),
    ],
)
def test_a_version_that_is_not_supported_is_named(
    tmp_path: Path, checkpointer: str, said: str
) -> None:
    package = tmp_path / "torchtitan" / "components"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package.parent / "config.py").write_text("TORCH_DTYPE_MAP = {}\n")
    (package / "__init__.py").touch()
    (package / "checkpointer.py").write_text(checkpointer)
    done = subprocess.run(
        [sys.executable, "-c", "import ckptstore.interop.torchtitan"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "ImportError" in done.stderr and said in done.stderr


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """torchtitan's own manager asks for its rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
