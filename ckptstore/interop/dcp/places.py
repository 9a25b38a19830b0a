"""Which store, and which commit in it: what `StoreWriter` and `StoreReader` were given, and what DCP calls a checkpoint's id.

A `checkpoint_id` that is a path (absolute, or beginning with `./` or `../`, or a `Path`) is a pointer file there; digits are a step; other
text is a tag. All three are refs, so what `dcp.save` was given, `dcp.load` finds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ckptstore.access import open
from ckptstore.core.ids import check_tag
from ckptstore.core.secrets import redact
from ckptstore.engine.naming import AnyRef, is_path
from ckptstore.errors import InvalidInput
from ckptstore.store import Store

CheckpointId: TypeAlias = str | os.PathLike[str]


class StorePlace:
    """A store that is open, or is opened when it is needed. Pickled, it is its place: DCP sends it to a process of its own."""

    def __init__(
        self, store: Store | str | os.PathLike[str], *, run: str | None, storage_options: Mapping[str, Any] | None, index: str | None
    ) -> None:
        if isinstance(store, Store):
            if run is not None or storage_options is not None or index is not None:
                raise InvalidInput("run, storage_options and index are those of the open store; leave them out, or pass its path")
            self._arguments, self._owned = store.reopening, False
        else:
            self._arguments = {"place": os.fspath(store), "run": run, "storage_options": storage_options, "index": index}
            self._owned = True
        self._store: Store | None = None if self._owned else store  # type: ignore[assignment]  # not owned: a Store

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._arguments, self._owned = state, True
        self._store = None

    def __str__(self) -> str:
        return redact(str(self._arguments["place"]))

    def store(self, *, create: bool = False, read_only: bool = False) -> Store:
        """The store, opened if it is not."""
        if self._store is None:
            self._store = open(**self._arguments, create=create, read_only=read_only)
        return self._store

    def close(self) -> None:
        """Close the store if it was opened here."""
        if self._owned and self._store is not None:
            store, self._store = self._store, None
            store.close()


class AtPlace:
    """What `StoreWriter` and `StoreReader` say alike of where a checkpoint is."""

    _place: StorePlace
    _checkpoint_id: CheckpointId | None = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """What the next save or load was told to be of; the store's place where nobody said."""
        return self._checkpoint_id if self._checkpoint_id is not None else str(self._place)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether `checkpoint_id` can name a commit."""
        return can_name(checkpoint_id)


@dataclass(frozen=True, slots=True)
class Name:
    """What a save is to be called: a tag, a step or a pointer file; nothing of these perhaps."""

    tag: str | None = None
    step: int | None = None
    pointer: Path | None = None


def name_of(checkpoint_id: CheckpointId | None) -> Name:
    """What a `checkpoint_id` says. Raises `InvalidInput` for text that can be no tag."""
    if checkpoint_id is None or checkpoint_id == "":
        return Name()
    if is_path(checkpoint_id):
        return Name(pointer=Path(checkpoint_id))
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
    """What the part of rank `rank` is called, where ranks save without coordination."""
    tag = name.tag and of_rank(name.tag, rank)
    return Name(tag, name.step, name.pointer and name.pointer.with_name(f"{name.pointer.name}.rank-{rank}"))


def of_rank(label: str, rank: int) -> str:
    """The run, or the tag, of what one rank saved without coordination."""
    return f"{label}/rank-{rank}"


def ref_of_rank(ref: AnyRef, run: str, rank: int) -> AnyRef:
    """The ref of what rank `rank` saved without coordination, where `ref` is that of the whole. A commit's id is no ref of a whole."""
    if is_path(ref):
        return name_of_rank(Name(pointer=Path(os.fspath(ref))), rank).pointer or ref  # type: ignore[arg-type]  # a path, as is_path says
    if isinstance(ref, int):
        return f"{of_rank(run, rank)}@{ref}"
    if not isinstance(ref, str):
        return ref
    named, at, base = ref.rpartition("@")
    if base == "latest" or base.isdecimal() or base.startswith(("latest~", "best:")):
        return f"{of_rank(named if at else run, rank)}@{base}"
    return of_rank(ref, rank)
