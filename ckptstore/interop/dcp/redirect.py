"""How does a library that hard-codes DCP's own writer and reader come to use a store? `redirect`.

    with redirect(store):
        library.save(model, "out/step-100")  # dcp.save(…, checkpoint_id="out/step-100")

Within the block, a `FileSystemWriter` or `FileSystemReader` that anybody makes, under whatever name
it was imported, becomes one that delegates to `StoreWriter` or `StoreReader`. DCP makes one for a
`checkpoint_id` as well. So the constructors are the one place to patch; `async_save`, which makes
its writer on another thread and later, gets it from the thread that calls.

A directory without a pointer, which DCP itself wrote, is read by DCP.
"""

import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

try:
    from torch.distributed.checkpoint import FsspecWriter  # type: ignore[attr-defined]
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from ckptstore import Store
from ckptstore.errors import InvalidInput
from ckptstore.interop.dcp.names import Name
from ckptstore.interop.dcp.reader import StoreReader
from ckptstore.interop.dcp.writer import StoreWriter
from ckptstore.plugin.text import unicode_text
from ckptstore.plugin.work import forks

__all__ = ["redirect"]

logger = logging.getLogger("ckptstore")

PICKLE = b"\x80"
"""The first byte of DCP's own `.metadata`; that of a pointer file is a brace."""

_EXECUTORS = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")
"""Where `async_save` hands a save to another thread. torch before 2.7 makes the writer before."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """One `redirect` block: where it saves, and the thread that entered it."""

    store: Store | str | os.PathLike[str]
    run: str | None
    label: Mapping[str, Any]
    allow_pickle: bool
    thread: int

    def writer(self, directory: Path, *, overwrite: bool = True) -> StoreWriter:
        message = self.label["message"] or f"saved as {unicode_text(str(directory))}"
        writer = StoreWriter(
            self.store,
            run=self.run,
            allow_pickle=self.allow_pickle,
            overwrite=overwrite,
            **{**self.label, "message": message},
        )
        writer.reset(directory)
        return writer

    def reader(self, directory: Path) -> StoreReader:
        """DCP's own reader casts, and libraries rely on it."""
        reader = StoreReader(self.store, run=self.run, cast=True, allow_pickle=self.allow_pickle)
        reader.reset(directory)
        return reader


_scopes: list[_Scope] = []
_lock = forks.lock()
_patches = ExitStack()


@contextmanager
def redirect(
    store: Store | str | os.PathLike[str],
    *,
    run: str | None = None,
    step: int | None = None,
    tag: str | Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    message: str = "",
    allow_pickle: bool = False,
) -> Iterator[None]:
    """Within the block, DCP saves to `store` and loads from it, also where a library makes DCP's
    `FileSystemWriter` and `FileSystemReader` or names a `checkpoint_id`.

    The directory that was named gets a pointer file as `.metadata` and no tensors. A load of a
    directory without one, which DCP wrote, is left to DCP. Other writers and readers (Hugging
    Face's, fsspec's for URLs, your own), and a `FileSystemWriter` that was made before the block,
    do what they always do.

    Blocks nest: the innermost counts. A thread that entered none uses the newest block of any
    thread, since trainers save on threads of their own. An `async_save` that was called within the
    block goes to its store, also if it ends later. All ranks enter the block.

    Args:
        store: An open store, or its path or URL, opened for each save and load. It must stay open
            until asynchronous saves have ended.
        run: The run of the commits, where `store` is a path.
        step, tag, metrics, message: Of each commit that is made within the block.
        allow_pickle: Pickle objects that have no safe encoding, and read such.

    Raises:
        InvalidInput: `run` was given with an open store. Within the block: a writer was asked for
            stream extensions or another file format.

    Example:
        >>> with redirect("checkpoints", step=100):
        ...     dcp.save(state_dict, checkpoint_id="out/step-100")
    """
    label = {"step": step, "tag": tag, "metrics": metrics, "message": message}
    scope = _Scope(store, run, label, allow_pickle, threading.get_ident())
    scope.writer(Path())  # raises what is wrong with the arguments
    with _lock:
        if not _scopes:
            _patch()
        _scopes.append(scope)
    try:
        yield
    finally:
        with _lock:
            _scopes[:] = [other for other in _scopes if other is not scope]
            if not _scopes:
                _patches.close()


