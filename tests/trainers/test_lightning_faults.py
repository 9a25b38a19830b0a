"""Asynchronous saves of Lightning's plugin, damaged checkpoints, retention, and Fabric."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringDataModule

import ckptstore
from ckptstore import Corrupt, InvalidInput, KeepBest, KeepLast, Storage
from ckptstore.interop.lightning import (
    AsyncStoreCheckpointIO,
    StoreCheckpointIO,
    StoreModelCheckpoint,
)
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.store import Store
from tests.trainers.lightning_cases import (
    KINDS,
    ROOT,
    Begins,
    Model,
    Odd,
    files,
    fitted,
    saver,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore")
"""Lightning warns of few workers, empty loggers and the like."""


# -- asynchronous saves --


class Stuck(AsyncStoreCheckpointIO):
    """Publishes when it is told to, and fails if it is told so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told = threading.Event()
        self.error: Exception | None = None

    def _publish(self, place: str, snapshot: Any) -> None:
        assert self.told.wait(60)
        if self.error:
            raise self.error
        super()._publish(place, snapshot)


def test_a_removal_waits_for_the_save_before_it(tmp_path: Path) -> None:
    plugin = Stuck(tmp_path / "store")
    plugin.told.set()
    weights = torch.ones(1_000)
    plugin.save_checkpoint({"state_dict": {"w": weights}}, tmp_path / "a.ckpt")
    plugin._settle()
    plugin.told.clear()
    plugin.save_checkpoint({"state_dict": {"w": weights}}, tmp_path / "b.ckpt")
    weights.zero_()
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists() and not (tmp_path / "b.ckpt").exists()
    plugin.told.set()
    assert plugin.load_checkpoint(tmp_path / "b.ckpt")["state_dict"]["w"].min() == 1
    assert not (tmp_path / "a.ckpt").exists()
    plugin.teardown()


@pytest.mark.oldest
def test_a_failed_save_keeps_the_one_before_and_reaches_the_loop(tmp_path: Path) -> None:
    plugin = Stuck(tmp_path / "store")
    plugin.told.set()
    run = trainer(tmp_path, plugin, callbacks=[saver(tmp_path, save_last=False)])

    class Breaks(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                plugin._settle()
                plugin.error = ckptstore.NoSpace("the disk is full")

    run.callbacks.insert(0, Breaks())
    with pytest.raises(ckptstore.NoSpace, match="the disk is full"):
        run.fit(Model(), BoringDataModule())
    assert files(tmp_path) == ["epoch=1.ckpt"]
    plugin.error = None
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "later.ckpt")
    plugin.teardown()
    assert is_pointer(tmp_path / "later.ckpt")


class Slow(Stuck):
    """Begins each removal when it is told to."""

    begins: threading.Event

    def _do(self, act: Any, args: tuple[Any, ...]) -> None:
        if act == self._remove:
            assert self.begins.wait(60)
        super()._do(act, args)


def test_a_removal_that_has_not_begun_is_left_out_when_the_failure_is_raised(
    tmp_path: Path,
) -> None:
    plugin = Slow(tmp_path / "store")
    plugin.begins = threading.Event()
    plugin.told.set()
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    plugin._settle()
    plugin.error = ckptstore.NoSpace("the disk is full")
    plugin.told.clear()
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    plugin.told.set()
    while plugin._failed is None:
        time.sleep(0.01)
    threading.Timer(0.3, plugin.begins.set).start()
    with pytest.raises(ckptstore.NoSpace):
        plugin.save_checkpoint({"state_dict": {}}, tmp_path / "c.ckpt")
    plugin.teardown()
    assert is_pointer(tmp_path / "a.ckpt")


def test_a_value_that_cannot_be_stored_fails_in_the_call(tmp_path: Path) -> None:
    plugin = AsyncStoreCheckpointIO(tmp_path / "store")
    with pytest.raises(InvalidInput, match="odd"):
        plugin.save_checkpoint({"odd": Odd()}, tmp_path / "a.ckpt")
    plugin.teardown()


