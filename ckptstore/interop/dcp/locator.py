"""Which store and commit does a DCP call mean, and under which session do its ranks write?

A `checkpoint_id` that is a path (absolute, or beginning with `./` or `../`, or a `Path`) is a
directory with a pointer file instead of DCP's `.metadata`; digits are a step; other text is a tag.
All three are refs, so `dcp.load` finds what `dcp.save` was given.

The coordinator opens one session for each save and puts it into every rank's plan. With plan
caching, DCP hands a rank the plan of an earlier save, with that save's session. Then the rank reads
the session from torch.distributed's store: the coordinator put it there, under the save's name,
before DCP sent the plans. Nothing is pickled, and no rank waits for another. A wrong session is
detected when the coordinator finishes, since the receipts bear another one.
"""

import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist

from ckptstore.core.ids import CONFIG_KEY, SessionId, check_tag, digest, parse_session_id
from ckptstore.core.options import Storage
from ckptstore.core.text import redact
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.interop.dcp.directory import METADATA as DCP_METADATA
from ckptstore.objects.pointer_files import is_pointer
from ckptstore.open_store import open
from ckptstore.repository.resolve_ref import AnyRef, is_path
from ckptstore.store import Store, internals_of

CheckpointId: TypeAlias = str | os.PathLike[str]
Work = TypeVar("Work")
"""A save or a load."""


class StorePlace:
    """A store that is open, or is opened on demand. Its pickle is its location: DCP sends it to
    another process.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        run: str | None,
        storage_options: Mapping[str, Any] | None,
        index: str | None,
    ) -> None:
        if isinstance(store, Store):
            if run is not None or storage_options is not None or index is not None:
                raise InvalidInput(
                    "run, storage_options and index are those of the open store; leave them out, "
                    "or pass its path"
                )
            self._arguments, self._owned = internals_of(store).reopen_arguments, False
        else:
            self._arguments = {
                "place": os.fspath(store),
                "run": run,
                "storage": Storage(options=storage_options, index=index),
            }
            self._owned = True
        # not owned: the caller's Store
        self._store: Store | None = None if self._owned else store  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._arguments, self._owned = state, True
        self._store = None

    def __str__(self) -> str:
        return redact(str(self._arguments["place"]))

    def another(self) -> "StorePlace":
        """The same location, opened and closed on its own for one save or load, unless the store
        was given open.
        """
        place = StorePlace.__new__(StorePlace)
        place._arguments, place._owned = self._arguments, self._owned
        place._store = None if self._owned else self._store
        return place

    def store(self, *, create: bool = False, read_only: bool = False) -> Store:
        """The store, opened on demand."""
        if self._store is None:
            self._store = open(**self._arguments, create=create, read_only=read_only)
        return self._store

    def close(self) -> None:
        """Close the store if it was opened here."""
        if self._owned and self._store is not None:
            store, self._store = self._store, None
            store.close()


_OF_THIS_PROCESS = ("_home", "_here", "_named", "_work", "_saves")
"""Attributes that are not sent to another process of DCP's."""