def _innermost() -> _Scope | None:
    own = threading.get_ident()
    with _lock:
        found = [scope for scope in _scopes if scope.thread == own] or _scopes
        return found[-1] if found else None


class RedirectedWriter(FileSystemWriter):
    """A `FileSystemWriter` that was made within `redirect`: its saves are commits."""

    _writer: StoreWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._writer.reset(_directory(self))

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._writer.set_up_storage_writer(*args, **kwargs)

    def storage_meta(self) -> Any:
        return self._writer.storage_meta()

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._writer.write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._writer.finish(metadata, results)
        self.save_id = self._writer.save_id or self.save_id


class RedirectedReader(FileSystemReader):
    """A `FileSystemReader` that was made within `redirect`: it reads a commit where the directory
    has a pointer, and else DCP's files."""

    _scope: _Scope
    _reader: StoreReader | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._aim()

    def _aim(self) -> None:
        directory = _directory(self)
        self._reader = self._scope.reader(directory) if _has_pointer(directory) else None

    @property
    def _source(self) -> Any:
        return self._reader or super()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = self._source.read_metadata(*args, **kwargs)
        if self._reader:
            self.load_id = self._reader.load_id
        return metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        self._source.set_up_storage_reader(*args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._source.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self._source.prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        return self._source.read_data(plan, planner)


def _directory(storage: FileSystemWriter | FileSystemReader) -> Path:
    return Path(storage.path).absolute()


def _has_pointer(directory: Path) -> bool:
    """Whether the checkpoint at `directory` is a pointer, possibly a damaged one."""
    names = (Name.of(directory).file, Name.of(directory).of_rank(0).file)
    for path in (directory, *(directory / name for name in names)):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(1) != PICKLE
    return False


def _redirect_writer(made: Any, scope: _Scope, given: Mapping[str, Any]) -> None:
    kind = given["serialization_format"].value if "serialization_format" in given else "torch_save"
    if given.get("_extensions") or kind != "torch_save":
        raise InvalidInput(
            f"{made.path} is to be written with stream extensions or as {kind}, which a store does "
            "not take: save it outside of redirect, or without; compression is the store's "
            "Storage(codec=), and `ckptstore export` writes other formats"
        )
    made._writer = scope.writer(_directory(made), overwrite=given["overwrite"])
    made.__class__ = RedirectedWriter


def _redirect_reader(made: Any, scope: _Scope, given: Mapping[str, Any]) -> None:
    made._scope = scope
    made.__class__ = RedirectedReader
    made._aim()


def _patch() -> None:
    """Patch what makes writers and readers, until `_patches` is closed."""
    _patch_constructor(FileSystemWriter, _redirect_writer)
    _patch_constructor(FileSystemReader, _redirect_reader)
    for executor in filter(None, (getattr(state_dict_saver, name, None) for name in _EXECUTORS)):
        _replace(executor, "execute_save", _with_writer)


_Change: TypeAlias = Callable[[Any, _Scope, Mapping[str, Any]], None]


def _patch_constructor(cls: Any, change: _Change) -> None:
    def changing(init: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(init)

        @wraps(init)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if (scope := _innermost()) is None:
                return
            if type(self) is cls:
                given = signature.bind(self, *args, **kwargs)
                given.apply_defaults()
                change(self, scope, given.arguments)
            elif isinstance(self, FsspecWriter):
                logger.warning(
                    "%s is written there, and not to a store: redirect takes directories of this "
                    "host, where a pointer can lie",
                    self.path,
                )

        return construct

    _replace(cls, "__init__", changing)


def _with_writer(execute_save: Callable[..., Any]) -> Callable[..., Any]:
    """`execute_save`, given the writer of the block in which `async_save` was called: the other
    thread would make one when the block may have ended."""

    @wraps(execute_save)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: Any = kwargs.get("checkpoint_id")
        to_directory = place and FileSystemWriter.validate_checkpoint_id(place)
        if to_directory and not kwargs.get("storage_writer") and _innermost():
            kwargs["storage_writer"] = FileSystemWriter(place)
        return execute_save(self, *args, **kwargs)

    return execute


def _replace(cls: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = cls.__dict__[name]
    setattr(cls, name, change(original))
    _patches.callback(setattr, cls, name, original)
