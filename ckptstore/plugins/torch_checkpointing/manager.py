"""How does torch_checkpointing's `CheckpointManager` save without files? The `CheckpointManager`
here has its methods, and each save is one commit of the values themselves: nothing is pickled, a
tensor that did not change is neither written nor sent, and every rank's shards are one tensor.

It has the names of the storage beside it, so that each sees the checkpoints of the other.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map
from torch_checkpointing import CheckpointManager as TheirManager
from torch_checkpointing.checkpoint_base import CheckpointInfo
from torch_checkpointing.checkpoint_loader import CheckpointLoader
from torch_checkpointing.checkpoint_manager import _DictCheckpoint
from torch_checkpointing.checkpoint_reader import CheckpointReader
from torch_checkpointing.checkpoint_writer import CallbackArgs
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.logging_utils import EventLogger
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec, _CheckpointSchema
from torch_checkpointing.types import RankInfo

import ckptstore
from ckptstore import Async, PendingCommit, Ranks, Snapshot
from ckptstore.errors import InvalidInput
from ckptstore.plugin.leaves import segments
from ckptstore.plugins.torch_checkpointing.names import label_of, name_of
from ckptstore.plugins.torch_checkpointing.storage import StoreStorageConfig

_ALONE = Ranks(process_group="alone")
_Template: TypeAlias = dict[str, Any] | None
"""What a target asks for, by the segments of paths; None: everything."""


class CheckpointManager(TheirManager):  # type: ignore[misc]  # it has no types
    """torch_checkpointing's manager on a store. `save`, `load` and the rest are called as there.

    Args:
        config: As theirs; `storage_config` is a `StoreStorageConfig`.

    Raises:
        InvalidInput: The configuration asks for something that is about files.

    Example:
        >>> config = CheckpointManager.Config(storage_config=StoreStorageConfig("/data/store"))
        >>> manager = config.build()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TheirManager.Config):  # type: ignore[misc]
        """Theirs, and two more.

        Args:
            allow_pickle: Pickle values that have no safe encoding, and unpickle them, which can run
                any code.
            background: As in `ckptstore.open`: how saves go on after `save` has returned. With
                `Async(executor="process")`, a process of its own finishes them, as theirs does.

        Example:
            >>> CheckpointManager.Config(storage_config=storage, background=Async(staging="lazy"))
        """

        allow_pickle: bool = False
        background: Async | None = None

        def build(self) -> "CheckpointManager":
            """A manager of this process."""
            return CheckpointManager(config=self)

        @classmethod
        def with_sync_save(cls) -> "CheckpointManager.Config":
            """`save` returns when the checkpoint is durable."""
            return cls(save=SyncCheckpointSaverConfig())

        @classmethod
        def with_async_save(cls) -> "CheckpointManager.Config":
            """`save` copies the state and returns."""
            return cls(save=AsyncCheckpointSaverConfig())

    def __init__(self, config: "CheckpointManager.Config | None" = None) -> None:
        self._config = config or CheckpointManager.Config()
        self._storage_config = _checked(self._config)
        self._schema = _CheckpointSchema(items=self._config.items, default=self._config.default)
        self._storage = self._storage_config.create_storage()
        self._rank, self._world = _rank_and_world()
        self._asynchronous = isinstance(self._config.save, AsyncCheckpointSaverConfig)
        self._store: ckptstore.Store | None = None
        self._write: _Write | None = None
        self._closed = False

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> "Future[Any] | None":
        """Commit the items. With several ranks, all of them call this.

        Returns a future of the durable commit, or None where saves are synchronous. What training
        writes to tensors after this call does not reach the checkpoint; with lazy staging, what it
        writes under `lock`.

        Raises:
            FileExistsError: A checkpoint of this name is there.
            CkptStoreError: The commit failed, or the save before it did and nobody asked.
        """
        self._check_open("save")
        state = self._values(checkpoint)
        background = self._config.background
        if self._write is not None and background is not None and background.goes_on:
            self._write.make_way(background.max_wait_s)
        else:
            self._settle()
        self._storage.check_new(Path(checkpoint_id))
        label = label_of(name_of(checkpoint_id))
        if self._store is None:
            self._store = ckptstore.open(
                self._storage_config.store,
                run=self._storage_config.run,
                background=self._config.background,
            )
        allow_pickle = self._config.allow_pickle
        if not self._asynchronous:
            self._store.commit(state, allow_pickle=allow_pickle, **label)
            self._finalize(checkpoint_id)
            return None
        pending = self._store.commit_async(state, allow_pickle=allow_pickle, **label)
        self._write = _Write(pending, lambda: self._finalize(checkpoint_id))
        return self._write

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Fill `into` in place and return it. A rank may call this alone, on any number of ranks.

        Items that are None, or all of `Config.items` without `into`, come back whole, as new
        objects; tensors that ranks shared out are whole. Directories, and checkpoints of
        torch_checkpointing's own manager on this store, are loaded by its own loader.

        Raises:
            FileNotFoundError: There is no such checkpoint, or it lacks an item, or what this rank
                had of its own.
            RuntimeError: `strict`, and it lacks parts of `into`.
            InvalidInput: A tensor of `into` has another shape or dtype; nothing was changed.
        """
        self._check_open("load")
        if into is None and not (into := dict.fromkeys(self._schema.items)):
            raise ValueError(
                "load requires into= (or a non-empty Config.items) to know which items to read"
            )
        values = self._values(into)
        snapshot = self._storage.saved_state(Path(checkpoint_id))
        if snapshot is None:
            return self._load_files(checkpoint_id, into, map_location, strict, metadata_format)
        if metadata_format is not None:
            raise InvalidInput(
                f"{checkpoint_id} has no files, and no metadata of {metadata_format!r}: leave "
                "metadata_format out"
            )
        keys = snapshot.keys()
        if absent := [key for key in values if key not in keys]:
            raise FileNotFoundError(
                f"{checkpoint_id} has no item {', '.join(absent)}; it has {', '.join(keys)}"
            )
        world = snapshot.layout.world if snapshot.layout else 1
        if snapshot.layout and self._rank < world:
            snapshot = snapshot.of_rank(self._rank)
        targets = {key: value for key, value in values.items() if value is not None}
        missing = self._fill(snapshot, targets)
        if missing and (strict or self._rank >= world):
            text = f"Checkpoint at {checkpoint_id} is missing keys: {missing}"
            if strict:
                raise RuntimeError(text)
            raise FileNotFoundError(f"{text}; {world} ranks saved it, and this is {self._rank}")
        return {
            key: targets[key] if key in targets else self._new(snapshot, key, map_location)
            for key in values
        }

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Check the items. The first save takes the memory of its copies."""
        self._check_open("prewarm staging")
        self._values(checkpoint)
        if self._write is not None and not self._write.done():
            raise RuntimeError("Cannot prewarm staging while a write is active")

    def lock(self) -> AbstractContextManager[Any]:
        """Wait until the state has been copied, which `save` did unless staging is lazy."""
        if self._write is not None:
            self._write.wait_copied()
        return nullcontext()

    def close(self) -> None:
        """Wait for the last save and close the store. Idempotent. Raises a failure unseen."""
        if self._closed:
            return
        try:
            self._settle()
        finally:
            self._closed = True
            if self._store is not None:
                self._store.close()

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise RuntimeError(f"Cannot {action} with a closed CheckpointManager")

    def _values(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        items = self._schema.build_items(payload, rank=self._rank)
        return dict(CheckpointInfo(checkpoint_items=items).state_dict)

    def _settle(self) -> None:
        """Wait for the save before, and raise its failure if nobody has seen it."""
        if self._write is not None and not self._write.seen:
            self._write.result(timeout=self._config.save.wait_timeout_secs)

    def _finalize(self, checkpoint_id: str) -> None:
        if self._config.finalize_callback is not None:
            self._config.finalize_callback(
                CallbackArgs(
                    path=str(checkpoint_id), storage=self._storage, event_logger=EventLogger()
                )
            )

    def _fill(self, snapshot: Snapshot, targets: dict[str, Any]) -> Sequence[str]:
        """Restore what `targets` ask for. Returns the paths that the commit lacks."""
        if not targets:
            return ()
        asked = _asked(targets)
        had = [leaf.path for leaf in snapshot.only(targets).leaves()]
        partly = not all(_asks(asked, path) for path in had)
        report = snapshot.restore(
            targets,
            strict=False,
            select=(lambda path: _asks(asked, path)) if partly else None,
            allow_pickle=self._config.allow_pickle,
            ranks=_ALONE,
        )
        return sorted({*report.missing, *_lacking(asked, _tree(had))})

    def _new(self, snapshot: Snapshot, key: str, map_location: Any) -> Any:
        value = snapshot.state_dict(key, allow_pickle=self._config.allow_pickle)
        if map_location is None:
            return value
        if not isinstance(map_location, str | torch.device):
            raise InvalidInput(
                f"map_location is a {type(map_location).__name__}; a checkpoint without files "
                "takes a device"
            )
        return tree_map(
            lambda leaf: leaf.to(map_location) if isinstance(leaf, torch.Tensor) else leaf, value
        )

    def _load_files(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any],
        map_location: Any,
        strict: bool,
        metadata_format: Any,
    ) -> Mapping[str, Any]:
        items = self._schema.build_items(into, rank=self._rank)
        if targetless := sorted(k for k, v in items.items() if v.resharder and v.value is None):
            raise ValueError(f"Resharding load requires a live target in into= for: {targetless}")
        ranks = RankInfo(self._rank, self._world, self._rank, self._world)
        reader = CheckpointReader(
            rank_info=ranks,
            storage_config=self._storage_config,
            disable_use_mmap_backed_storage_on_load=not self._config.load.use_mmap,
            storage=self._storage,
        )
        reshards = self._schema.has_resharder()
        metadata = DefaultMetadataManager(rank_info=ranks) if reshards else None
        loaded = _DictCheckpoint(items)
        try:
            CheckpointLoader(reader=reader, metadata_manager=metadata).load(
                checkpoint_id,
                loaded,
                default_map_location=map_location,
                strict=strict,
                metadata_format=metadata_format,
            )
        finally:
            if metadata is not None:
                metadata.close()
        return dict(loaded.result)


