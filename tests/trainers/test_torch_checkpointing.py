"""torch_checkpointing's manager on a store: real managers, their spawned writers, and deaths."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.base_storage import ReadArgs

import ckptstore
from ckptstore.errors import Corrupt, InvalidInput, NoSpace
from ckptstore.plugins.torch_checkpointing import StoreStorage, StoreStorageConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


def state(value: float, size: int = 50_000) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), value), "same": torch.arange(100_000.0)}}


def zeros() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(50_000), "same": torch.zeros(100_000)}}


@pytest.fixture
def config(tmp_path: Path) -> StoreStorageConfig:
    return StoreStorageConfig(str(tmp_path / "store"))


@pytest.fixture
def storage(config: StoreStorageConfig) -> StoreStorage:
    return config.create_storage()


@pytest.fixture
def manager(config: StoreStorageConfig) -> Iterator[CheckpointManager]:
    made = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=config).build()
    yield made
    made.close()


def written(root: Path) -> list[str]:
    """The files of checkpoints that lie below `root`."""
    return sorted(path.name for path in root.rglob("*.pt"))


def test_a_save_is_one_commit_whose_tensors_are_leaves(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    manager.save("/ck/step_1", state(1.0))
    manager.save("/ck/step_2", state(2.0))
    into = zeros()
    manager.load("/ck/step_1", into)
    assert torch.equal(into["model"]["weight"], state(1.0)["model"]["weight"])
    with ckptstore.open(tmp_path / "store", read_only=True) as store:
        second, first = store.log()
        assert (first.step, second.step) == (1, 2)
        saved = store.checkout("files/ck/step_2")
        assert torch.equal(saved.read("model/weight"), torch.full((50_000,), 2.0))
        assert saved.new_bytes < 300_000, "the tensor that did not change was written again"
    assert written(tmp_path) == []


def test_the_spawned_writer_writes_to_the_store(config: StoreStorageConfig, tmp_path: Path) -> None:
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    save = AsyncCheckpointSaverConfig(
        process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=300)
    )
    manager = CheckpointManager.Config(items=items, save=save, storage_config=config).build()
    future = manager.save("/ck/step_1", state(3.0))
    assert future is not None
    future.result()
    into = zeros()
    manager.load("/ck/step_1", into)
    manager.close()
    assert torch.equal(into["model"]["weight"], state(3.0)["model"]["weight"])
    assert written(tmp_path) == []


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


def test_ranges_are_those_of_the_file(manager: CheckpointManager, storage: StoreStorage) -> None:
    manager.save("/ck/step_1", state(1.0))
    path = Path("/ck/step_1/model_0.pt")
    whole = storage.read(path)
    assert storage.getsize(path) == len(whole)
    with storage.stream_read(path, ReadArgs(pre_read_full_file=False)) as stream:
        for start, length in ((0, 10), (65_000, 2_000), (len(whole) - 5, 50), (len(whole), 1)):
            assert stream.seek(start) == start
            assert stream.read(length) == whole[start : start + length]
        assert stream.seek(-4, os.SEEK_END) == len(whole) - 4
        assert stream.read() == whole[-4:]


def test_a_checkpoint_is_never_replaced_or_changed(
    manager: CheckpointManager, storage: StoreStorage
) -> None:
    manager.save("/ck/step_1", state(1.0))
    with pytest.raises(FileExistsError):
        manager.save("/ck/step_1", state(2.0))
    for change in (
        lambda: storage.write(Path("/ck/step_1/model_0.pt"), b"other"),
        lambda: storage.delete(Path("/ck/step_1/model_0.pt")),
        lambda: storage.rmdir(Path("/ck/step_1/below")),
        lambda: storage.rename(Path("/ck/step_1"), Path("/ck/step_2"), is_directory=True),
    ):
        with pytest.raises(PermissionError):
            change()
    into = zeros()
    manager.load("/ck/step_1", into)
    assert torch.equal(into["model"]["weight"], state(1.0)["model"]["weight"])


def test_their_retention_forgets_the_commit(
    manager: CheckpointManager, storage: StoreStorage, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        manager.save(f"/ck/step_{step}", state(float(step)))
    storage.rmdir(Path("/ck/step_1"))
    assert storage.ls(Path("/ck")) == ["step_2", "step_3"]
    assert not storage.exists(Path("/ck/step_1"))
    with pytest.raises(FileNotFoundError):
        storage.rmdir(Path("/ck/step_1"))
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [3, 2]
        assert [info.step for info in store.forgotten()] == [1]


def test_ranks_write_one_commit_and_a_file_of_two_writers_is_refused(
    config: StoreStorageConfig,
) -> None:
    ranks = [config.create_storage() for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.mkdir(Path("/ck/tmp_step_1"))
        rank.write(Path(f"/ck/tmp_step_1/model_{number}.pt"), bytes([number]) * 10)
    ranks[0].rename(Path("/ck/tmp_step_1"), Path("/ck/step_1"), is_directory=True)
    assert ranks[1].ls(Path("/ck/step_1")) == ["model_0.pt", "model_1.pt", "model_2.pt"]
    assert not ranks[2].exists(Path("/ck/tmp_step_1"))
    for rank in ranks[:2]:
        rank.write(Path("/ck/tmp_step_2/model_0.pt"), b"of one of two managers")
    with pytest.raises(FileExistsError, match="another manager"):
        ranks[0].rename(Path("/ck/tmp_step_2"), Path("/ck/step_2"), is_directory=True)
    assert not ranks[0].exists(Path("/ck/step_2"))


def test_ranks_save_again_under_the_name_of_a_save_that_failed(
    config: StoreStorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [config.create_storage() for _ in range(2)]

    def save(content: bytes) -> None:
        for number, rank in enumerate(ranks):
            rank.write(Path(f"/ck/tmp_step_1/model_{number}.pt"), content)
        ranks[0].rename(Path("/ck/tmp_step_1"), Path("/ck/step_1"), is_directory=True)

    def full(*_: Any, **__: Any) -> None:
        raise NoSpace("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ckptstore.Store, "adopt", full)
        with pytest.raises(NoSpace):
            save(b"first")
    assert not ranks[0].exists(Path("/ck/step_1"))
    save(b"second")
    for number in range(2):
        assert ranks[1].read(Path(f"/ck/step_1/model_{number}.pt")) == b"second"


def test_a_file_that_comes_into_the_empty_directory_meanwhile_stays(
    storage: StoreStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, adopt = tmp_path / "here", ckptstore.Store.adopt
    place.mkdir()

    def beside_another(store: ckptstore.Store, source: Path, **label: Any) -> object:
        (place / "notes.txt").write_text("mine")
        return adopt(store, source, **label)

    monkeypatch.setattr(ckptstore.Store, "adopt", beside_another)
    storage.write(tmp_path / "tmp_here" / "model_0.pt", b"a rank's")
    storage.rename(tmp_path / "tmp_here", place, is_directory=True)
    assert (place / "notes.txt").read_text() == "mine"
    assert storage.read(place / "model_0.pt") == b"a rank's"


def test_a_file_that_is_not_written_to_its_end_is_removed(storage: StoreStorage) -> None:
    path = Path("/ck/tmp_step_1/model_0.pt")

    def write_half() -> None:
        with storage.stream_write(path) as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert not storage.exists(path)


def test_a_bucket_needs_a_place_for_staged_files() -> None:
    with pytest.raises(InvalidInput, match="staging="):
        StoreStorageConfig("s3://bucket/run")


@pytest.mark.parametrize("name", ["step 1", "a+b", "é/step@2", "~x"])
def test_any_name_is_that_of_a_checkpoint(storage: StoreStorage, name: str) -> None:
    storage.write(Path(f"/ck/tmp_{name}/a.json"), b"{}")
    storage.rename(Path(f"/ck/tmp_{name}"), Path(f"/ck/{name}"), is_directory=True)
    assert storage.read(Path(f"/ck/{name}/a.json")) == b"{}"


_KILLED = """
import sys
from pathlib import Path
from ckptstore.plugins.torch_checkpointing import StoreStorageConfig
storage = StoreStorageConfig(sys.argv[1]).create_storage()
storage.write(Path("/ck/tmp_step_0/model_0.pt"), b"of a writer that dies")
print("ready", flush=True)
for step in range(1, 1000):
    for rank in range(2):
        with storage.stream_write(Path(f"/ck/tmp_step_{step}/model_{rank}.pt")) as file:
            file.write(bytes([step % 256]) * 800_000)
    storage.rename(Path(f"/ck/tmp_step_{step}"), Path(f"/ck/step_{step}"), is_directory=True)
    print(step, flush=True)
"""


@pytest.mark.parametrize("saves", [0, 1, 3])
def test_a_killed_writer_leaves_whole_checkpoints_alone(
    config: StoreStorageConfig, tmp_path: Path, saves: int
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, config.store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(saves + 1):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split()
    storage = config.create_storage()
    if saves:
        names = storage.ls(Path("/ck"))
        assert {f"step_{step}" for step in range(1, saves + 1)} <= set(names)
        assert {f"step_{step}" for step in said} <= set(names)
    else:
        names = storage.ls(Path("/ck")) if storage.exists(Path("/ck")) else []
    for name in names:
        assert name.startswith("step_"), "what a killed writer had staged is seen"
        for rank in range(2):
            saved = storage.read(Path(f"/ck/{name}/model_{rank}.pt"))
            assert saved == bytes([int(name.removeprefix("step_")) % 256]) * 800_000
    storage.write(Path("/ck/tmp_step_0/model_1.pt"), b"of the next training")
    storage.rename(Path("/ck/tmp_step_0"), Path("/ck/step_0"), is_directory=True)
    assert storage.ls(Path("/ck/step_0")) == ["model_1.pt"], "files of the dead were taken"
    assert len(list((tmp_path / "store.staging" / "writers").iterdir())) == 1
