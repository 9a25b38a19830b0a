"""The store and the commit that a DCP call means.

A `checkpoint_id` that is a path (absolute, or beginning with `./` or `../`, or a `Path`) is a
directory with a pointer file instead of DCP's `.metadata`; digits are a step; other text is a tag.
All three are refs, so `dcp.load` finds what `dcp.save` was given.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ckptstore.core.ids import CONFIG_KEY, check_tag
from ckptstore.core.options import Storage
from ckptstore.core.text import redact
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.interop.formats.sources import DCP_METADATA
from ckptstore.objects.pointer_files import is_pointer
from ckptstore.open_store import open
from ckptstore.repository.resolve_ref import AnyRef, is_path
from ckptstore.store import Store, internals_of

CheckpointId: TypeAlias = str | os.PathLike[str]


class Releasable(Protocol):
    def release(self) -> None: ...


Work = TypeVar("Work", bound=Releasable)
"""A save or a load."""


class AtPlace(Generic[Work]):
    """Shared by `StoreWriter` and `StoreReader`: the location of a checkpoint, and each thread's
    save or load in progress.

    The store is open, or is opened for each save or load. DCP makes all calls of a save or load on
    one thread, and those of `async_save` on another. It sends this object to another process,
    where its store is opened again. A name given on the thread that made this object holds on every
    thread that gives none.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        run: str | None,
        storage_options: Mapping[str, Any] | None,
        index: str | None,
    ) -> None:
        super().__init__()
        self._store = store if isinstance(store, Store) else None
        place: str | os.PathLike[str]
        if isinstance(store, Store):
            if run is not None or storage_options is not None or index is not None:
                raise InvalidInput(
                    "run, storage_options and index are those of the open store; leave them out, "
                    "or pass its path"
                )
            internals = internals_of(store)
            place, run = internals.handle.place, store.run
            storage_options, index = internals.settings.storage_options, internals.settings.index
        else:
            place = os.fspath(store)
        self._arguments: dict[str, Any] = {
            "place": place,
            "run": run,
            "storage": Storage(options=storage_options, index=index),
        }
        self._name: CheckpointId | None = None
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.local()
        self._maker = threading.get_ident()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_thread", "_saves")
        state = {key: value for key, value in self.__dict__.items() if key not in own}
        return {**state, "_store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _opened(
        self, *, create: bool = False, read_only: bool = False
    ) -> tuple[Store, Callable[[], None]]:
        """The store, and a function that closes it if it was opened here. Idempotent."""
        if self._store is not None:
            return self._store, lambda: None
        store = open(**self._arguments, create=create, read_only=read_only)
        return store, store.close

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The name of this thread's next save or load; by default the store's location."""
        return redact(str(self._arguments["place"])) if self._named is None else self._named

    @property
    def _named(self) -> CheckpointId | None:
        name: CheckpointId | None = getattr(self._thread, "name", self._name)
        return name

    @property
    def _work(self) -> Work | None:
        """This thread's save or load in progress."""
        return getattr(self._thread, "work", None)

    def _rename(self, name: CheckpointId | None) -> None:
        if threading.get_ident() == self._maker:
            self._name = name
        self._thread.name = name

    def _start(self, work: Work) -> None:
        """Begin this thread's save or load, whose name stays as it is."""
        self._thread.name, self._thread.work = self._named, work

    def _drop(self) -> None:
        """End this thread's save or load."""
        work, self._thread.work = self._work, None
        if work is not None:
            work.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether `checkpoint_id` can name a commit."""
        try:
            Name.of(checkpoint_id)
        except InvalidInput:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a save: a tag, a step, or a directory with the pointer file in it; possibly
    none.
    """

    tag: str | None = None
    step: int | None = None
    directory: Path | None = None
    file: str = DCP_METADATA

    @classmethod
    def of(cls, checkpoint_id: CheckpointId | None) -> "Name":
        """Parse a `checkpoint_id`. Raises `InvalidInput` for text that cannot be a tag."""
        if checkpoint_id is None or checkpoint_id == "":
            return cls()
        if is_path(checkpoint_id):
            return cls(directory=Path(checkpoint_id))
        text = os.fspath(checkpoint_id)
        return cls(step=int(text)) if text.isdecimal() else cls(tag=check_tag(text))

    def of_rank(self, rank: int) -> "Name":
        """The name of rank `rank`'s part, if ranks save without coordination."""
        tag = self.tag and of_rank(self.tag, rank)
        return Name(tag, self.step, self.directory, f"__{rank}{DCP_METADATA}")

    @property
    def pointer(self) -> Path | None:
        """The path of the pointer file; an earlier version's pointer at the path itself counts.
        Raises `Conflict` for any other file there.
        """
        if self.directory is None:
            return None
        is_file = os.path.lexists(self.directory) and not self.directory.is_dir()
        pointer = self.directory if is_file else self.directory / self.file
        if (os.path.lexists(pointer) and not is_pointer(pointer)) or (
            self.directory / CONFIG_KEY
        ).exists():
            raise Conflict(
                f"{self.directory} exists and is not a checkpoint of ckptstore; give another "
                "checkpoint_id, or remove it"
            )
        return pointer


def of_rank(label: str, rank: int) -> str:
    """The run or tag of one rank's save without coordination."""
    return f"{label}/rank-{rank}"


def ref_of_rank(ref: AnyRef, run: str, rank: int) -> AnyRef:
    """The ref of rank `rank`'s save without coordination, given the whole's `ref`. A commit id has
    no such ref.
    """
    if is_path(ref):
        # a path (`is_path`)
        return Path(os.fspath(ref)) / Name().of_rank(rank).file  # type: ignore[arg-type]
    if isinstance(ref, int):
        return f"{of_rank(run, rank)}@{ref}"
    if not isinstance(ref, str):
        return ref
    named, at, base = ref.rpartition("@")
    if base == "latest" or base.isdecimal() or base.startswith(("latest~", "best:")):
        return f"{of_rank(named if at else run, rank)}@{base}"
    return of_rank(ref, rank)
