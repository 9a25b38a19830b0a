"""Lightning's Trainer and Fabric on a store: what users see of files, and what `ModelCheckpoint`
does with them."""

import argparse
import copy
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringDataModule

import ckptstore
from ckptstore import Conflict, InvalidInput, NotFound
from ckptstore.interop.lightning import (
    AsyncStoreCheckpointIO,
    StoreCheckpointIO,
)
from ckptstore.objects.pointer_files import is_pointer, read_pointer
from ckptstore.store import Store
from tests.trainers.lightning_cases import (
    KINDS,
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.oldest
def test_top_k_and_last_are_pointers_and_cost_one_copy(
    tmp_path: Path, store: Store, kind: Any
) -> None:
    callback = saver(tmp_path, monitor="val_loss", save_top_k=2)
    run = fitted(tmp_path, kind(tmp_path / "store"), callback)
    assert files(tmp_path) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert all(is_pointer(tmp_path / "ckpt" / name) for name in files(tmp_path))
    assert run.strategy.checkpoint_io._opened is None, "closed at the end of fit"
    best = store.checkout("best:val_loss")
    assert best.id == read_pointer(callback.best_model_path).id
    assert best.metrics["val_loss"] == pytest.approx(float(callback.best_model_score))
    state = store.checkout("latest").state_dict()
    assert state["global_step"] == run.global_step == store.checkout("latest").step == 12
    for name, tensor in run.lightning_module.state_dict().items():
        assert torch.equal(state["state_dict"][name], tensor)
    assert not store.fsck(read_data="100%").damaged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.oldest
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
@pytest.mark.oldest
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
    tmp_path: Path, store: Store
) -> None:
    callback = saver(tmp_path, save_top_k=-1, save_last=False)
    fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), callback)
    second = store.checkout(6)
    again = trainer(tmp_path, StoreCheckpointIO(tmp_path / "store"), max_epochs=3, callbacks=[])
    again.fit(Model(), BoringDataModule(), ckpt_path=str(tmp_path / "ckpt" / "epoch=1.ckpt"))
    again.save_checkpoint(tmp_path / "again.ckpt")
    assert store.checkout(tmp_path / "again.ckpt").step == 9
    assert second.id == read_pointer(tmp_path / "ckpt" / "epoch=1.ckpt").id


def test_a_link_to_the_last_costs_nothing_and_resumes(tmp_path: Path, store: Store) -> None:
    fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), saver(tmp_path, save_last="link"))
    assert (tmp_path / "ckpt" / "last.ckpt").is_symlink()
    assert len(store.log()) + len(store.forgotten()) == 4
    again = trainer(tmp_path, StoreCheckpointIO(tmp_path / "store"), max_epochs=5)
    again.fit(Model(), BoringDataModule(), ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    assert again.global_step == 15


@pytest.mark.oldest
def test_files_of_torch_save_are_read_and_replaced(tmp_path: Path, store: Store) -> None:
    fitted(tmp_path, None, saver(tmp_path))
    assert not is_pointer(tmp_path / "ckpt" / "last.ckpt")
    callback = saver(tmp_path)
    again = trainer(
        tmp_path, StoreCheckpointIO(tmp_path / "store"), callbacks=[callback], max_epochs=6
    )
    again.fit(Model(), BoringDataModule(), ckpt_path="last")
    assert again.global_step == 18 and is_pointer(tmp_path / "ckpt" / "last.ckpt")
    assert store.checkout(tmp_path / "ckpt" / "last.ckpt").step == 18


@pytest.mark.pickles
@pytest.mark.oldest
def test_load_from_checkpoint_takes_pointers_and_snapshots(tmp_path: Path, store: Store) -> None:
    run = fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), saver(tmp_path, save_last="link"))
    for source in (
        run.checkpoint_callback.best_model_path,
        tmp_path / "ckpt" / "last.ckpt",
        store.checkout("latest"),
    ):
        model = Model.load_from_checkpoint(source, map_location="cpu")
        assert torch.equal(model.layer.weight, run.lightning_module.layer.weight)
    torch.save(run._checkpoint_connector.dump_checkpoint(), tmp_path / "old.ckpt")
    assert Model.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=False).hparams.width == 2


