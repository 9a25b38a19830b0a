"""The manager that commits values: its saves, its loads, and checkpoints of the other manager."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing import CheckpointManager as TheirManager
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec

import ckptstore
from ckptstore import Async
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NoSpace
from ckptstore.plugins.torch_checkpointing import CheckpointManager, StoreStorageConfig
from tests.support.faults import Faults

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((50_000,), value), "same": torch.arange(100_000.0)},
        "step": int(value),
    }


def zeros() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(50_000), "same": torch.zeros(100_000)}, "step": 0}


@pytest.fixture
def config(tmp_path: Path) -> StoreStorageConfig:
    return StoreStorageConfig(str(tmp_path / "store"))


@pytest.fixture
def manager(config: StoreStorageConfig) -> Iterator[CheckpointManager]:
    made = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=config).build()
    yield made
    made.close()


@pytest.fixture
def theirs(config: StoreStorageConfig) -> Iterator[TheirManager]:
    made = TheirManager.Config(save=SyncCheckpointSaverConfig(), storage_config=config).build()
    yield made
    made.close()


def test_a_save_commits_the_values_and_a_load_fills_them_in_place(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    assert manager.save("/ck/step_1", state(1.0)) is None
    manager.save("/ck/step_2", state(2.0))
    into = zeros()
    weight = into["model"]["weight"]
    loaded = manager.load("/ck/step_1", into)
    assert loaded["model"]["weight"] is weight
    assert torch.equal(weight, state(1.0)["model"]["weight"])
    assert loaded["step"] == 1
    with ckptstore.open(tmp_path / "store", read_only=True) as store:
        second, first = store.log()
        assert (first.step, second.step) == (1, 2)
        saved = store.checkout("files/ck/step_2")
        assert saved.keys() == ["model", "step"]
        assert saved.new_bytes < 300_000, "the tensor that did not change was written again"
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("background", [None, Async(executor="process"), Async(staging="lazy")])
def test_a_save_in_the_background_has_the_state_as_of_the_call(
    config: StoreStorageConfig, background: Async | None
) -> None:
    manager = CheckpointManager.Config(storage_config=config, background=background).build()
    live = state(1.0)
    future = manager.save("/ck/step_1", live)
    with manager.lock():
        live["model"]["weight"].fill_(9.0)
    assert isinstance(future, Future)
    future.result(timeout=600)
    into = zeros()
    manager.load("/ck/step_1", into)
    manager.close()
    assert torch.equal(into["model"]["weight"], state(1.0)["model"]["weight"])


def test_only_what_a_target_has_is_loaded(manager: CheckpointManager) -> None:
    manager.save("/ck/step_1", {**state(1.0), "optimizer": {"state": {0: {"m": torch.ones(3)}}}})
    into = {"model": {"weight": torch.zeros(50_000), "lora": torch.ones(2)}, "optimizer": None}
    loaded = manager.load("/ck/step_1", into)
    assert set(into["model"]) == {"weight", "lora"}
    assert torch.equal(into["model"]["lora"], torch.ones(2))
    assert torch.equal(loaded["optimizer"]["state"][0]["m"], torch.ones(3))
    moments = {"optimizer": {"state": {0: {"m": torch.zeros(3)}}}}
    manager.load("/ck/step_1", moments)
    assert torch.equal(moments["optimizer"]["state"][0]["m"], torch.ones(3))
    with pytest.raises(RuntimeError, match="model/lora"):
        manager.load("/ck/step_1", into, strict=True)
    with pytest.raises(FileNotFoundError, match="no item scheduler; it has model, step"):
        manager.load("/ck/step_1", {"scheduler": {}})
    with pytest.raises(FileNotFoundError):
        manager.load("/ck/step_7", zeros())
    with pytest.raises(InvalidInput, match="the target has float32"):
        manager.load("/ck/step_1", {"model": {"weight": torch.zeros(5)}})
    with pytest.raises(ValueError, match="requires into="):
        manager.load("/ck/step_1")


def test_a_checkpoint_is_never_replaced(manager: CheckpointManager, theirs: TheirManager) -> None:
    manager.save("/ck/step_1", state(1.0))
    theirs.save("/ck/step_2", state(2.0))
    for name in ("/ck/step_1", "/ck/step_2", "/ck"):
        with pytest.raises(FileExistsError):
            manager.save(name, state(3.0))
    with pytest.raises(FileExistsError):
        theirs.save("/ck/step_1", state(3.0))
    for step in (1, 2):
        into = zeros()
        assert manager.load(f"/ck/step_{step}", into)["step"] == step
        assert torch.equal(into["model"]["weight"], torch.full((50_000,), float(step)))


def test_their_manager_refuses_values_in_words(
    manager: CheckpointManager, theirs: TheirManager
) -> None:
    manager.save("/ck/step_1", state(1.0))
    with pytest.raises(InvalidInput, match="ckptstore's CheckpointManager"):
        theirs.load("/ck/step_1", zeros())


@pytest.mark.pickles
def test_directories_on_the_disk_are_loaded(manager: CheckpointManager, tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    for key, value in state(1.0).items():
        torch.save(value, folder / f"{key}_0.pt")
    into = zeros()
    assert manager.load(str(folder), into)["step"] == 1
    assert torch.equal(into["model"]["weight"], state(1.0)["model"]["weight"])
    with pytest.raises(FileExistsError):
        manager.save(str(folder), state(2.0))


@pytest.mark.parametrize("asked", [False, True])
def test_a_save_that_failed_is_raised_once_and_its_name_is_free(
    config: StoreStorageConfig, asked: bool
) -> None:
    calls: list[str] = []

    def finalize(args: Any) -> None:
        calls.append(args.path)

    manager = CheckpointManager.Config(storage_config=config, finalize_callback=finalize).build()
    bad = {"model": {"weight": torch.ones(3), "odd": object()}}
    with pytest.raises(InvalidInput, match="model/odd"):
        manager.save("/ck/step_1", bad)
    future = manager.save("/ck/step_1", state(1.0))
    assert future is not None
    future.result(timeout=600)
    assert calls == ["/ck/step_1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptstore.commit.pending.Pending.succeed", lambda self, _: self.fail(_full))
        failed = manager.save("/ck/other_2", state(2.0))
        assert failed is not None
        error = Future.exception(failed, timeout=600)  # past `seen`
    assert isinstance(error, NoSpace)
    if asked:
        with pytest.raises(NoSpace):
            failed.result()
    else:
        with pytest.raises(NoSpace):
            manager.save("/ck/step_3", state(3.0))
    again = manager.save("/ck/step_3", state(3.0))
    assert again is not None
    again.result(timeout=600)
    into = zeros()
    assert manager.load("/ck/step_3", into)["step"] == 3
    manager.close()


_full = NoSpace("the disk is full")


@pytest.mark.parametrize("error", [NoSpace("the disk is full"), Corrupt("look at it")], ids=repr)
def test_a_save_goes_on_after_one_that_failed_where_that_passes(
    config: StoreStorageConfig, monkeypatch: pytest.MonkeyPatch, error: CkptStoreError
) -> None:
    background = Async(on_error="warn", retry_s=0)
    manager = CheckpointManager.Config(storage_config=config, background=background).build()
    first = manager.save("/ck/step_1", state(1.0))
    assert first is not None and first.result(timeout=600)
    assert manager._store is not None
    faults = Faults(manager._store, monkeypatch)
    faults.error = error
    failed = manager.save("/ck/step_2", state(2.0))
    assert failed is not None
    assert type(Future.exception(failed, timeout=600)) is type(error)  # past `seen`
    faults.error = None
    if isinstance(error, Corrupt):
        with pytest.raises(Corrupt, match="look at it"):
            manager.save("/ck/step_3", state(3.0))
    else:
        assert manager.save("/ck/step_3", state(3.0)) is not None
    assert manager.save("/ck/step_4", state(4.0)) is not None
    manager.close()
    with ckptstore.open(config.store) as store:
        assert [info.step for info in store.log()] == [4, 3, 1]


def test_a_load_refuses_bits_that_turned(
    manager: CheckpointManager, config: StoreStorageConfig, tmp_path: Path
) -> None:
    manager.save("/ck/step_1", state(1.0))
    for pack in sorted((tmp_path / "store" / "packs").rglob("*")):
        if pack.is_file() and pack.stat().st_size > 100_000:
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o644)
            pack.write_bytes(data)
    again = CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(), storage_config=config
    ).build()
    with pytest.raises(Corrupt):
        again.load("/ck/step_1", zeros())
    again.close()


def test_what_is_about_files_is_refused(config: StoreStorageConfig) -> None:
    layout = LayoutInfo("meta.json", JsonSerialization(None))
    for wrong, match in (
        ({"items": {"meta": ItemSpec(layout=layout)}}, "meta has a layout"),
        ({"default": ItemSpec(layout=layout)}, "default has a layout"),
        ({"pre_finalize_callback": print}, "pre_finalize_callback"),
        ({"subprocess_init_fn": print}, "subprocess_init_fn"),
        ({"storage_config": None}, "wanted a StoreStorageConfig"),
    ):
        with pytest.raises(InvalidInput, match=match):
            CheckpointManager.Config(**{"storage_config": config, **wrong}).build()
    for save in (SyncCheckpointSaverConfig(), AsyncCheckpointSaverConfig()):
        items = {"model": ItemSpec(resharder=DefaultResharder())}
        CheckpointManager.Config(items=items, save=save, storage_config=config).build().close()
    assert isinstance(CheckpointManager.Config.with_sync_save(), CheckpointManager.Config)
    assert isinstance(CheckpointManager.Config.with_async_save(), CheckpointManager.Config)


def test_a_closed_manager_says_so(manager: CheckpointManager) -> None:
    manager.close()
    manager.close()
    for call in (manager.save, manager.load):
        with pytest.raises(RuntimeError, match="closed CheckpointManager"):
            call("/ck/step_1", zeros())
    with pytest.raises(RuntimeError, match="closed CheckpointManager"):
        manager.prewarm_staging(zeros())


def test_ranks_save_one_tensor_and_load_it_otherwise_divided(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainers.torch_checkpointing_ranks"]
    rendezvous, place = f"file://{tmp_path}/rendezvous", str(tmp_path / "store")
    ranks = [subprocess.Popen([*command, str(rank), "2", rendezvous, place]) for rank in range(2)]
    assert [rank.wait(timeout=900) for rank in ranks] == [0, 0]
    config = CheckpointManager.Config(storage_config=StoreStorageConfig(place))
    manager = config.build()
    whole = manager.load("/ck/sync_1", {"model": None, "step": None})
    assert torch.equal(whole["model"]["w"], torch.arange(6000.0).reshape(60, 100))
    assert whole["step"] == 3
    manager.close()


_KILLED = """
import sys
import torch
from torch_checkpointing.config import SyncCheckpointSaverConfig
from ckptstore.plugins.torch_checkpointing import CheckpointManager, StoreStorageConfig
manager = CheckpointManager.Config(
    save=SyncCheckpointSaverConfig(), storage_config=StoreStorageConfig(sys.argv[1])
).build()
print("ready", flush=True)
for step in range(1, 1000):
    manager.save(f"/ck/step_{step}", {"model": {"w": torch.full((400_000,), float(step))}})
    print(step, flush=True)
"""


@pytest.mark.parametrize("saves", [0, 2])
def test_a_killed_save_leaves_whole_checkpoints(
    config: StoreStorageConfig, manager: CheckpointManager, saves: int
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, config.store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for _ in range(saves + 1):
            assert trainer.stdout.readline()
        trainer.send_signal(signal.SIGKILL)
        said = trainer.stdout.read().split()
    storage = config.create_storage()
    names = set(storage.ls(Path("/ck"))) if storage.exists(Path("/ck")) else set()
    assert names >= {f"step_{step}" for step in (*range(1, saves + 1), *said)}
    for name in names:
        step = float(name.removeprefix("step_"))
        into = {"model": {"w": torch.zeros(400_000)}}
        manager.load(f"/ck/{name}", into)
        assert torch.equal(into["model"]["w"], torch.full((400_000,), step))
    after = f"/ck/step_{len(names) + 1}"
    manager.save(after, {"model": {"w": torch.ones(4)}})
    assert torch.equal(manager.load(after, {"model": None})["model"]["w"], torch.ones(4))
