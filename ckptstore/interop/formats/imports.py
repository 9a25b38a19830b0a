"""Import checkpoints of other formats.

A directory or a safetensors file is adopted (`ckptstore.plugins.adopt`), but strictly: safetensors
files must be valid and fit together, and links to files are followed.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from ckptstore import Store
from ckptstore.errors import InvalidInput, NotFound, Unavailable
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugin.stores import commit_leaves, threads_of
from ckptstore.plugin.text import count_text, redact, unicode_text
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugin.writing import Flats, label_of
from ckptstore.plugins.adopt.adopting import DCP_SHARD, SUFFIX, group_of, state_of
from ckptstore.plugins.adopt.directory import Folder, Identity, ListedFile, Listing
from ckptstore.plugins.adopt.manifest import RESERVED
from ckptstore.plugins.foreign.kinds import file_kind, is_safetensors, load_torch
from ckptstore.plugins.foreign.loaded import (
    DCP_METADATA,
    SNAPSHOT_METADATA,
    as_app_state,
    foreign_metadata,
    inside,
    read_json,
)
from ckptstore.plugins.foreign.sources import Entry, Window, check_tiling, read_range, shape_around
from ckptstore.plugins.parsers.indexes import ONNX_SUFFIX
from ckptstore.plugins.parsers.onnx_files import onnx_entries
from ckptstore.plugins.parsers.safetensors_header import Header, read_header

_logger = logging.getLogger("ckptstore")

Kind: TypeAlias = Literal["files", "torch", "dcp", "torchsnapshot"]

INDEX_SUFFIX = ".safetensors.index.json"

_SKIPPED = frozenset({".git", ".cache"})
"""Private files that tools keep beside a model."""


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

    Raises `NotFound` if nothing is at `path`; `InvalidInput` for a file that does not match its
    format, for names and offsets that lead elsewhere, and for pickles that could run code, unless
    `allow_pickle`; `Unavailable` if files change during the import.
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

        return dcp_to_store(
            place,
            store,
            step=labels.step,
            tag=labels.tags,
            metrics=labels.metrics,
            message=labels.message,
            allow_pickle=allow_pickle,
        )
    message = labels.message or f"imported from {unicode_text(place.name)}"
    return commit_leaves(
        store,
        lambda: _flats(place, threads_of(store), allow_pickle=allow_pickle),
        lambda: label_of(store.run, labels.step, labels.tags, message, labels.metrics),
    )


def _flats(place: Path, threads: ThreadPool, *, allow_pickle: bool) -> Flats:
    kind = kind_of(place)
    if kind == "files":
        flats = flats_of(place, threads)
        if place.is_file() and not any("tensor" in each.schema.kinds for each in flats.values()):
            _logger.warning(
                "%s is kept as it is: no tensors were found in it (compressed archives and damaged "
                "files have none)",
                place,
            )
        return flats
    if kind == "torch":
        from ckptstore.plugin.values import flatten

        return flatten(
            as_app_state(load_torch(place, str(place), allow_pickle=allow_pickle)),
            allow_pickle=allow_pickle,
        )
    from ckptstore.interop.torchsnapshot.reading import read_directory

    return read_directory(place, allow_pickle=allow_pickle)


def kind_of(place: Path) -> Kind:
    """The kind of checkpoint at `place`: of a file by its bytes, of safetensors also by its name.
    Raises `NotFound` if nothing is there, `InvalidInput` for a file of unknown kind, saying what it
    is.
    """
    if not os.path.exists(place):
        raise NotFound(f"there is nothing at {place} that could be imported")
    if (place / DCP_METADATA).is_file():
        return "dcp"
    if (place / SNAPSHOT_METADATA).is_file():
        return "torchsnapshot"
    if place.is_dir():
        return "files"
    if not place.is_file():
        raise InvalidInput(f"{place} is neither a file nor a directory, so it cannot be imported")
    named = place.name.endswith((SUFFIX, INDEX_SUFFIX, ONNX_SUFFIX))
    return "files" if named else file_kind(place)


def _files_at(place: Path) -> dict[str, Path]:
    """The files to read, by relative name: of a directory, of an index with its shards, of an
    ONNX model with its weights, or one.

    All files below a directory are read. Links to files are followed, since Hugging Face's cache
    consists of them; links to directories are not. Raises `InvalidInput` for an entry that is
    neither file nor directory, for an index that names other files, and for one shard of several.
    """
    if place.is_dir():
        files = dict(sorted(_walk(place)))
        if not files:
            raise InvalidInput(f"{place} has no files to import")
        for name, path in files.items():
            if name.endswith(INDEX_SUFFIX):
                _indexed_names(path)
        return files
    if place.name.endswith(INDEX_SUFFIX):
        names = sorted([place.name, *_indexed_names(place)])
        return {name: place.parent / name for name in names}
    if place.name.endswith(ONNX_SUFFIX):
        return {name: place.parent / name for name in (place.name, *_external_names(place))}
    if place.name.endswith(SUFFIX) and _has_other_shards(place):
        raise InvalidInput(
            f"{place} is one of several shards, which are a checkpoint together only; import their "
            f"directory, {place.parent}"
        )
    return {place.name: place}


def _indexed_names(index: Path) -> list[str]:
    """The names of the files with the tensors, from an index; all lie beside it. Raises
    `InvalidInput`.
    """
    with foreign_metadata(index, "an index of safetensors files"):
        found = read_json(index)["weight_map"]
        names = sorted({str(name) if isinstance(name, str) else "" for name in found.values()})
    for name in names:
        if "/" in name or not name:
            raise InvalidInput(
                f"{index} names {name[:80]!r}, which is not the name of a file beside it"
            )
        # Hugging Face's cache consists of links, and the user chose to import from there: only the
        # name is checked.
        if not (index.parent / name).is_symlink():
            inside(index.parent, name)
    return names


def _external_names(model: Path) -> list[str]:
    """The names of the files beside an ONNX model that have its other weights. Raises
    `InvalidInput` if they lie elsewhere, or if the model is damaged."""
    window = Window(partial(read_range, model), 0, model.stat().st_size)
    try:
        names = sorted(onnx_entries(window, model.name).keys() - {model.name})
    except Exception as error:  # a forged file may raise anything
        raise InvalidInput(
            f"{model} is not an ONNX model, or is damaged ({error}); `ckptstore adopt "
            f"{model.parent}` commits the directory that it is in, any file byte for byte"
        ) from error
    for name in names:
        if "/" in name or not (model.parent / name).is_file():
            raise InvalidInput(
                f"{model} has weights in {name[:80]!r}, which is not the name of a file beside it; "
                "copy that file there, or import the directory that has both"
            )
    return names


def flats_of(place: Path, threads: ThreadPool) -> Flats:
    """The application state of a directory or file: as adopted, but each safetensors file is
    valid, and they fit together. Raises `InvalidInput` otherwise, and as `_files_at`."""
    files = _files_at(place)
    headers = {
        name: read_header(path)
        for name, path in files.items()
        if name.endswith(SUFFIX) or (path == place and _begins_as_safetensors(path))
    }
    _check_parts(headers)
    _check_groups(files, headers)
    root = place if place.is_dir() else place.parent
    folders = {above for name in files for above in _above(name)}
    listed = {name: _folder(root / name) for name in sorted(folders)}
    return state_of(
        Listing(listed, {}, {name: _listed(path) for name, path in files.items()}), threads
    )


def _listed(path: Path) -> ListedFile:
    """The file that a path leads to now."""
    real = path.resolve()
    try:
        return ListedFile(real, Identity.of(real.stat()))
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}") from error


def _begins_as_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return is_safetensors(file.read(9))


def _above(name: str) -> Iterable[str]:
    while name:
        name = name.rpartition("/")[0]
        yield name


def _folder(path: Path) -> Folder:
    status = path.stat()
    return Folder(status.st_mode & 0o7777, status.st_mtime_ns)


def _check_groups(files: Mapping[str, Path], headers: Mapping[str, Header]) -> None:
    """Raise `InvalidInput` unless the tensors of files that belong together do."""
    groups: dict[str, dict[str, list[tuple[str, Entry]]]] = {}
    for name, header in headers.items():
        group = groups.setdefault(group_of(name, header.entries), {})
        for entry in header.entries:
            group.setdefault(entry.name, []).append((name, entry))
    if len(groups) > 1 and (taken := next((key for key in RESERVED if key in groups), None)):
        raise InvalidInput(
            f"tensors of {taken}{SUFFIX} would be under the key {taken!r}, which is taken; rename "
            "that file"
        )
    for key, group in groups.items():
        for name, stored in group.items():
            _check_whole(key, name, [(files[file], entry) for file, entry in stored])


def _dcp_shard(name: str, header: Header) -> re.Match[str] | None:
    """The parts of a file name that DCP gives to one rank's file."""
    return DCP_SHARD.fullmatch(name) if header.sharded else None


