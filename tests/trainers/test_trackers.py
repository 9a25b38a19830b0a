"""Commits and the runs of W&B, MLflow and Trackio name each other, with the real libraries."""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.errors import Corrupt, InvalidInput, NotFound, ReadOnly
from ckptstore.interop import trackers
from ckptstore.interop.fsspec import url_of
from ckptstore.store import Store


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A directory with a checkpoint."""
    from safetensors.torch import save_file

    root = tmp_path / "checkpoint-5"
    (root / "sub").mkdir(parents=True)
    save_file({"w": torch.arange(40_000.0)}, root / "model.safetensors")
    (root / "config.json").write_text('{"a": 1}')
    (root / "sub" / "inner.txt").write_text("inner")
    return root


def files_of(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def commit(store: Store, step: int, **more: str) -> Any:
    state = {"model": {"w": torch.full((9,), float(step))}}
    return store.commit(state, step=step, links=trackers.links(**more))


# -- git --


def test_the_commit_of_git_is_recorded_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "code"
    repository.mkdir()
    monkeypatch.chdir(repository)
    assert "git" not in trackers.links()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "train.py").write_text("1")
    for words in (
        ["init", "-q"],
        ["add", "train.py"],
        [*who, "commit", "-q", "-m", "x"],
        ["remote", "add", "origin", "https://me:secret@host/code.git"],
    ):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert trackers.links(job="7") == {
        "git": head.strip(),
        "git_remote": "https://host/code.git",
        "job": "7",
    }
    (repository / "train.py").write_text("2")
    assert trackers.links()["git"] == f"{head.strip()}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trackers.links() == {}


# -- W&B --


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    import wandb

    return wandb


@pytest.mark.oldest
def test_a_run_of_wandb_and_its_commits_name_each_other(
    store: Store, wandb: Any, out: Path
) -> None:
    from ckptstore.interop.wandb import reference, resolve

    with wandb.init(project="demo", id="r1") as run:
        snapshot = store.adopt(out, step=5, metrics={"loss": 1.5}, links=trackers.links())
        artifact = reference(snapshot, "checkpoint")
        run.log_artifact(artifact)
        link = f"wandb://{run.path}"
    assert snapshot.links["wandb"] == link and link.endswith("demo/r1")
    assert [found.id for found in trackers.commits_of(store, link)] == [snapshot.id]
    [entry] = artifact.manifest.entries.values()
    assert entry.ref == url_of(snapshot)
    assert artifact.metadata["step"] == 5 and artifact.metadata["metrics"] == {"loss": 1.5}
    again = reference(store.checkout(5), "checkpoint")
    assert again.digest == artifact.digest
    with resolve(artifact) as opened:
        assert opened.id == snapshot.id and opened.links == snapshot.links
        assert torch.equal(opened.read("model/w"), torch.arange(40_000.0))


def test_a_run_that_records_nothing_is_no_link(wandb: Any) -> None:
    with wandb.init(mode="disabled"):
        assert "wandb" not in trackers.links()


def test_an_artifact_without_a_commit_is_refused(
    store: Store, wandb: Any, out: Path, tmp_path: Path
) -> None:
    from ckptstore.interop.wandb import reference, resolve

    with pytest.raises(InvalidInput, match="refers to no commit"):
        resolve(wandb.Artifact("x", type="model"))
    artifact = reference(store.adopt(out), "gone")
    store.close()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(NotFound):
        resolve(artifact)


# -- MLflow --


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow
    from mlflow.store.artifact import artifact_repository_registry as registry

    from ckptstore.interop.mlflow import CkptStoreArtifactRepository

    # As its entry point does where ckptstore is installed.
    registry._artifact_repository_registry.register("ckptstore", CkptStoreArtifactRepository)
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield mlflow
    while mlflow.active_run():
        mlflow.end_run()


@pytest.mark.oldest
def test_mlflow_keeps_artifacts_in_a_store(
    store: Store, mlflow: Any, out: Path, tmp_path: Path
) -> None:
    experiment = mlflow.create_experiment("e", artifact_location=f"ckptstore://{store.url}@")
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(out), "checkpoint-5")
        mlflow.log_artifact(str(out / "config.json"))
        mlflow.log_text("hello", "notes/a.txt")
    client = mlflow.MlflowClient()
    listed = {found.path: found.is_dir for found in client.list_artifacts(run.info.run_id)}
    assert listed == {"checkpoint-5": True, "config.json": False, "notes": True}
    below = client.list_artifacts(run.info.run_id, "checkpoint-5")
    assert {found.path: found.file_size for found in below} == {
        "checkpoint-5/config.json": 8,
        "checkpoint-5/model.safetensors": (out / "model.safetensors").stat().st_size,
        "checkpoint-5/sub": None,
    }
    assert client.list_artifacts(run.info.run_id, "config.json") == []
    (tmp_path / "down").mkdir()
    got = mlflow.artifacts.download_artifacts(
        run_id=run.info.run_id, artifact_path="checkpoint-5", dst_path=str(tmp_path / "down")
    )
    assert files_of(Path(got)) == files_of(out)
    everything = mlflow.artifacts.download_artifacts(run_id=run.info.run_id)
    assert files_of(Path(everything)).keys() == {
        *(f"checkpoint-5/{name}" for name in files_of(out)),
        "config.json",
        "notes/a.txt",
    }
    commits = trackers.commits_of(store, f"runs:/{run.info.run_id}")
    assert len(commits) == 3 and {found.run for found in commits} == {run.info.run_id}


@pytest.mark.oldest
def test_what_was_logged_last_is_listed_and_stored_once(
    store: Store, mlflow: Any, out: Path
) -> None:
    experiment = mlflow.create_experiment("e", artifact_location=f"ckptstore://{store.url}@")
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(out), "best")
        (out / "config.json").write_text('{"a": 22}')
        mlflow.log_artifacts(str(out), "best")
    got = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/best/config.json")
    assert got == '{"a": 22}'
    new, old = trackers.commits_of(store, f"runs:/{run.info.run_id}")
    assert old.new_bytes > 160_000 > 20_000 > new.new_bytes


@pytest.mark.oldest
def test_a_damaged_commit_hides_its_own_artifacts_and_gives_no_older_file_for_a_newer_one(
    store: Store, mlflow: Any, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    experiment = mlflow.create_experiment("e", artifact_location=f"ckptstore://{store.url}@")
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(out), "best")
        mlflow.log_artifacts(str(out), "damaged")
        mlflow.log_text("hello", "notes/a.txt")
    damaged = store.log(run=run.info.run_id)[1]
    (document,) = (tmp_path / "store" / "commits").rglob(f"*{damaged.session}*")
    document.write_bytes(b"damaged")
    sys.modules["ckptstore.interop.mlflow"]._mounts.clear()  # as in another process
    listed = mlflow.MlflowClient().list_artifacts(run.info.run_id)
    assert [found.path for found in listed] == ["best", "notes"]
    assert f"artifacts are not listed: commit {damaged.id[:12]}: " in caplog.text
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/notes/a.txt") == "hello"
    repository = get_artifact_repository(run.info.artifact_uri)
    with pytest.raises(Corrupt, match=f"commit {damaged.id[:12]}: .* run `ckptstore fsck`"):
        repository._download_file("best/config.json", str(tmp_path / "config.json"))


@pytest.mark.oldest
def test_one_commit_is_read_by_mlflow_and_not_written(store: Store, mlflow: Any, out: Path) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store.adopt(out, step=5)
    repository = get_artifact_repository(f"ckptstore://{store.url}@5")
    assert [found.path for found in repository.list_artifacts()] == [
        "config.json",
        "model.safetensors",
        "sub",
    ]
    assert files_of(Path(repository.download_artifacts(""))) == files_of(out)
    with pytest.raises(ReadOnly):
        repository.log_artifacts(str(out))
    with pytest.raises(ReadOnly, match="forget"):
        repository.delete_artifacts()
    with pytest.raises(InvalidInput, match="STORE@"):
        get_artifact_repository(f"ckptstore://{store.url}")


@pytest.mark.oldest
def test_a_run_of_mlflow_and_its_commits_name_each_other(store: Store, mlflow: Any) -> None:
    from ckptstore.interop.mlflow import log_commit

    with pytest.raises(InvalidInput, match="no MLflow run"):
        log_commit(commit(store, 1))
    with mlflow.start_run() as run:
        snapshot = commit(store, 2)
        log_commit(snapshot, "last")
    link = f"runs:/{run.info.run_id}"
    assert snapshot.links["mlflow"] == link and "mlflow_url" not in snapshot.links
    assert [found.id for found in trackers.commits_of(store, link)] == [snapshot.id]
    assert mlflow.get_run(run.info.run_id).data.tags["ckptstore.last"] == url_of(snapshot)


# -- Trackio --


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio

    return trackio


@pytest.mark.oldest
def test_trackio_refers_to_files_of_commits(
    store: Store, trackio: Any, out: Path, tmp_path: Path
) -> None:
    from trackio.references import fetch_reference, resolve_reference

    from ckptstore.interop.trackio import register

    register()
    (out / "a b%20.txt").write_text("odd")
    snapshot = store.adopt(out, step=5)
    artifact = trackio.Artifact("checkpoint", type="model")
    artifact.add_reference(f"ckptstore://{store.url}@latest", name="checkpoint/")
    staged = {name: uri for name, uri, _, _ in artifact._pending_references}
    assert staged.keys() == {f"checkpoint/{name}" for name in files_of(out)}
    assert all(uri.startswith(url_of(snapshot)) and " " not in uri for uri in staged.values())
    for name, uri in staged.items():
        fetch_reference(uri, "ckptstore", tmp_path / "fetched" / name)
    assert files_of(tmp_path / "fetched" / "checkpoint") == files_of(out)
    [single] = resolve_reference(url_of(snapshot, "config.json"), "ckptstore", True, 10)
    assert single.relkey is None and single.size == 8 and single.digest == single.uri
    with pytest.raises(InvalidInput, match="max_objects"):
        resolve_reference(url_of(snapshot), "ckptstore", True, 2)


@pytest.mark.oldest
def test_a_run_of_trackio_is_recorded(store: Store, trackio: Any) -> None:
    from trackio import context_vars

    class Run:
        project, name = "a demo", "r/1"

    token = context_vars.current_run.set(Run())
    try:
        assert commit(store, 1).links["trackio"] == "trackio://a%20demo/r%2F1"
    finally:
        context_vars.current_run.reset(token)


def test_mlflow_finds_the_repository_by_its_entry_point() -> None:
    from ckptstore.interop.mlflow import CkptStoreArtifactRepository as Repository

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    found = project["project"]["entry-points"]["mlflow.artifact_repository"]["ckptstore"]
    assert found == f"{Repository.__module__}:{Repository.__name__}"


@pytest.mark.oldest
def test_a_trackio_run_has_what_is_read_of_the_stand_in(trackio: Any) -> None:
    run = trackio.run.Run(url=None, project="p", client=object(), name="n", existing_runs=[])
    try:
        assert (run.project, run.name) == ("p", "n")
    finally:
        run._stop_flag.set()


@pytest.mark.oldest
def test_older_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptstore.interop.mlflow
    import ckptstore.interop.trackio

    monkeypatch.setattr("mlflow.__version__", "3.4.0")
    with pytest.raises(ImportError, match=r"MLflow 3\.4\.0 is installed; .* 3\.5 or newer"):
        importlib.reload(ckptstore.interop.mlflow)
    monkeypatch.setitem(sys.modules, "trackio.references", None)
    with pytest.raises(ImportError, match=r"needs Trackio 0\.34 or newer"):
        importlib.reload(ckptstore.interop.trackio)


def test_libraries_that_are_not_used_are_not_imported() -> None:
    code = (
        "import sys; from ckptstore.interop import trackers; trackers.links();"
        "assert not {'wandb', 'mlflow', 'trackio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
