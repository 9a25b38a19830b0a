"""Lightning's Trainer and Fabric on a store: what users see of files, what `ModelCheckpoint` does
with them, what fails and how."""

import argparse
import copy
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import ckptstore
from ckptstore import Conflict, Corrupt, InvalidInput, KeepLast, NotFound, Storage
from ckptstore.interop.lightning import (
    AsyncStoreCheckpointIO,
    StoreCheckpointIO,
    StoreModelCheckpoint,
)
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")
"""Lightning warns of few workers, empty loggers and the like."""

ROOT = Path(__file__).parents[2]
KINDS = [StoreCheckpointIO, AsyncStoreCheckpointIO]


class Model(BoringModel):  # type: ignore[misc]
    def __init__(self, width: int = 2, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(32, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"])
        self.log("score", -float(abs(self.current_epoch - 1)))
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1 / (1 + self.global_step))


class Begins(pl.Callback):  # type: ignore[misc]
    """Notes the step at which a training begins."""

    steps: ClassVar[list[int]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps[:] = [trainer.global_step]


def trainer(tmp_path: Path, plugin: Any, **options: Any) -> Any:
    given = {
        "accelerator": "cpu",
        "max_epochs": 4,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "plugins": [plugin] if plugin else [],
    }
    return pl.Trainer(**(given | options))


def saver(tmp_path: Path, **options: Any) -> Any:
    given = {"dirpath": tmp_path / "ckpt", "filename": "{epoch}", "save_last": True}
    return ModelCheckpoint(**(given | options))


def fitted(tmp_path: Path, plugin: Any, callback: Any, **options: Any) -> Any:
    run = trainer(tmp_path, plugin, callbacks=[callback], **options)
    run.fit(Model(), BoringDataModule())
    return run


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "ckpt").iterdir())


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_and_last_are_pointers_and_cost_one_copy(
    tmp_path: Path, opened: Store, kind: Any
) -> None:
    callback = saver(tmp_path, monitor="val_loss", save_top_k=2)
    run = fitted(tmp_path, kind(tmp_path / "store"), callback)
    assert files(tmp_path) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert all(is_pointer(tmp_path / "ckpt" / name) for name in files(tmp_path))
    assert run.strategy.checkpoint_io._opened is None, "closed at the end of fit"
    best = opened.checkout("best:val_loss")
    assert best.id == read_pointer(callback.best_model_path).id
    assert best.metrics["val_loss"] == pytest.approx(float(callback.best_model_score))
    state = opened.checkout("latest").state_dict()
    assert state["global_step"] == run.global_step == opened.checkout("latest").step == 12
    for name, tensor in run.lightning_module.state_dict().items():
        assert torch.equal(state["state_dict"][name], tensor)
    assert not opened.fsck(read_data="100%").damaged


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_what_lightnings_own_plugin_loads(tmp_path: Path, kind: Any) -> None:
    run = fitted(tmp_path, kind(tmp_path / "store"), saver(tmp_path))
    run.save_checkpoint(tmp_path / "ours.ckpt")
    ours = run.strategy.checkpoint_io.load_checkpoint(tmp_path / "ours.ckpt")
    run.strategy.checkpoint_io = TorchCheckpointIO()
    run.save_checkpoint(tmp_path / "theirs.ckpt")
    theirs = run.strategy.checkpoint_io.load_checkpoint(
        tmp_path / "theirs.ckpt", weights_only=False
    )
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0) if key in (
            "state_dict",
            "optimizer_states",
        ) else None
        assert key in ("state_dict", "optimizer_states") or repr(ours[key]) == repr(theirs[key])


@pytest.mark.parametrize("name", ["last", "best", "path", "ref", "latest", "step"])
def test_a_training_goes_on_from_any_name(tmp_path: Path, name: str) -> None:
    kind = AsyncStoreCheckpointIO if name in ("last", "ref") else StoreCheckpointIO
    callback = saver(tmp_path, monitor="score", mode="max", save_top_k=-1)
    fitted(tmp_path, kind(tmp_path / "store"), callback)
    again = trainer(
        tmp_path, kind(tmp_path / "store"), callbacks=[callback, Begins()], max_epochs=6
    )
    path = {"path": tmp_path / "ckpt" / "last.ckpt", "ref": "best:score:max", "step": "9"}
    again.fit(Model(), BoringDataModule(), ckpt_path=path.get(name, name))
    assert Begins.steps == [{"best": 6, "ref": 6, "step": 9}.get(name, 12)]
    with ckptstore.open(tmp_path / "store") as store:
        assert store.checkout("latest").step == again.global_step == 18


