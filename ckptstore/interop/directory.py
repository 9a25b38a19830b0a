"""How a directory becomes a commit and again a directory, byte for byte: tensors out of its safetensors files, everything else as it is.

The key `files` has each file by its relative name: its bytes, or, of a safetensors file, only its header. The tensors are under `model`, by
their own names, where all belong together; else under the name of each file or sharded group.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.core.dtypes import width_of
from ckptstore.errors import InvalidInput
from ckptstore.interop.safetensors_file import Header, read_header
from ckptstore.interop.sources import FileRange, Held, flat_dict, inside
from ckptstore.state.flat import Flat

FILES = "files"
MODEL = "model"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_BYTES_MAX = 256 << 20

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")
_SKIPPED = frozenset({".git", ".cache"})
"""What tools keep beside a model for themselves."""


@dataclass(frozen=True, slots=True)
class DirectoryPlan:
    """What will be read: each file by its relative name, and the headers of those that hold tensors."""

    files: Mapping[str, Path]
    headers: Mapping[str, Header]


def plan_directory(root: Path) -> DirectoryPlan:
    """All files below `root`. Links to files are followed, as Hugging Face's cache consists of them, links to directories are not.

    Raises `InvalidInput` for what is neither file nor directory, for a damaged safetensors file, and for an index that names other files.
    """
    files = dict(sorted(_walk(root)))
    if not files:
        raise InvalidInput(f"{root} has no files to import")
    for name, path in files.items():
        if name.endswith(INDEX_SUFFIX):
            indexed_names(path)
    return DirectoryPlan(files, {name: read_header(path) for name, path in files.items() if name.endswith(SUFFIX)})


def plan_files(paths: Iterable[Path]) -> DirectoryPlan:
    """Single files of one directory."""
    files = {path.name: path for path in sorted(paths)}
    return DirectoryPlan(files, {name: read_header(path) for name, path in files.items() if name.endswith(SUFFIX)})


def indexed_names(index: Path) -> list[str]:
    """The names of the files that an index says the tensors are in, each a file beside it. Raises `InvalidInput`."""
    try:
        if index.stat().st_size > INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {INDEX_BYTES_MAX} bytes")
        found = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) if isinstance(name, str) else "" for name in found.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{index} is no index of safetensors files: {error!r:.200}") from error
    for name in names:
        if "/" in name or not name:
            raise InvalidInput(f"{index} names {name[:80]!r}, which is no name of a file beside it")
        # A link is what Hugging Face's cache has; it was the user's choice to import from there, so only the name is judged.
        if not (index.parent / name).is_symlink():
            inside(index.parent, name)
    return names


def flats_of(plan: DirectoryPlan) -> dict[str, Flat]:
    """The application state that the plan describes: nothing is read yet but the headers."""
    keys = group_keys(plan.headers)
    flats: dict[str, Flat] = {}
    for key in dict.fromkeys(keys.values()):
        members = [name for name in plan.headers if keys[name] == key]
        flats[key] = _tensors(key, [(plan.files[name], plan.headers[name]) for name in members])
    sources = [
        Held(plan.headers[name].raw) if name in plan.headers else FileRange(path, 0, path.stat().st_size)
        for name, path in plan.files.items()
    ]
    flats[FILES] = flat_dict(FILES, "bytes", list(plan.files), sources)
    return flats


def group_keys(names: Iterable[str]) -> dict[str, str]:
    """Under which key of the state the tensors of each safetensors file are: `model` if all belong together."""
    groups = {name: match["stem"] if (match := _SHARD.fullmatch(name)) else name.removesuffix(SUFFIX) for name in names}
    if len(set(groups.values())) == 1:
        return dict.fromkeys(groups, MODEL)
    if FILES in groups.values():
        raise InvalidInput(f"tensors of {FILES}{SUFFIX} would be under the key {FILES!r}, which is taken; rename that file")
    return groups


def _tensors(key: str, members: Iterable[tuple[Path, Header]]) -> Flat:
    entries = [(path, len(header.raw), entry) for path, header in members for entry in header.entries]
    names = [entry.name for _, _, entry in entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"two files that belong together ({key}) both have a tensor {twice!r}")
    sources = [FileRange(path, base + e.start, e.stop - e.start, width_of(e.dtype)) for path, base, e in entries]
    return flat_dict(key, "tensor", names, sources, [e.dtype for _, _, e in entries], [e.shape for _, _, e in entries])


def _walk(root: Path) -> Iterable[tuple[str, Path]]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in names:
            path = Path(folder, name)
            if not path.is_file():
                raise InvalidInput(f"{path} is no file: a broken link, a socket or a pipe; remove it, or import another directory")
            yield path.relative_to(root).as_posix(), path