class _Write(Future[Any]):
    """The future of a save. `seen`: somebody has its outcome, so that no later call raises it."""

    def __init__(self, pending: PendingCommit, finalize: Callable[[], None]) -> None:
        super().__init__()
        self.seen = False
        self._finalize, self._pending = finalize, pending
        self.set_running_or_notify_cancel()
        pending.then(self._end)

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self._saw()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._saw()

    def _saw(self) -> None:
        if self.done():
            self.seen = self._pending.seen = True

    def make_way(self, timeout_s: float) -> None:
        """A newer save is to begin, which raises what the commit failed with, if that does not
        pass. Raises the failure of what follows it, unless somebody has seen that."""
        self._pending.supersede()
        with suppress(TimeoutError):  # the newer one is skipped
            error = super().exception(timeout_s)
            if error is not None and self._pending.failure() is None and not self.seen:
                self.seen = True
                raise error

    def wait_copied(self) -> None:
        """Wait until writes to the tensors do not reach the checkpoint. A failure waits for who
        asks for the outcome."""
        with suppress(Exception):
            self._pending.wait_staged()

    def _end(self, pending: PendingCommit) -> None:
        try:
            if (failure := pending.failure()) is not None:  # not seen by that
                raise failure
            self._finalize()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(pending.wait())


