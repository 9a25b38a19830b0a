"""Keep MLflow's artifacts in a store, and name commits in MLflow's runs (docs/trackers.md).

An artifact location `ckptstore://STORE@` may be written: each `log_artifact` and `log_artifacts` is
an adopted commit, and what was logged last is listed. `ckptstore://STORE@REF` is one commit,
read-only.
"""

import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import mlflow
from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from ckptstore import Store
from ckptstore import open as open_store
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.interop.fsspec import (
    CheckpointFileSystem,
    CommitUrl,
    MissingFile,
    NotWritable,
    split_url,
    url_of,
)
from ckptstore.plugin.model import CommitId, check_run
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugins.adopt.commit_files import CommitFiles, Found

if tuple(map(int, mlflow.__version__.split(".")[:2])) < (3, 5):
    raise ImportError(
        f"MLflow {mlflow.__version__} is installed; ckptstore.interop.mlflow needs 3.5 or newer: "
        'pip install -U "ckptstore[mlflow]"'
    )

RUN = "mlflow"
"""The run of commits for which no other is known."""

PATH = "mlflow.artifact_path"
"""The link that says where in MLflow's artifacts the files of a commit are."""

TAG = "ckptstore.{name}"

T = TypeVar("T")

Mounted: TypeAlias = tuple[str, CommitFiles] | Corrupt
"""A commit's files with their place among the artifacts, or the damage that hides them."""

logger = logging.getLogger("ckptstore")

_COPY_BYTES = 16 << 20
_ROOT = "."


