"""How does Ray Train keep its checkpoints in a store? Each worker's directory becomes a commit, and
the experiment's directory has a pointer to it (docs/ray.md).

    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_fn=upload("s3://bucket/store"))
    with open(ray.train.get_checkpoint()) as directory: ...

Workers commit on their own, in runs of their own: Ray reports a checkpoint when all workers have
returned, so that it is whole or not there, and needs no agreement of ours.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from ckptstore.core.options import Storage
from ckptstore.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptstore.objects.pointer_files import Pointer, encode_pointer
from ckptstore.open_store import open as open_store
from ckptstore.open_store import open_pointer
from ckptstore.snapshot import Snapshot
from ckptstore.store import Store

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
            target = f"{directory}/rank-{rank}{SUFFIX}"
            _write(experiment.storage_filesystem, target, Pointer(store.url, snapshot.id))
            _reconcile(store, experiment)
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


def _write(files: Any, path: str, pointer: Pointer) -> None:
    try:
        files.create_dir(str(PurePosixPath(path).parent))
        with files.open_output_stream(path) as stream:
            stream.write(encode_pointer(pointer))
    except OSError as error:
        raise Unavailable(
            f"commit {pointer.id[:12]} is durable in {pointer.store}, and its pointer {path} "
            f"cannot be written: {error}"
        ) from error


def _reconcile(store: Store, experiment: Any) -> None:
    """Forget the commits of this experiment whose directories Ray has deleted. Their messages are
    these. Tagged commits stay."""
    for info in store.log(run=store.run)[PROTECTED:]:
        if info.tags or not info.message.startswith(f"{experiment.experiment_fs_path}/"):
            continue
        found = experiment.storage_filesystem.get_file_info(info.message)
        if found.type == pyarrow.fs.FileType.NotFound:
            try:
                store.forget(info.id)
            except Conflict as error:
                logger.debug("%s", error)