def _checked(config: CheckpointManager.Config) -> StoreStorageConfig:
    """The store of `config`. Raises `InvalidInput` for what needs files."""
    if not isinstance(config.storage_config, StoreStorageConfig):
        raise InvalidInput(
            f"storage_config is a {type(config.storage_config).__name__}; wanted a "
            "StoreStorageConfig"
        )
    if not isinstance(config.save, AsyncCheckpointSaverConfig | SyncCheckpointSaverConfig):
        raise TypeError(f"Unsupported saver_config type: {type(config.save).__name__}")
    for name in ("subprocess_init_fn", "pre_finalize_callback"):
        if getattr(config, name) is not None:
            raise InvalidInput(f"{name} is about written files: use torch_checkpointing's manager")
    specs: dict[str, ItemSpec | None] = {"default": config.default, **config.items}
    for key, spec in specs.items():
        if spec is not None and spec.layout is not None:
            raise InvalidInput(
                f"{key} has a layout, and no file is written: leave it out, or use "
                "torch_checkpointing's manager with this storage_config"
            )
        if spec is not None and not isinstance(spec.resharder, DefaultResharder | None):
            raise InvalidInput(
                f"{key} has a {type(spec.resharder).__name__}: a store reshards DTensors itself; "
                "leave it out, or use torch_checkpointing's manager with this storage_config"
            )
    return config.storage_config


def _rank_and_world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _asked(target: Mapping[Any, Any]) -> dict[str, _Template]:
    """The mappings of a target, by the segments of their keys; other values ask for all."""
    return {
        name: _asked(value) if isinstance(value, Mapping) else None
        for name, value in zip(segments(list(target)), target.values(), strict=True)
    }


def _asks(asked: _Template, path: str) -> bool:
    for part in path.split("/"):
        if asked is None:
            return True
        if part not in asked:
            return False
        asked = asked[part]
    return True


def _tree(paths: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in paths:
        place = root
        for part in path.split("/"):
            place = place.setdefault(part, {})
    return root


def _lacking(asked: Mapping[str, _Template], had: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """The paths of values that a target asks for, and that are not there."""
    for name, below in asked.items():
        if below is not None:
            yield from _lacking(below, had.get(name, {}), f"{at}{name}/")
        elif name not in had:
            yield f"{at}{name}"