def _has_other_shards(path: Path) -> bool:
    """Whether a file is one of several that ranks wrote into its directory."""
    mine = _dcp_shard(path.name, read_header(path))
    if not mine:
        return False
    others = filter(
        None, (DCP_SHARD.fullmatch(name) for name in os.listdir(path.parent) if name != path.name)
    )
    return any(other["stem"] == mine["stem"] for other in others)


def _check_parts(headers: Mapping[str, Header]) -> None:
    """Raise `InvalidInput` if a part has no file of any rank: DCP numbers the files that share the
    names.
    """
    parts: dict[str, dict[int, set[int]]] = {}
    for name, header in headers.items():
        if shard := _dcp_shard(name, header):
            parts.setdefault(shard["group"] + shard["stem"], {}).setdefault(
                int(shard["parts"]), set()
            ).add(int(shard["part"]))
    for group, found in parts.items():
        if len(found) > 1:
            raise InvalidInput(
                f"the shards of {group!r} are of several saves, divided into "
                f"{' and '.join(map(str, sorted(found)))} files"
            )
        ((wanted, there),) = found.items()
        if len(there) != wanted or max(there) > wanted:
            raise InvalidInput(
                f"shards of {group!r} are missing: wanted files 1 to {wanted} of some rank, got "
                f"{_few(sorted(there))}"
            )


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + ("…" if len(numbers) > 10 else "")