class CkptStoreArtifactRepository(ArtifactRepository):  # type: ignore[misc]  # without types
    """Artifacts of one run, or of one model, in a store."""

    def __init__(
        self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
    ) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._place = split_url(artifact_uri)
        if not self._place.store or "@" not in artifact_uri:
            raise InvalidInput(
                f"{artifact_uri[:200]!r} is no place for artifacts: wanted ckptstore://STORE@, or "
                "ckptstore://STORE@REF to read one commit"
            )

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Commit one file."""
        with tempfile.TemporaryDirectory() as alone:
            shutil.copy2(local_file, alone)
            self.log_artifacts(alone, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Commit a directory: what the store has already takes no room again."""
        if self._place.ref:
            raise NotWritable(
                f"{self.artifact_uri} is one commit, which never changes; log to ckptstore://STORE@"
            )
        path = posixpath.normpath(posixpath.join(self._place.name, artifact_path or ""))
        if path.startswith(("..", "/")):
            raise InvalidInput(f"{artifact_path!r} leads out of the run's artifacts")
        links = {PATH: path}
        if (run := self._run()) != RUN:
            links["mlflow"] = f"runs:/{run}"
        with open_store(self._place.store, run=run) as store:
            store.adopt(local_dir, message=f"logged by MLflow: {path}", links=links)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """What is directly below `path`; nothing for a file. What a damaged commit of a run has is
        not listed, with a warning."""
        listed: dict[str, Found] = {}
        for mounted in self._mounts():
            try:
                below = _below(*_sound(mounted), _joined(self._place.name, path))
            except Corrupt as error:
                if self._place.ref:
                    raise
                logger.warning("artifacts are not listed: %s", error)
                continue
            for name, found in below.items():
                listed.setdefault(name, found)
        return [
            FileInfo(_joined(path, name), found.is_folder, None if found.is_folder else found.size)
            for name, found in sorted(listed.items())
        ]

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        wanted = _joined(self._place.name, remote_file_path)
        for mounted in self._mounts():
            # An older commit may have an older file of that name: no way past a damaged one.
            mount, files = _sound(mounted)
            name = _within(mount, wanted)
            found = None if name is None else _found(files, name)
            if name is not None and found is not None and not found.is_folder:
                with open(local_path, "wb") as out:
                    for start in range(0, found.size, _COPY_BYTES):
                        out.write(files.read(name, start, start + _COPY_BYTES))
                return
        raise MissingFile(f"{self.artifact_uri} has no artifact {remote_file_path!r}")

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Refused: `ckptstore forget --run` and `gc` delete commits."""
        raise NotWritable(
            f"artifacts in {self._place.store} are commits of the run {self._run()}: `ckptstore "
            "forget` and `ckptstore gc` delete them"
        )

    def _run(self) -> str:
        """The run of the commits: MLflow's id of the run or the model, which its path has before
        `artifacts`."""
        parts = [part for part in self._place.name.split("/") if part]
        if "artifacts" not in parts[1:]:
            return RUN
        try:
            return check_run(parts[parts.index("artifacts", 1) - 1])
        except InvalidInput:
            return RUN

    def _mounts(self) -> list[Mounted]:
        """The commits with artifacts, newest first."""
        if self._place.ref:
            root = CommitUrl(self._place.store, self._place.ref, "")
            return [(_ROOT, CheckpointFileSystem().files_of(root))]
        try:
            with open_store(self._place.store, run=self._run(), create=False) as store:
                found = [
                    (info.id, _try(info.id, partial(_mount, store, info.id)))
                    for info in store.log(run=self._run())
                ]
        except NotFound:
            return []
        fs = CheckpointFileSystem()

        def mounted(commit: CommitId, mount: str) -> tuple[str, CommitFiles]:
            return mount, fs.files_of(CommitUrl(self._place.store, commit, ""))

        return [
            mount if isinstance(mount, Corrupt) else _try(commit, partial(mounted, commit, mount))
            for commit, mount in found
            if mount is not None
        ]


def _try(commit: CommitId, read: Callable[[], T]) -> T | Corrupt:
    """What `read` returns, or the damage that it found in `commit`."""
    try:
        return read()
    except Corrupt as error:
        return Corrupt(f"commit {commit[:12]}: {error}")


def _sound(mounted: Mounted) -> tuple[str, CommitFiles]:
    """Raises `Corrupt` if the commit is damaged."""
    if isinstance(mounted, Corrupt):
        raise mounted
    return mounted


def log_commit(snapshot: Snapshot, name: str = "checkpoint", *, run_id: str | None = None) -> str:
    """Write the URL of a commit into a tag `ckptstore.NAME` of an MLflow run, by default the active
    one: from a run to its checkpoints. Returns the URL.

    Raises `InvalidInput` without an active run.

    Example:
        >>> log_commit(store.commit(app_state, step=step, links=links()), "last")
    """
    import mlflow

    run = mlflow.active_run()
    chosen = run_id or (run.info.run_id if run else None)
    if chosen is None:
        raise InvalidInput("no MLflow run is active: give run_id, or call this within start_run()")
    url = url_of(snapshot)
    mlflow.MlflowClient().set_tag(chosen, TAG.format(name=name), url)
    return url


_mounts: dict[tuple[str, str], str | None] = {}
"""What `_mount` found; a commit never changes."""


def _mount(store: Store, commit: CommitId) -> str | None:
    """Where the files of a commit are among the artifacts; None for any other commit."""
    key = store.id, commit
    if key not in _mounts:
        _mounts[key] = store.checkout(commit).links.get(PATH)
    return _mounts[key]


def _joined(*parts: str | None) -> str:
    return posixpath.normpath(posixpath.join(*(part or "" for part in parts))).lstrip("/")


def _within(mount: str, path: str) -> str | None:
    """The name of `path` among the files at `mount`; None if it is not there."""
    if mount == _ROOT:
        return "" if path == _ROOT else path
    if path == mount:
        return ""
    return path[len(mount) + 1 :] if path.startswith(f"{mount}/") else None


def _below(mount: str, files: CommitFiles, path: str) -> dict[str, Found]:
    """What the commit at `mount` has directly below `path`."""
    name = _within(mount, path)
    if name is None:
        rest = _within(path, mount)
        return {rest.partition("/")[0]: files.find("")} if rest else {}
    found = _found(files, name)
    if found is None or not found.is_folder:
        return {}
    prefix = f"{name}/" if name else ""
    return {each: files.find(prefix + each) for each in files.names(name)}


def _found(files: CommitFiles, name: str) -> Found | None:
    try:
        return files.find(name)
    except NotFound:
        return None