def test_removed_checkpoints_are_forgotten_a_step_later_unless_tagged(
    tmp_path: Path, store: Store
) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    run = trainer(tmp_path, plugin, callbacks=[saver(tmp_path, save_last=False)], max_epochs=6)

    class Tags(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                store.tag("kept", "latest")

    run.callbacks.insert(0, Tags())
    run.fit(Model(), BoringDataModule())
    assert files(tmp_path) == ["epoch=5.ckpt"]
    assert [info.step for info in store.log()] == [18, 15, 6]
    assert store.checkout("kept").step == 6
    assert len(store.forgotten()) == 3


def test_a_commit_that_lost_its_path_is_forgotten_by_a_later_process(tmp_path: Path) -> None:
    def save(plugin: StoreCheckpointIO, step: int) -> None:
        checkpoint = {"global_step": step, "state_dict": {"w": torch.ones(2) * step}}
        plugin.save_checkpoint(checkpoint, tmp_path / f"step={step}.ckpt")

    before = StoreCheckpointIO(tmp_path / "store")
    save(before, 1)
    save(before, 2)
    before.remove_checkpoint(tmp_path / "step=1.ckpt")
    assert [info.step for info in before.store.log()] == [2, 1], "a step to fall back to"
    before.teardown()
    after = StoreCheckpointIO(tmp_path / "store")
    save(after, 3)
    assert [info.step for info in after.store.log()] == [3, 2]
    after.teardown()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((32,), float(i))


class Sees(Model):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += [int(number) for number in batch[:, 0]]
        return super().training_step(batch, batch_idx)


class Breaks(pl.Callback):  # type: ignore[misc]
    """Saves after some batches, and ends the training."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)
            raise ckptstore.NoSpace("this job is over")


@pytest.mark.parametrize("stateful", [False, True], ids=["of torch", "of torchdata"])
def test_each_sample_of_a_resumed_epoch_comes_once_or_a_warning_says_why_not(
    tmp_path: Path, stateful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    kind = StatefulDataLoader if stateful else torch.utils.data.DataLoader
    loader, seen = partial(kind, Numbers(), batch_size=4, shuffle=True), list[int]()
    path, after = tmp_path / "c.ckpt", random.Random().randrange(1, 15)
    print("interrupted after batch", after)
    first = trainer(
        tmp_path,
        StoreCheckpointIO(tmp_path / "store"),
        callbacks=[Breaks(after, path)],
        max_epochs=1,
        limit_train_batches=1.0,
        limit_val_batches=0,
    )
    with pytest.raises(ckptstore.NoSpace, match="over"):
        first.fit(Sees(seen), loader())
    assert ("is within an epoch" in caplog.text) == (not stateful)
    again = trainer(
        tmp_path,
        StoreCheckpointIO(tmp_path / "store"),
        max_epochs=1,
        limit_train_batches=1.0,
        limit_val_batches=0,
    )
    again.fit(Sees(seen), loader(), ckpt_path=path)
    assert len(seen) == 64
    if stateful:
        assert sorted(seen) == list(range(64))


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
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: no such"):
        plugin.load_checkpoint("no such")
    with pytest.raises(NotFound):
        plugin.load_checkpoint("best:val_loss")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        plugin.load_checkpoint("memory://nothing/a.ckpt")
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


def test_labels_and_storage_options_describe_a_commit(tmp_path: Path, store: Store) -> None:
    run = fitted(
        tmp_path,
        StoreCheckpointIO(tmp_path / "store"),
        saver(tmp_path, save_top_k=0, save_last=False),
    )
    run.save_checkpoint(
        tmp_path / "a.ckpt", storage_options={"tag": "good", "metrics": {"f1": 0.5}, "message": "m"}
    )
    found = store.checkout("good")
    assert (found.metrics, found.step) == ({"f1": 0.5}, 12)
    assert found.message == f"m\n{tmp_path / 'a.ckpt'}"


# -- hyperparameters and other objects --


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
