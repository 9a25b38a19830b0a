"""How does a checkpoint of another format become a commit?"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ckptstore.commit.commit_metadata import label_of
from ckptstore.core.options import Ranks
from ckptstore.core.text import redact, unicode_text
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import directory
from ckptstore.interop.formats.directory import INDEX_SUFFIX, SUFFIX
from ckptstore.snapshot import Snapshot
from ckptstore.state.leaf_sources import FlatState
from ckptstore.store import Store, internals_of

Kind: TypeAlias = Literal["files", "torch", "dcp", "torchsnapshot"]

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


@dataclass(frozen=True, slots=True)
class Labels:
    """Step, tags, message and metrics of an imported commit."""

    step: int | None = None
    tags: Sequence[str] = ()
    message: str = ""
    metrics: Mapping[str, float] | None = None


def import_path(
    store: Store,
    path: str | PathLike[str],
    labels: Labels | None = None,
    *,
    allow_pickle: bool = False,
) -> Snapshot:
    """Commit the checkpoint at `path`. Bytes go from the files into chunks a few MiB at a time;
    chunks in the store are not written again.

    Raises `InvalidInput` for a file that does not match its format, for names and offsets that lead
    elsewhere, and for pickles that could run code, unless `allow_pickle`. Raises `Unavailable` if
    files change meanwhile.
    """
    labels = labels or Labels()
    if "://" in os.fspath(path):
        raise InvalidInput(
            f"{redact(os.fspath(path))} is a URL; wanted a file or a directory of this host. "
            "`ckptstore pull` reads other stores"
        )
    place = Path(path)
    if kind_of(place) == "dcp":
        from ckptstore.interop.dcp import dcp_to_store

        names: dict[str, Any] = {
            "step": labels.step,
            "tag": labels.tags,
            "message": labels.message,
            "metrics": labels.metrics,
        }
        return dcp_to_store(place, store, **names, allow_pickle=allow_pickle)
    message = labels.message or f"imported from {unicode_text(place.name)}"
    internals = internals_of(store)
    request = internals.request(
        lambda: _flats(place, allow_pickle=allow_pickle),
        lambda: label_of(store.run, labels.step, labels.tags, message, labels.metrics),
        Ranks(),
    )
    return internals.committed(internals.commit(request, None))


def _flats(place: Path, *, allow_pickle: bool) -> Mapping[str, FlatState]:
    kind = kind_of(place)
    if kind == "files":
        return directory.flats_of(_plan(place))
    if kind == "torch":
        from ckptstore.interop.formats.pickles import load_torch
        from ckptstore.interop.formats.sources import as_app_state
        from ckptstore.state.flatten import flatten

        return flatten(
            as_app_state(load_torch(place, str(place), allow_pickle=allow_pickle)),
            allow_pickle=allow_pickle,
        )
    from ckptstore.interop.torchsnapshot import directory as torchsnapshot

    return torchsnapshot.read_directory(place, allow_pickle=allow_pickle)


def kind_of(place: Path) -> Kind:
    """The kind of checkpoint at `place`. Raises `InvalidInput` for a file of unknown kind, or
    none.
    """
    if place.is_dir():
        from ckptstore.interop.dcp import directory as dcp
        from ckptstore.interop.torchsnapshot import directory as torchsnapshot

        for kind, name in (("dcp", dcp.METADATA), ("torchsnapshot", torchsnapshot.METADATA)):
            if (place / name).is_file():
                return kind  # type: ignore[return-value]  # two of the literals
        return "files"
    if not place.is_file():
        raise InvalidInput(f"there is nothing at {place} that could be imported")
    if place.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return "files"
    if place.suffix in _TORCH_SUFFIXES:
        return "torch"
    raise InvalidInput(
        f"{place} is of no known format: wanted {SUFFIX}, {INDEX_SUFFIX}, "
        f"{', '.join(_TORCH_SUFFIXES)} or a directory"
    )


def _plan(place: Path) -> directory.DirectoryPlan:
    if place.is_dir():
        return directory.plan_directory(place)
    if place.name.endswith(INDEX_SUFFIX):
        return directory.plan_files(
            [place, *(place.parent / name for name in directory.indexed_names(place))]
        )
    if directory.has_other_shards(place):
        raise InvalidInput(
            f"{place} is one of several shards, which are a checkpoint together only; import their "
            f"directory, {place.parent}"
        )
    return directory.plan_files([place])