def test_the_parent_of_a_resumed_training_is_the_commit_it_resumed(
    tmp_path: Path, opened: Store
) -> None:
    callback = saver(tmp_path, save_top_k=-1, save_last=False)
    fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), callback)
    second = opened.checkout(6)
    again = trainer(tmp_path, StoreCheckpointIO(tmp_path / "store"), max_epochs=3, callbacks=[])
    again.fit(Model(), BoringDataModule(), ckpt_path=str(tmp_path / "ckpt" / "epoch=1.ckpt"))
    again.save_checkpoint(tmp_path / "again.ckpt")
    assert opened.checkout(tmp_path / "again.ckpt").step == 9
    assert second.id == read_pointer(tmp_path / "ckpt" / "epoch=1.ckpt").id


def test_a_link_to_the_last_costs_nothing_and_resumes(tmp_path: Path, opened: Store) -> None:
    fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), saver(tmp_path, save_last="link"))
    assert (tmp_path / "ckpt" / "last.ckpt").is_symlink()
    assert len(opened.log()) + len(opened.forgotten()) == 4
    again = trainer(tmp_path, StoreCheckpointIO(tmp_path / "store"), max_epochs=5)
    again.fit(Model(), BoringDataModule(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert again.global_step == 15


def test_files_of_torch_save_are_read_and_replaced(tmp_path: Path, opened: Store) -> None:
    fitted(tmp_path, None, saver(tmp_path))
    assert not is_pointer(tmp_path / "ckpt" / "last.ckpt")
    callback = saver(tmp_path)
    again = trainer(
        tmp_path, StoreCheckpointIO(tmp_path / "store"), callbacks=[callback], max_epochs=6
    )
    again.fit(Model(), BoringDataModule(), ckpt_path="last")
    assert again.global_step == 18 and is_pointer(tmp_path / "ckpt" / "last.ckpt")
    assert opened.checkout(tmp_path / "ckpt" / "last.ckpt").step == 18


@pytest.mark.pickles
def test_load_from_checkpoint_takes_pointers_and_snapshots(tmp_path: Path, opened: Store) -> None:
    run = fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), saver(tmp_path, save_last="link"))
    for source in (
        run.checkpoint_callback.best_model_path,
        tmp_path / "ckpt" / "last.ckpt",
        opened.checkout("latest"),
    ):
        model = Model.load_from_checkpoint(source, map_location="cpu")
        assert torch.equal(model.layer.weight, run.lightning_module.layer.weight)
    torch.save(run._checkpoint_connector.dump_checkpoint(), tmp_path / "old.ckpt")
    assert Model.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=False).hparams.width == 2