class AtPlace(Generic[Work]):
    """Shared by `StoreWriter` and `StoreReader`: the location of a checkpoint, and the saves or
    loads in progress.

    DCP makes all calls of a save or load on one thread, and those of `async_save` on another. So
    each thread has its own name and its own save or load in progress. A thread without one uses
    those of the thread that made this object.
    """

    def __init__(self, place: StorePlace) -> None:
        super().__init__()
        self._place = place
        self._begin()

    def _begin(self) -> None:
        """Clear the state; later calls belong to this thread unless another thread begins its own
        work.
        """
        self._home = threading.get_ident()
        self._here = threading.local()
        self._named: CheckpointId | None = None
        self._work: Work | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}
        return {**state, "_checkpoint_id": self._checkpoint_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        named = state.pop("_checkpoint_id")
        self.__dict__.update(state)
        self._begin()
        self._name_it(named)

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The name of this thread's next save or load; by default the store's location."""
        return self._checkpoint_id if self._checkpoint_id is not None else str(self._place)

    @property
    def _checkpoint_id(self) -> CheckpointId | None:
        return getattr(self._here, "name", self._named)

    def _name_it(self, checkpoint_id: CheckpointId | None) -> None:
        self._here.name = checkpoint_id
        if self._is_home:
            self._named = checkpoint_id

    @property
    def _is_home(self) -> bool:
        return threading.get_ident() == self._home

    @property
    def _current(self) -> Work | None:
        """The save or load in progress for a call on this thread."""
        return getattr(self._here, "work", self._work)

    def _begin_with(self, work: Work | None) -> Work | None:
        """Make `work` this thread's own; returns the thread's previous work."""
        before: Work | None = getattr(self._here, "work", None)
        self._here.work = work
        if self._is_home:
            self._work = work
        return before

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether `checkpoint_id` can name a commit."""
        return can_name(checkpoint_id)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a save: a tag, a step, or a directory with the pointer file in it; possibly
    none.
    """

    tag: str | None = None
    step: int | None = None
    directory: Path | None = None
    file: str = DCP_METADATA

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
                f"{self.directory} is there and has no pointer of ckptstore; give another "
                "checkpoint_id, or remove it"
            )
        return pointer


def name_of(checkpoint_id: CheckpointId | None) -> Name:
    """Parse a `checkpoint_id`. Raises `InvalidInput` for text that cannot be a tag."""
    if checkpoint_id is None or checkpoint_id == "":
        return Name()
    if is_path(checkpoint_id):
        return Name(directory=Path(checkpoint_id))
    text = os.fspath(checkpoint_id)
    return Name(step=int(text)) if text.isdecimal() else Name(tag=check_tag(text))


def can_name(checkpoint_id: CheckpointId) -> bool:
    """Whether `checkpoint_id` can name a commit."""
    try:
        name_of(checkpoint_id)
    except InvalidInput:
        return False
    return True


def name_of_rank(name: Name, rank: int) -> Name:
    """The name of rank `rank`'s part, if ranks save without coordination."""
    tag = name.tag and of_rank(name.tag, rank)
    return Name(tag, name.step, name.directory, f"__{rank}{DCP_METADATA}")


def of_rank(label: str, rank: int) -> str:
    """The run or tag of one rank's save without coordination."""
    return f"{label}/rank-{rank}"


def ref_of_rank(ref: AnyRef, run: str, rank: int) -> AnyRef:
    """The ref of rank `rank`'s save without coordination, given the whole's `ref`. A commit id has
    no such ref.
    """
    if is_path(ref):
        # a path (`is_path`)
        return Path(os.fspath(ref)) / name_of_rank(Name(), rank).file  # type: ignore[arg-type]
    if isinstance(ref, int):
        return f"{of_rank(run, rank)}@{ref}"
    if not isinstance(ref, str):
        return ref
    named, at, base = ref.rpartition("@")
    if base == "latest" or base.isdecimal() or base.startswith(("latest~", "best:")):
        return f"{of_rank(named if at else run, rank)}@{base}"
    return of_rank(ref, rank)


K = TypeVar("K")
V = TypeVar("V")

_KEY = "ckptstore/dcp/{}"
_REMEMBERED = 1 << 12

_series = secrets.token_hex(8)
"""Identifies this process as a coordinator."""

_announced: "OrderedDict[str, SessionId]" = OrderedDict()
_written: "OrderedDict[tuple[SessionId, int], None]" = OrderedDict()
_lock = threading.Lock()


class Assignment(NamedTuple):
    """The coordinator's addition to a rank's plan: its own identity, and the session of this
    save.
    """

    series: str
    session: SessionId


def assign(session: SessionId, name: str) -> Assignment:
    """The assignment of a session that this process, as coordinator, has opened for the save called
    `name`.
    """
    for key in _keys(_series, name):
        with _lock:
            _remember(_announced, key, session)
        if dist.is_available() and dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(key, session)
    return Assignment(_series, session)


def session_of(assigned: object, rank: int, name: str) -> SessionId:
    """The session of this save for rank `rank`, from its plan.

    If the plan is that of an earlier save, returns the coordinator's newest session for `name`, or
    for any name if that is unknown. Raises `InvalidInput` for a plan without an assignment.
    """
    if not isinstance(assigned, tuple) or len(assigned) != 2:
        raise InvalidInput(
            "the plan has lost its storage_data, by which ranks meet; a planner must keep it: use "
            "dataclasses.replace"
        )
    series, session = assigned
    with _lock:
        is_earlier = (session, rank) in _written
    if is_earlier:
        session = _newest(_keys(series, name))
    with _lock:
        _remember(_written, (parse_session_id(session), rank), None)
    return parse_session_id(session)


def _keys(series: str, name: str) -> tuple[str, str]:
    """The keys under which a session is announced: for saves of that name, which may overlap, and
    for any.
    """
    return _KEY.format(f"{series}/{digest(name.encode()).hex()[:16]}"), _KEY.format(series)


def _newest(keys: Sequence[str]) -> str:
    with _lock:
        found = next((_announced[key] for key in keys if key in _announced), None)
    if found is not None:
        return found
    store = dist.distributed_c10d._get_default_store()
    key = next((key for key in keys[:-1] if store.check([key])), keys[-1])
    return bytes(store.get(key)).decode()


def _remember(memory: "OrderedDict[K, V]", key: K, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