def test_a_checkpoint_for_a_requeued_job_is_durable_at_once(tmp_path: Path) -> None:
    plugin = AsyncStoreCheckpointIO(tmp_path / "store")
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "hpc_ckpt_1.ckpt")
    assert is_pointer(tmp_path / "hpc_ckpt_1.ckpt")
    plugin.teardown()


# -- damage --


def damage_newest(store: Path, how: str) -> None:
    """Damage the newest pack that has weights."""
    packs = [path for path in (store / "packs").rglob("*") if path.is_file()]
    newest = max((path for path in packs if path.stat().st_size > 1 << 16), key=os.path.getmtime)
    os.chmod(newest, 0o644)
    data = bytearray(newest.read_bytes())
    if how == "truncated":
        newest.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 3] ^= 4
        newest.write_bytes(data)
    else:
        newest.unlink()


@pytest.mark.parametrize(
    ("how", "top_k"),
    [("truncated", 1), ("flipped", -1), ("missing", 1), ("pointer", 1), ("empty pointer", -1)],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, top_k: int
) -> None:
    class Wide(Model):
        def __init__(self) -> None:
            super().__init__(width=3_000)

    callback = saver(tmp_path, save_top_k=top_k)
    run = trainer(tmp_path, StoreCheckpointIO(tmp_path / "store"), callbacks=[callback])
    run.fit(Wide(), BoringDataModule())
    last = tmp_path / "ckpt" / "last.ckpt"
    if "pointer" in how:
        last.write_bytes(last.read_bytes()[: 0 if "empty" in how else 30])
    else:
        damage_newest(tmp_path / "store", how)
    again = trainer(
        tmp_path,
        StoreCheckpointIO(tmp_path / "store"),
        max_epochs=6,
        callbacks=[saver(tmp_path, save_top_k=top_k), Begins()],
    )
    again.fit(Wide(), BoringDataModule(), ckpt_path="last")
    assert Begins.steps == [12 if "pointer" in how else 9]
    assert again.global_step == 18
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any(str(last) in record.getMessage() for record in said)
    assert is_pointer(last)


