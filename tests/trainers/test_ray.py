"""Ray Train's workers keep their checkpoints in a store, and read them in other workers."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow.fs
import pytest
import ray
import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer
from ray.train.v2.api.report_config import CheckpointUploadMode

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.interop.ray import _Uploads, upload
from ckptstore.interop.ray import open as open_checkpoint
from ckptstore.objects.pointer_files import Pointer, encode_pointer
from tests.support.guard import sitecustomize as guard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
    pytest.mark.pickles,  # what the workers wrote is read by torch.load
]

EPOCHS = 5


def train(config: dict[str, Any]) -> None:
    """Two workers with a part of the state each; goes on from the newest checkpoint."""
    import tempfile

    rank = ray.train.get_context().get_world_rank()
    frozen, own, first = torch.ones(1 << 16), torch.zeros(8), 0
    mode = CheckpointUploadMode.SYNC
    if checkpoint := ray.train.get_checkpoint():
        mode = CheckpointUploadMode.ASYNC
        with open_checkpoint(checkpoint) as directory:
            own = torch.load(f"{directory}/own-{rank}.pt")
            other = torch.load(f"{directory}/own-{1 - rank}.pt")
            first = int(Path(directory, "epoch").read_text()) + 1
            assert torch.equal(other, torch.full((8,), float(first) * (2 - rank)))
    for epoch in range(first, config.get("epochs", EPOCHS)):
        if epoch == config.get("fails") and not checkpoint:
            raise RuntimeError("a worker that fails on purpose")
        if epoch == config.get("settles"):
            experiment = Path(ray.train.get_context().get_storage().experiment_fs_path)
            while len(list(experiment.glob("checkpoint_2*"))) > 2:
                time.sleep(0.05)
        own += rank + 1
        directory = tempfile.mkdtemp()
        torch.save(own, f"{directory}/own-{rank}.pt")
        if rank == 0:
            torch.save(frozen, f"{directory}/frozen.pt")
            Path(directory, "epoch").write_text(str(epoch))
        ray.train.report(
            {"epoch": epoch, "first": first, "own": own.tolist()},
            checkpoint=Checkpoint.from_directory(directory),
            checkpoint_upload_mode=mode,
            checkpoint_upload_fn=upload(config["store"], step=epoch, metrics={"loss": 9.0 - epoch}),
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Its processes are not watched for pickles (`tests.support.guard`): Ray sends everything as
    pickles, the watchman's own objects too."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    unguarded = [path for path in paths if path and Path(path) != Path(guard.__file__).parent]
    os.environ["PYTHONPATH"] = os.pathsep.join(unguarded)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "240"  # 60 pass on a busy machine
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    yield
    ray.shutdown()
    del os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]


def fit(
    folder: Path, keep: int | None = None, storage: Any = None, workers: int = 2, **config: Any
) -> Result:
    return TorchTrainer(
        train,
        train_loop_config={"store": str(folder / "store"), **config},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(
            name="exp",
            storage_path=str(folder / "ray"),
            storage_filesystem=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
            failure_config=FailureConfig(max_failures=1 if "fails" in config else 0),
        ),
    ).fit()


@pytest.fixture(scope="module")
def experiment(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("experiment")
    return folder, fit(folder, keep=2, settles=EPOCHS - 1)


@contextmanager
def store_in(folder: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(folder / "store", run="exp", read_only=True) as store:
        yield store


@pytest.mark.oldest
def test_a_checkpoint_has_the_files_of_all_workers_and_ray_has_pointers(
    experiment: tuple[Path, Result],
) -> None:
    folder, result = experiment
    assert result.error is None
    place = Path(result.checkpoint.path)
    assert place.is_relative_to(folder / "ray" / "exp")
    assert sorted(path.name for path in place.iterdir()) == ["rank-0.ckptstore", "rank-1.ckptstore"]
    with open_checkpoint(result.checkpoint) as directory:
        names = sorted(path.name for path in Path(directory).iterdir())
        assert names == ["epoch", "frozen.pt", "own-0.pt", "own-1.pt"]
        for rank in (0, 1):
            own = torch.load(f"{directory}/own-{rank}.pt")
            assert torch.equal(own, torch.full((8,), float(EPOCHS) * (rank + 1)))
    assert not Path(directory).exists()
    with store_in(folder) as store:
        assert sorted(store.runs()) == ["exp", "exp-rank1"]
        assert store.checkout("best:loss").step == EPOCHS - 1
        assert store.checkout(EPOCHS - 1).new_bytes < 1 << 16, "the frozen tensor is stored once"


@pytest.mark.oldest
def test_what_ray_deleted_is_forgotten_by_the_next_upload(
    experiment: tuple[Path, Result],
) -> None:
    folder, _ = experiment
    kept = {str(path) for path in (folder / "ray" / "exp").glob("checkpoint_2*")}
    with store_in(folder) as store:
        for run in store.runs():
            held = store.log(run=run)
            assert kept <= {info.message for info in held}
            assert [info.step for info in held] == [EPOCHS - 1, EPOCHS - 2, EPOCHS - 3]


def test_a_list_of_uploads_that_is_written_in_part_keeps_the_older_ones(tmp_path: Path) -> None:
    """The file size limit ends the write where a kill or a full disk would."""
    files = pyarrow.fs.LocalFileSystem()
    experiment = SimpleNamespace(storage_filesystem=files, experiment_fs_path=str(tmp_path))
    for number in range(3):
        _Uploads(experiment, 0).add(f"checkpoint-{number}", CommitId("a" * 64))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        _Uploads(experiment, 0).add("checkpoint-3", CommitId("b" * 64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _Uploads(experiment, 0).add("checkpoint-4", CommitId("c" * 64))
    listed = json.loads((tmp_path / ".ckptstore-rank-0").read_text())
    assert [*listed] == [f"checkpoint-{number}" for number in (0, 1, 2, 4)]
    assert [path.name for path in tmp_path.iterdir()] == [".ckptstore-rank-0"]


def test_an_experiment_at_the_path_of_another_forgets_nothing_of_it(
    experiment: tuple[Path, Result], tmp_path: Path
) -> None:
    """A disk that is not mounted, or another host with the same paths and the same bucket: that
    directories are not there does not say that Ray deleted them."""
    folder, _ = experiment
    shutil.copytree(folder / "store", tmp_path / "store")
    (folder / "ray").rename(folder / "elsewhere")
    try:
        assert fit(folder, store=str(tmp_path / "store"), epochs=2).error is None
    finally:
        shutil.rmtree(folder / "ray")
        (folder / "elsewhere").rename(folder / "ray")
    with store_in(tmp_path) as store:
        for run in store.runs():
            held = sorted(info.step or 0 for info in store.log(run=run))
            assert held == [0, 1, *range(EPOCHS - 3, EPOCHS)]


def test_workers_that_are_started_again_go_on_and_pass_over_what_is_damaged(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On storage that Arrow reaches through another library."""
    files = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("file")))
    result = fit(tmp_path, storage=files, fails=3, epochs=4)
    assert result.error is None
    assert result.metrics["first"] > 0, "what had been reported when a worker failed"
    assert result.metrics["own"] == [4.0] * 8
    with store_in(tmp_path) as store:
        newest = store.log(run="exp", limit=1)[0]
    assert newest.step == 3
    for pack in (tmp_path / "store" / "packs").rglob(f"{newest.session}*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    with (
        caplog.at_level(logging.WARNING, "ckptstore"),
        open_checkpoint(result.checkpoint) as directory,
    ):
        assert Path(directory, "epoch").read_text() == "2"
    assert f"skipped checkpoint {result.checkpoint.path}" in caplog.text


def test_a_failed_upload_ends_the_training_with_its_error(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where the store should be")
    with pytest.raises(ray.train.TrainingFailedError) as failed:
        fit(tmp_path, epochs=1, workers=1)
    assert "ckptstore" in str(failed.value)


def test_a_checkpoint_whose_store_is_gone_is_an_error_that_says_so(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        (tmp_path / "files").mkdir()
        commit = store.adopt(tmp_path / "files", step=1).id
    place = tmp_path / "checkpoint"
    place.mkdir()
    pointer = encode_pointer(Pointer(str(tmp_path / "store"), commit))
    (place / "rank-0.ckptstore").write_bytes(pointer)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with (
        pytest.raises(ckptstore.NotFound, match="no store"),
        open_checkpoint(Checkpoint.from_directory(place)),
    ):
        pass


def test_a_checkpoint_of_ray_itself_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("weights")
    with open_checkpoint(Checkpoint.from_directory(tmp_path)) as directory:
        assert Path(directory, "model").read_text() == "weights"


@pytest.mark.soak
def test_the_example_runs_as_it_is() -> None:
    example = Path(__file__).parents[2] / "examples" / "trainers" / "ray_train.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rank-0.ckptstore rank-1.ckptstore" in done.stdout
