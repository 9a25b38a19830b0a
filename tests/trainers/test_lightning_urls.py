"""`ModelCheckpoint(dirpath="s3://…")`: pointers lie where fsspec puts them, commits in the store.

The URLs here are those of fsspec's file system in memory.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule

from ckptstore import InvalidInput, KeepLast
from ckptstore.interop.lightning import StoreCheckpointIO, StoreModelCheckpoint
from ckptstore.store import Store
from tests.trainers.lightning_cases import KINDS, Begins, Model, fitted, saver, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
"""Lightning warns of few workers, empty loggers and the like."""

DIRECTORY = "memory://checkpoints/run"


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def names(memory: Any) -> list[str]:
    return sorted(Path(path).name for path in memory.find("/checkpoints"))


@pytest.mark.parametrize("kind", KINDS)
def test_pointers_lie_at_urls_and_training_goes_on_from_them(
    tmp_path: Path, store: Store, memory: Any, kind: Any
) -> None:
    callback = saver(tmp_path, dirpath=DIRECTORY, monitor="val_loss", save_top_k=2)
    first = fitted(tmp_path, kind(tmp_path / "store"), callback, max_epochs=3)
    assert names(memory) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert all(memory.size(path) < 1000 for path in memory.find("/checkpoints"))
    assert {info.step for info in store.log()} >= {6, 9}
    assert {"val_loss": pytest.approx(0.1)} in [info.metrics for info in store.log()]

    best = callback.best_model_path
    assert best == f"{DIRECTORY}/epoch=2.ckpt"
    loaded = Model.load_from_checkpoint(best)
    for name, value in first.lightning_module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)

    callbacks = [saver(tmp_path, dirpath=DIRECTORY), Begins()]
    again = trainer(tmp_path, kind(tmp_path / "store"), callbacks=callbacks)
    again.fit(Model(), BoringDataModule(), ckpt_path=f"{DIRECTORY}/last.ckpt")
    assert Begins.steps == [9]


def test_a_damaged_pointer_at_a_url_is_passed_over(
    tmp_path: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    for step in (1, 2):
        plugin.save_checkpoint({"global_step": step, "loops": {}}, f"{DIRECTORY}/last.ckpt")
    memory.pipe_file("/checkpoints/run/last.ckpt", b'{"ckptstore_pointer": 1')
    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert plugin.load_checkpoint(f"{DIRECTORY}/last.ckpt")["global_step"] == 2
    assert "cannot be read" in caplog.text
    memory.pipe_file("/checkpoints/run/a.ckpt", b'{"ckptstore_pointer": 1, "store": "x"}')
    with pytest.raises(InvalidInput, match="not an absolute path"):
        plugin.load_checkpoint(f"{DIRECTORY}/a.ckpt")
    plugin.teardown()


def test_what_is_removed_at_a_url_is_forgotten(tmp_path: Path, store: Store, memory: Any) -> None:
    plugin = StoreCheckpointIO(tmp_path / "store")
    for step in range(4):
        plugin.save_checkpoint({"global_step": step}, f"{DIRECTORY}/{step}.ckpt")
    plugin.remove_checkpoint(f"{DIRECTORY}/0.ckpt")
    plugin.remove_checkpoint(f"{DIRECTORY}/nothing.ckpt")
    plugin.teardown()
    assert [info.step for info in store.log()] == [3, 2, 1]
    assert names(memory) == ["1.ckpt", "2.ckpt", "3.ckpt"]


def test_files_of_torch_save_at_a_url_are_read_and_replaced(tmp_path: Path, memory: Any) -> None:
    own = saver(tmp_path, dirpath=DIRECTORY)
    fitted(tmp_path, None, own, max_epochs=1)
    plugin = StoreCheckpointIO(tmp_path / "store")
    found = plugin.load_checkpoint(f"{DIRECTORY}/last.ckpt", weights_only=False)
    assert found["global_step"] == 3
    plugin.save_checkpoint(found, f"{DIRECTORY}/last.ckpt")
    assert memory.cat_file("/checkpoints/run/last.ckpt")[:1] == b"{"
    assert plugin.load_checkpoint(f"{DIRECTORY}/last.ckpt")["global_step"] == 3
    plugin.teardown()


def test_the_stores_retention_removes_pointers_at_a_url(
    tmp_path: Path, store: Store, memory: Any
) -> None:
    callback = StoreModelCheckpoint(dirpath=DIRECTORY, filename="{epoch}", keep=[KeepLast(2)])
    fitted(tmp_path, StoreCheckpointIO(tmp_path / "store"), callback)
    assert [info.step for info in store.log()] == [12, 9]
    assert names(memory) == ["epoch=2.ckpt", "epoch=3.ckpt"]