def test_a_damaged_commit_that_was_named_is_an_error(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    for step in (1, 2):
        state = {"state_dict": {"w": torch.randn(400_000)}, "loops": {}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
    plugin.teardown()
    damage_newest(tmp_path / "store", "flipped")
    with pytest.raises(Corrupt):
        plugin.load_checkpoint(tmp_path / "2.ckpt")
    with pytest.raises(Corrupt):
        plugin.load_checkpoint("2")
    assert plugin.load_checkpoint("latest")["global_step"] == 1
    plugin.teardown()


def test_a_last_checkpoint_in_another_store_is_found_there(tmp_path: Path) -> None:
    first, second = (StoreCheckpointIO(tmp_path / name) for name in ("one", "two"))
    first.save_checkpoint({"loops": {}, "global_step": 4}, tmp_path / "last.ckpt")
    assert second.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 4
    second.save_checkpoint({"loops": {}, "global_step": 5}, tmp_path / "last.ckpt")
    assert second.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5
    first.teardown()
    second.teardown()


def test_checkpoints_of_other_directories_are_never_resumed(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    for step, folder in enumerate("ab"):
        state = {"state_dict": {"w": torch.randn(400_000)}, "loops": {}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / folder / "last.ckpt")
    plugin.teardown()
    damage_newest(tmp_path / "store", "flipped")
    with pytest.raises(Corrupt, match="none of the 1 checkpoints"):
        plugin.load_checkpoint(tmp_path / "b" / "last.ckpt")
    plugin.teardown()


@pytest.mark.parametrize("linked", ["store", "ckpt"])
def test_what_lies_behind_a_link_is_forgotten_and_resumed_as_any_other(
    linked: str, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / linked).symlink_to("disk")
    plugin = StoreCheckpointIO(tmp_path / "store" / "of_run")
    for step in range(4):
        state = {"state_dict": {"w": torch.randn(400_000)}, "loops": {}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / "ckpt" / "last.ckpt")
    assert [info.step for info in plugin.store.log()] == [3, 2]
    plugin.teardown()
    damage_newest(tmp_path / "store" / "of_run", "flipped")
    assert plugin.load_checkpoint(tmp_path / "ckpt" / "last.ckpt")["global_step"] == 2
    plugin.teardown()


# -- retention of the store's own --


class Behind(AsyncStoreCheckpointIO):
    """Publishes, and retains, when all commits of the training are durable."""

    def _begin(self) -> None:
        super()._begin()
        self.over = threading.Event()

    def _do(self, act: Any, args: tuple[Any, ...]) -> None:
        assert self.over.wait(60)
        super()._do(act, args)

    def _drain(self) -> None:
        self.over.set()
        super()._drain()


RETAINING = (*KINDS, Behind)


@pytest.mark.parametrize("kind", RETAINING)
def test_the_stores_retention_decides_what_stays(tmp_path: Path, store: Store, kind: Any) -> None:
    callback = StoreModelCheckpoint(
        dirpath=tmp_path / "ckpt",
        filename="{step}",
        monitor="score",
        mode="max",
        save_last=True,
        every_n_train_steps=1,
        keep=[KeepLast(3)],
    )
    run = fitted(tmp_path, kind(tmp_path / "store"), callback, max_epochs=4)
    assert files(tmp_path) == [
        "last.ckpt",
        "step=10.ckpt",
        "step=11.ckpt",
        "step=12.ckpt",
        "step=6.ckpt",
    ]
    found = store.checkout("latest")
    assert {"loss", "val_loss", "score"} <= found.metrics.keys()
    assert store.checkout("best:score:max").id == read_pointer(callback.best_model_path).id
    assert run.global_step == 12


@pytest.mark.parametrize("kind", RETAINING)
def test_saves_before_the_first_validation_all_stay_until_its_metric_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    callback = StoreModelCheckpoint(
        dirpath=tmp_path / "ckpt",
        filename="{step}",
        every_n_train_steps=1,
        keep=[KeepLast(2), KeepBest("val_loss")],
    )
    plugin = kind(tmp_path / "store")
    fitted(tmp_path, plugin, callback, max_epochs=2, limit_train_batches=4)
    if kind is StoreCheckpointIO:  # one that is behind may look when the metric is there
        assert "no commit has the metric 'val_loss'" in caplog.text
    assert files(tmp_path) == ["step=7.ckpt", "step=8.ckpt"]


def test_retention_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="save_top_k"):
        StoreModelCheckpoint(keep=KeepLast(2), save_top_k=3)
    with pytest.raises(InvalidInput, match="wanted policies"):
        StoreModelCheckpoint(keep=[3])
    callback = StoreModelCheckpoint(dirpath=tmp_path / "ckpt", keep=KeepLast(2))
    with pytest.raises(InvalidInput, match="needs the store's plugin"):
        fitted(tmp_path, None, callback)


# -- Fabric --


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.oldest
def test_fabric_saves_and_loads(tmp_path: Path, store: Store, kind: Any) -> None:
    plugin = kind(tmp_path / "store")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(4, 3)
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": module, "optimizer": optimizer, "step": 7}
    with plugin.labels(metrics={"loss": 0.5}, tag="good"):
        fabric.save(tmp_path / "a.ckpt", state)
    weights = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    state["step"] = 0
    fabric.load(tmp_path / "a.ckpt", state)
    assert torch.equal(model.weight, weights) and state["step"] == 7
    found = store.checkout("good")
    assert (found.step, found.metrics) == (7, {"loss": 0.5})
    plugin.teardown()


@pytest.mark.oldest
def test_older_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning

    from ckptstore.interop.lightning import packages

    monkeypatch.setattr(lightning, "__version__", "2.1.4")
    packages.fabrics.cache_clear()
    with pytest.raises(ImportError, match=r"2\.1\.4"):
        StoreCheckpointIO("checkpoints")
    packages.fabrics.cache_clear()


def test_a_store_makes_room_on_a_full_disk_unless_told_otherwise(tmp_path: Path) -> None:
    assert StoreCheckpointIO(tmp_path)._options["storage"] == Storage(on_full="gc")
    chosen = Storage(codec="zstd")
    assert StoreCheckpointIO(tmp_path, storage=chosen)._options["storage"] == chosen


def test_the_example_runs_as_it_is() -> None:
    example = ROOT / "examples" / "trainers" / "train_with_lightning.py"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained to step 80" in done.stdout