def _check_whole(key: str, name: str, stored: Sequence[tuple[Path, Entry]]) -> None:
    """Raise `InvalidInput` unless what is stored is one tensor, or the shards of one."""
    path, first = stored[0]
    if len(stored) > 1 and any(entry.saved_offsets is None for _, entry in stored):
        raise InvalidInput(
            f"two files that belong together ({key}) both have a tensor {name!r}, and do not say "
            "which part of it"
        )
    for other, entry in stored:
        if entry.dtype != first.dtype or len(entry.shape) != len(first.shape):
            raise InvalidInput(
                f"the shards of {name!r} are not of one tensor: "
                f"{first.dtype}{list(first.shape)} in {path.name}, "
                f"{entry.dtype}{list(entry.shape)} in {other.name}"
            )
    where = f"{name!r} in {path.parent}, of {count_text(len(stored), 'shard')}"
    boxes = [entry.box for _, entry in stored]
    check_tiling(where, shape_around(boxes), boxes)


def _walk(root: Path) -> Iterable[tuple[str, Path]]:
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in names:
            path = Path(folder, name)
            if not path.is_file():
                raise InvalidInput(
                    f"{path} is not a regular file but a broken link, a socket or a pipe; remove "
                    "it, or import another directory"
                )
            relative = path.relative_to(root).as_posix()
            if unicode_text(relative) != relative:
                raise InvalidInput(
                    f"the name of {path} is not Unicode, as names in a commit must be; rename it"
                )
            yield relative, path


def _unreadable(error: OSError) -> NoReturn:
    raise Unavailable(
        f"cannot read {error.filename}: {error.strerror}; see that it is there and may be read, "
        "then repeat"
    ) from error
