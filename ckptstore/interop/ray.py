"""How does Ray Train keep its checkpoints in a store? Each worker's directory becomes a commit, and
the experiment's directory has a pointer to it (docs/ray.md).

    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_fn=upload("s3://bucket/store"))
    with open(ray.train.get_checkpoint()) as directory: ...

Workers commit on their own, in runs of their own: Ray reports a checkpoint when all workers have
returned, so that it is whole or not there, and needs no agreement of ours.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from ckptstore import Storage, Store, open_pointer
from ckptstore import open as open_store
from ckptstore.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.pointers import Pointer, encode_pointer
from ckptstore.plugin.snapshots import Snapshot

try:
    import pyarrow.fs
    import ray.train
    from ray.train.v2.api.context import TrainContext as _OfVersion2  # noqa: F401  # is it there?
except ImportError as error:
    raise ImportError(
        f'ckptstore.interop.ray needs Ray Train 2.51 or newer: pip install "ckptstore[ray]" '
        f"({error})"
    ) from error

__all__ = ["open", "upload"]

logger = logging.getLogger("ckptstore")

UploadFn: TypeAlias = "Callable[[ray.train.Checkpoint, str], ray.train.Checkpoint]"

SUFFIX = ".ckptstore"
"""Ends the name of a worker's pointer file in a checkpoint's directory: `rank-0.ckptstore`."""

UPLOADS = ".ckptstore-rank-{}"
"""The file in an experiment's directory that names a worker's commits by their directories. A disk
that is not mounted has no such file, and another host one of its own: that directories are not
there says nothing then."""

PROTECTED = 2
"""So many of the newest commits of a run are never forgotten."""


def upload(
    place: str | os.PathLike[str],
    *,
    run: str | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    storage: Storage | None = None,
) -> UploadFn:
    """A `checkpoint_upload_fn` for `ray.train.report`, which commits the checkpoint to a store.

    What it returns lies in the experiment's directory, as Ray demands: a directory with a pointer
    file for each worker. Where Ray has deleted such a directory (`num_to_keep`), the next upload
    forgets its commit.

    Args:
        place: Directory or URL of the store, which every worker reaches.
        run: The run of the first worker's commits; default: the experiment's name. Worker 1 has
            `RUN-rank1`.
        step, metrics: As in `Store.commit`, of this checkpoint.
        storage: As in `ckptstore.open`.

    Raises:
        CkptStoreError: From `ray.train.report`: the checkpoint could not be committed.

    Example:
        >>> ray.train.report(m, checkpoint=c, checkpoint_upload_fn=upload("/mnt/store", step=epoch))
    """

    def upload_to_store(checkpoint: Any, checkpoint_dir_name: str) -> Any:
        context = ray.train.get_context()
        experiment, rank = context.get_storage(), context.get_world_rank()
        name = run or context.get_experiment_name()
        directory = experiment.build_checkpoint_path_from_name(checkpoint_dir_name)
        with (
            open_store(place, run=f"{name}-rank{rank}" if rank else name, storage=storage) as store,
            checkpoint.as_directory() as files,
        ):
            snapshot = store.adopt(files, step=step, metrics=metrics, message=directory)
            uploads = _Uploads(experiment, rank)
            uploads.forget_deleted(store)
            uploads.add(checkpoint_dir_name, snapshot.id)
            target = f"{directory}/rank-{rank}{SUFFIX}"
            pointer = Pointer(store.url, snapshot.id)
            try:
                experiment.storage_filesystem.create_dir(directory)
                _write(experiment.storage_filesystem, target, encode_pointer(pointer))
            except OSError as error:
                raise Unavailable(
                    f"commit {pointer.id[:12]} is durable in {pointer.store}, and its pointer "
                    f"{target} cannot be written: {error}"
                ) from error
        return ray.train.Checkpoint(path=directory, filesystem=experiment.storage_filesystem)

    return upload_to_store


@contextmanager
def open(checkpoint: Any, *, storage: Storage | None = None) -> Iterator[str]:
    """The files of a checkpoint in a local directory, which is removed at the end of the block; all
    workers' files together, in any process.

    A checkpoint that was not uploaded to a store is read as Ray reads it. One whose commit is
    damaged is passed over with a warning for the newest one before it in the same experiment.

    Args:
        checkpoint: From `ray.train.get_checkpoint()`, a `Result`, or a path.
        storage: As in `ckptstore.open`.

    Raises:
        Corrupt, NotFound: Neither this checkpoint nor one before it can be read.

    Example:
        >>> with open(ray.train.get_checkpoint()) as directory:
        ...     state = torch.load(f"{directory}/model.pt")
    """
    damaged: list[Exception] = []
    with tempfile.TemporaryDirectory(prefix="ckptstore-ray-") as scratch:
        directory = os.path.join(scratch, "checkpoint")
        for each in _newest_first(checkpoint):
            try:
                _bring(each, directory, storage)
            except (Corrupt, NotFound) as error:
                damaged.append(error)
                logger.warning("skipped checkpoint %s: %s", each.path, error)
                shutil.rmtree(directory, ignore_errors=True)
            else:
                break
        else:
            raise damaged[0]
        yield directory


def _newest_first(checkpoint: Any) -> Iterator[Any]:
    """The checkpoint, then those before it in its experiment, by the time that they were made."""
    yield checkpoint
    files, place = checkpoint.filesystem, PurePosixPath(checkpoint.path)
    selector = pyarrow.fs.FileSelector(str(place.parent), recursive=True, allow_not_found=True)
    made: dict[str, Any] = {}
    for info in files.get_file_info(selector):
        directory = str(PurePosixPath(info.path).parent)
        if info.path.endswith(SUFFIX) and PurePosixPath(directory).parent == place.parent:
            made[directory] = max(info.mtime_ns or 0, made.get(directory, 0))
    own = made.pop(str(place), None)
    for directory in sorted(made, key=lambda each: -made[each]):
        if own is None or made[directory] <= own:
            yield ray.train.Checkpoint(path=directory, filesystem=files)


def _bring(checkpoint: Any, directory: str, storage: Storage | None) -> None:
    """Write the files of `checkpoint` to `directory`, verified where a store has them."""
    os.mkdir(directory)
    checkpoint.to_directory(directory)
    for pointer in sorted(Path(directory).glob(f"rank-*{SUFFIX}"), key=_rank):
        with ExitStack() as ends:
            snapshot: Snapshot = ends.enter_context(open_pointer(pointer, storage=storage))
            part = ends.enter_context(tempfile.TemporaryDirectory(dir=Path(directory).parent))
            snapshot.materialize(part)
            shutil.copytree(part, directory, symlinks=True, dirs_exist_ok=True)
        pointer.unlink()


def _rank(pointer: Path) -> int:
    return int(pointer.name.removeprefix("rank-").removesuffix(SUFFIX))


def _write(files: Any, path: str, data: bytes) -> None:
    with files.open_output_stream(path) as stream:
        stream.write(data)


class _Uploads:
    """The commits of one worker whose directories are in an experiment's directory, or were until
    Ray deleted them."""

    def __init__(self, experiment: Any, rank: int) -> None:
        self._files, self._root = experiment.storage_filesystem, experiment.experiment_fs_path
        self._path = f"{self._root}/{UPLOADS.format(rank)}"
        self._commits: dict[str, str] = {}
        try:
            with self._files.open_input_stream(self._path) as stream:
                self._commits = dict(json.loads(stream.read()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            logger.warning(
                "%s cannot be read: commits of checkpoints that Ray deletes stay: %s",
                self._path,
                error,
            )

    def add(self, name: str, commit: CommitId) -> None:
        """Note that the directory `name` stands for `commit`."""
        self._commits[name] = commit
        try:
            # Under another name first: a kill amid the write would lose the older commits.
            _write(self._files, f"{self._path}.new", json.dumps(self._commits).encode())
            self._files.move(f"{self._path}.new", self._path)
        except OSError as error:
            logger.warning("commit %s stays when Ray deletes its directory: %s", commit, error)

    def forget_deleted(self, store: Store) -> None:
        """Forget the commits whose directories Ray has deleted. Tagged commits stay."""
        log = store.log(run=store.run)
        bound = {info.id for i, info in enumerate(log) if i < PROTECTED or info.tags}
        there = {info.id for info in log}
        for name, commit in list(self._commits.items()):
            found = self._files.get_file_info(f"{self._root}/{name}")
            if commit in bound or found.type != pyarrow.fs.FileType.NotFound:
                continue
            try:
                if commit in there:
                    store.forget(CommitId(commit))
                del self._commits[name]
            except Conflict as error:
                logger.debug("%s", error)