def test_removed_checkpoints_are_forgotten_a_step_later_unless_tagged(
    tmp_path: Path, opened: Store
) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    run = trainer(tmp_path, plugin, callbacks=[saver(tmp_path, save_last=False)], max_epochs=6)

    class Tags(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                opened.tag("kept", "latest")

    run.callbacks.insert(0, Tags())
    run.fit(Model(), BoringDataModule())
    assert files(tmp_path) == ["epoch=5.ckpt"]
    assert [info.step for info in opened.log()] == [18, 15, 6]
    assert opened.checkout("kept").step == 6
    assert len(opened.forgotten()) == 3


def test_removing_a_directory_or_nothing_is_no_error(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    (tmp_path / "old.ckpt").write_bytes(b"PK file")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    plugin.remove_checkpoint(tmp_path / "nothing.ckpt")
    assert not (tmp_path / "old.ckpt").exists() and not (tmp_path / "store").exists()


def test_files_that_lightning_writes_for_itself_are_no_commits(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    for name in (".temp.ckpt", ".lr_find_1.ckpt", ".scale_batch_size_2.ckpt"):
        plugin.save_checkpoint({"a": torch.ones(2)}, tmp_path / name)
        assert torch.equal(plugin.load_checkpoint(tmp_path / name)["a"], torch.ones(2))
        plugin.remove_checkpoint(tmp_path / name)
        assert not (tmp_path / name).exists()
    assert not (tmp_path / "store").exists()


def test_names_that_are_nothing_say_so(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        plugin.load_checkpoint(tmp_path / "nothing.ckpt")
    with pytest.raises(NotFound):
        plugin.load_checkpoint("best:val_loss")
    with pytest.raises(InvalidInput, match="URL, where no pointer file can lie"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(Conflict, match="directory"):
        plugin.save_checkpoint({}, tmp_path / "folder.ckpt")
    with pytest.raises(InvalidInput, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"tags": "x"})
    with (
        ckptstore.open(tmp_path / "other") as other,
        pytest.raises(InvalidInput, match=r"store\.url"),
    ):
        StoreCheckpointIO(other)  # type: ignore[arg-type]


def test_labels_and_storage_options_describe_a_commit(tmp_path: Path, opened: Store) -> None:
    run = fitted(
        tmp_path,
        StoreCheckpointIO(tmp_path / "store"),
        saver(tmp_path, save_top_k=0, save_last=False),
    )
    run.save_checkpoint(
        tmp_path / "a.ckpt", storage_options={"tag": "good", "metrics": {"f1": 0.5}, "message": "m"}
    )
    found = opened.checkout("good")
    assert (found.metrics, found.step) == ({"f1": 0.5}, 12)
    assert found.message == f"m\n{tmp_path / 'a.ckpt'}"


# -- hyperparameters and other objects --


class Odd:
    value = 3


def test_hyperparameters_of_any_usual_class_come_back(tmp_path: Path) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    given = {
        "hyper_parameters": {"args": argparse.Namespace(lr=0.1, widths=[1, 2])},
        "hparams_type": argparse.Namespace,
        "state_dict": {},
    }
    plugin.save_checkpoint(dict(given), tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt") == given


def test_hyperparameters_of_omegaconf_come_back(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    model = Model(width=omegaconf.OmegaConf.create({"n": 3, "twice": "${n}"}).n)
    conf = omegaconf.OmegaConf.create({"n": 3, "twice": "${n}", "list": [1, 2]})
    model.hparams.clear()
    plugin = StoreCheckpointIO(tmp_path / "store")
    given = {"hyper_parameters": conf, "hparams_type": omegaconf.DictConfig, "state_dict": {}}
    plugin.save_checkpoint(dict(given), tmp_path / "a.ckpt")
    found = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert found == given and found["hyper_parameters"].twice == 3


@pytest.mark.pickles
def test_other_objects_are_refused_by_name_or_pickled(tmp_path: Path) -> None:
    given = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"odd": Odd()}}
    with pytest.raises(InvalidInput, match="hyper_parameters/odd"):
        StoreCheckpointIO(tmp_path / "store").save_checkpoint(given, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    plugin = StoreCheckpointIO(tmp_path / "store", allow_pickle=True)
    plugin.save_checkpoint(given, tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["odd"].value == 3
    careful = StoreCheckpointIO(tmp_path / "store")
    with pytest.raises(InvalidInput, match="allow_pickle"):
        careful.load_checkpoint(tmp_path / "a.ckpt")
    careful.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    with pytest.raises(InvalidInput, match="allow_pickle"):
        plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)


@pytest.mark.pickles
@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_is_pickled_without_its_store(tmp_path: Path, kind: Any) -> None:
    plugin = kind(tmp_path / "store", run="r")
    plugin.save_checkpoint({"state_dict": {}, "global_step": 3}, tmp_path / "a.ckpt")
    sent = pickle.loads(pickle.dumps(plugin))
    copied = copy.deepcopy(plugin)
    plugin.teardown()
    for other in (sent, copied):
        assert other.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 3
        assert other.store.run == "r"
        other.teardown()


# -- asynchronous saves --


class Stuck(AsyncStoreCheckpointIO):
    """Publishes when it is told to, and fails if it is told so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told = threading.Event()
        self.error: Exception | None = None

    def _publish(self, place: Path, snapshot: Any) -> None:
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


# -- retention of the store's own --


@pytest.mark.parametrize("kind", KINDS)
def test_the_stores_retention_decides_what_stays(tmp_path: Path, opened: Store, kind: Any) -> None:
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
    found = opened.checkout("latest")
    assert {"loss", "val_loss", "score"} <= found.metrics.keys()
    assert opened.checkout("best:score:max").id == read_pointer(callback.best_model_path).id
    assert run.global_step == 12


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
def test_fabric_saves_and_loads(tmp_path: Path, opened: Store, kind: Any) -> None:
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
    found = opened.checkout("good")
    assert (found.step, found.metrics) == (7, {"loss": 0.5})
    plugin.teardown()


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
