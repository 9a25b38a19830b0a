"""How does a training with DeepSpeed save into a store? An engine for checkpoints that makes one
commit of the files of all ranks (docs/deepspeed.md).

DeepSpeed hands each rank's files over one by one, as dictionaries. None is written: when a save has
handed over all, the ranks commit them together. Small pointer files get their names, for scripts
and for DeepSpeed, which looks for names before it loads. `latest` comes last, so that it names only
what is durable.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate, isgenerator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ckptstore import Ranks, Store
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.interop.background_saves import BackgroundSaves, as_first_rank, together
from ckptstore.interop.deepspeed_weights import (
    RECORD,
    check_made_by_deepspeed,
    file_names,
    fp32_weights,
)
from ckptstore.interop.leaving import replace_durably
from ckptstore.interop.oldest import check_version
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.pointers import (
    DIRECTORY_POINTERS,
    Pointer,
    is_pointer,
    read_pointer,
    write_pointer,
)
from ckptstore.plugin.ranks import collective_of
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugin.values import register_class, register_value

try:
    import deepspeed
    from deepspeed.runtime import engine as runtime
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointCommitInfo,
        CheckpointEngine,
    )
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
except ImportError as error:
    raise ImportError(
        f'StoreCheckpointEngine needs DeepSpeed: pip install "ckptstore[deepspeed]" ({error})'
    ) from error

__all__ = ["StoreCheckpointEngine", "fp32_weights", "write_files"]

logger = logging.getLogger("ckptstore")

OLDEST = (0, 18)
"""The oldest DeepSpeed that this has been tested with."""

_POINTER = DIRECTORY_POINTERS[0]
_WRAPPED = ("save_checkpoint", "load_checkpoint")


def _register_types() -> None:
    """Let commits hold what DeepSpeed has in its files besides tensors and plain values."""
    register_class(fragment_address)
    register_class(ZeroStageEnum)
    for scaler in (LossScaler, DynamicLossScaler):

        def decode(state: dict[str, Any], cls: type = scaler) -> Any:
            made: Any = object.__new__(cls)
            vars(made).update(state)
            return made

        register_value(f"deepspeed.{scaler.__name__}", scaler, lambda it: dict(vars(it)), decode)


_register_types()


# DeepSpeed has no types for mypy
class StoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A `CheckpointEngine` that saves into a store. `install` gives it to an engine of
    `deepspeed.initialize`."""

    def __init__(
        self, engine: Any, store: Store, *, wait: bool, ranks: Ranks, allow_pickle: bool
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.store = store
        self._engine, self._files = engine, engine.checkpoint_engine
        self._waits, self._ranks, self._allow_pickle = wait, ranks, allow_pickle
        self._saves = BackgroundSaves(store, ranks)
        self._warned = False
        self._info: CheckpointCommitInfo | None = None
        self._handed: dict[str, Any] | None = None

    @classmethod
    def install(
        cls,
        engine: Any,
        store: Store,
        *,
        wait: bool = False,
        ranks: Ranks | None = None,
        allow_pickle: bool = False,
    ) -> "StoreCheckpointEngine":
        """Let `engine.save_checkpoint` commit to `store`, and `engine.load_checkpoint` read it.

        `save_checkpoint` copies the state and returns; hashing and writing go on beside the
        training. The next `save_checkpoint`, `load_checkpoint` or `destroy` raises what failed
        meanwhile, on all ranks. All ranks call this, after `deepspeed.initialize`.

        Args:
            engine: What `deepspeed.initialize` returned.
            store: An open store.
            wait: Return from `save_checkpoint` only when the commit is durable.
            ranks: As in `Store.commit_async`.
            allow_pickle: Pickle values of `client_state` that have no safe encoding.

        Raises:
            InvalidInput: The version of DeepSpeed is not supported, or the engine has a store.

        Example:
            >>> StoreCheckpointEngine.install(engine, ckptstore.open("checkpoints"))
        """
        check_version("DeepSpeed", deepspeed.__version__, OLDEST, "deepspeed")
        if isinstance(engine.checkpoint_engine, cls):
            raise InvalidInput("this engine saves into a store already")
        made = cls(engine, store, wait=wait, ranks=ranks or Ranks(), allow_pickle=allow_pickle)
        engine.checkpoint_engine = made
        for name in _WRAPPED:
            setattr(engine, name, partial(getattr(made, f"_{name}"), getattr(engine, name)))
        return made

    def wait(self) -> None:
        """Wait until the last save is durable. Raises what failed, once. All ranks call this."""
        self._saves.settle()

    # -- saving --

    def _save_checkpoint(
        self, original: Callable[..., bool], save_dir: str, *args: Any, **kwargs: Any
    ) -> bool:
        if not self._saves.make_way(self._engine.global_steps):
            return False
        tag = (args[0] if args else kwargs.get("tag")) or f"global_step{self._engine.global_steps}"
        look = partial(_check_free, Path(save_dir).absolute() / str(tag))
        together(self._ranks, "save: look", look)
        self._warn_of_place()
        self._handed = {}
        try:
            saved = original(save_dir, *args, **kwargs)
            info, handed = self._info, self._handed
        finally:
            self._info, self._handed = None, None
        if info is None:  # the engine saves nothing
            return saved
        directory = Path(info.save_dir).absolute() / info.tag
        record = {"tag": info.tag, "directory": str(directory)}
        pending = self.store.commit_async(
            {RECORD: record, **{os.path.basename(path): state for path, state in handed.items()}},
            step=self._engine.global_steps,
            message=f"DeepSpeed checkpoint {info.tag}",
            allow_pickle=self._allow_pickle,
            ranks=self._ranks,
        )
        self._saves.follow(pending, partial(self._publish, info, directory))
        if self._waits:
            self._saves.finish()
        return saved

    def _warn_of_place(self) -> None:
        """Warn once of a save within an epoch of DeepSpeed's own loader, which has no state."""
        loader = self._engine.training_dataloader
        loader = getattr(loader, "loader", loader)  # of a RepeatingLoader
        if not self._warned and self._engine.global_rank == 0 and _is_under_way(loader):
            self._warned = True
            logger.warning(
                "this checkpoint is within an epoch, and DeepSpeed's data loader does not know its "
                "place: a resumed epoch begins anew, and its samples come twice. Keep the number "
                "of batches in client_state and pass over as many after load_checkpoint "
                "(docs/deepspeed.md), or save at the ends of epochs"
            )

    def _publish(self, info: CheckpointCommitInfo, directory: Path, snapshot: Snapshot) -> None:
        """The commit is durable: name it by the files that DeepSpeed looks for, then by the
        directory, then by `latest`."""
        engine = self._engine
        on_each_node = engine.use_node_local_storage() and engine.local_rank == 0
        if engine.global_rank != 0 and not on_each_node:
            return
        _write_pointers(directory, Pointer(self.store.url, snapshot.id), file_names(snapshot))
        if info.save_latest and engine.global_rank == 0:
            replace_durably(Path(info.save_dir).absolute() / "latest", info.tag.encode())

    # -- loading --

    def _load_checkpoint(
        self,
        original: Callable[..., Any],
        load_dir: str,
        tag: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.wait()
        folder = Path(load_dir).absolute()
        look = partial(self._candidates, folder, None if tag is None else str(tag))
        damaged = []
        for name in as_first_rank(self._ranks, "load: look", look):
            try:
                self._check(folder / name)
            except (Corrupt, NotFound) as error:
                if tag is not None:
                    raise
                logger.warning("skipped checkpoint %s: %s", folder / name, error)
                damaged.append(f"{name}: {error}")
                continue
            with _fp32_weights_of(self._snapshot_at(folder / name)):
                return original(load_dir, name, *args, **kwargs)
        if damaged:
            raise Corrupt(
                f"none of the {len(damaged)} checkpoints in {folder} can be loaded; the newest: "
                f"{damaged[0]}"
            )
        return original(load_dir, tag, *args, **kwargs)

    def _candidates(self, folder: Path, tag: str | None) -> list[str]:
        """Tags in the order in which to try them: the given one, or the latest and then the newest
        of the others. Empty if DeepSpeed's own files are to be loaded."""
        latest = folder / "latest"
        if self._engine.load_universal_checkpoint() or (tag is None and not latest.is_file()):
            return []
        first = tag or latest.read_text().strip()
        if not _is_stored(folder / first):
            return []
        if tag is not None:
            return [tag]
        order = {info.id: place for place, info in enumerate(self.store.log())}
        others = [
            (order[commit], each.name)
            for each in folder.iterdir()
            if each.name != first and each.is_dir() and (commit := _commit_at(each)) in order
        ]
        return [first, *(name for _, name in sorted(others))]

    def _check(self, directory: Path) -> None:
        """Verify the commit of `directory`, each rank some of its files, and make pointer files
        that are missing. What fails on one rank fails on all, before anything is loaded."""
        peers = collective_of(self._ranks.process_group, self._ranks.timeout_s)
        rank, size = (peers.rank, peers.size) if peers else (0, 1)

        def verify() -> None:
            snapshot = self._snapshot_at(directory)
            names = file_names(snapshot)
            snapshot.only(names[rank::size]).verify()
            missing = [name for name in names if not os.path.lexists(directory / name)]
            if missing and (rank == 0 or self._engine.use_node_local_storage()):
                _write_pointers(directory, Pointer(self.store.url, snapshot.id), names)

        together(self._ranks, "load: verify", verify)

    def _snapshot_at(self, directory: Path) -> Snapshot:
        commit = _commit_at(directory)
        if commit is None:
            raise Corrupt(f"the pointer files in {directory} are damaged, or there are none")
        return self.store.checkout(commit)

    # -- what DeepSpeed calls --

    def create(self, info: CheckpointCommitInfo) -> None:
        if self._handed is None:  # an export, such as save_16bit_model: a file is wanted
            self._files.create(info)
        else:
            self._info = info

    def save(self, state_dict: Any, path: str) -> None:
        if self._handed is None:
            self._files.save(state_dict, path)
        else:
            self._handed[os.fspath(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        place = Path(path).absolute()
        if not _is_stored(place.parent):
            return self._files.load(path, map_location=map_location)
        snapshot = self._snapshot_at(place.parent)
        state = snapshot.state_dict(place.name, allow_pickle=self._allow_pickle)
        return _moved(state, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return bool(self._files.commit(info))

    def is_decoupled(self) -> bool:
        """True, so that DeepSpeed neither commits nor writes `latest`: `save_checkpoint` does."""
        return True

    def cleanup(self) -> None:
        self.wait()
        self._files.cleanup()

    def preserves_storage_sharing(self) -> bool:
        """False, so that no tensor is cloned for a file."""
        return False


def _is_under_way(loader: Any) -> bool:
    """Whether DeepSpeed's data loader has begun an epoch that has not ended."""
    batches = getattr(loader, "data", None)
    return isgenerator(batches) and getgeneratorstate(batches) == GEN_SUSPENDED


def _check_free(directory: Path) -> None:
    """Raises `Conflict` if DeepSpeed's own files are in `directory`, where pointers are to be."""
    for each in sorted(directory.glob("*_states.pt")):
        if not is_pointer(each):
            raise Conflict(
                f"{each} is a file of DeepSpeed, which a save into the store would replace: choose "
                f"another tag, or commit it with `ckptstore adopt {directory}` and remove it; "
                "nothing was saved"
            )


def _write_pointers(directory: Path, pointer: Pointer, names: Iterable[str]) -> None:
    """Name a commit by files in `directory`, and then by the directory, which counts. Pointer files
    of an earlier commit that had more files are removed."""
    wanted = list(names)
    for name in wanted:
        write_pointer(directory / name, pointer)
    for each in directory.iterdir():
        if each.name not in (*wanted, _POINTER) and each.is_file() and is_pointer(each):
            each.unlink()
    write_pointer(directory / _POINTER, pointer)


def _is_stored(directory: Path) -> bool:
    """Whether `directory` stands for a commit, even if a pointer file is damaged."""
    return os.path.lexists(directory / _POINTER) or _commit_at(directory) is not None


def _commit_at(directory: Path) -> CommitId | None:
    """The commit of a directory; if its own pointer file is lost, the one that a file in it
    names."""
    for place in (directory / _POINTER, *sorted(directory.glob("*.pt"))):
        if is_pointer(place):
            return read_pointer(place).id
    return None


@contextmanager
def _fp32_weights_of(snapshot: Snapshot) -> Iterator[None]:
    """Within it DeepSpeed, which opens files for the weights of ZeRO 3 without its optimizer states
    and takes those of `latest` whatever the tag, gets the weights of `snapshot`."""
    theirs = runtime.get_fp32_state_dict_from_zero_checkpoint
    runtime.get_fp32_state_dict_from_zero_checkpoint = lambda _: fp32_weights(snapshot)
    try:
        yield
    finally:
        runtime.get_fp32_state_dict_from_zero_checkpoint = theirs


def _moved(state: Any, map_location: Any) -> Any:
    """`state` with its tensors where `torch.load` would put them, if that is a device."""
    if not isinstance(map_location, str | torch.device) or str(map_location) == "cpu":
        return state
    return tree_map(
        lambda each: each.to(map_location) if isinstance(each, torch.Tensor) else each, state
    )


def write_files(snapshot: Snapshot, directory: str | os.PathLike[str]) -> list[Path]:
    """Write the files that DeepSpeed would have written, for its own tools (`zero_to_fp32.py`,
    `ds_to_universal.py`), into a new directory. Returns their paths.

    Raises:
        InvalidInput: DeepSpeed did not make the commit.
        Conflict: The directory exists.

    Example:
        >>> write_files(store.checkout(100), "export/global_step100")
    """
    check_made_by_deepspeed(snapshot)
    place = Path(directory)
    try:
        place.mkdir(parents=True)
    except FileExistsError as error:
        raise Conflict(f"{place} exists; choose another directory, or remove it") from error
    for name in (names := file_names(snapshot)):
        torch.save(snapshot.state_dict(name), place / name)
    return [place / name for name in names]
