"""How does an adopted directory become small, and lose nothing?

A hollow directory keeps its small files and a pointer to its commit; the others are in the commit
alone. The pointer is durable before the first file goes, and goes after the last file is back
(`materializing.refill`): a directory without a pointer is whole, and one with a pointer lacks at
most what its commit has.

Its commit has a tag, the *hold*, named after the directory (`adoption.Holds`). Programs delete
their directories without telling anybody; the hold of one that is gone is removed when its
neighbour is made hollow.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ckptstore.adopt.directory import restore_folder
from ckptstore.adopt.hashed_files import FileChanged
from ckptstore.adopt.manifest import FileRecipe, LeafPart, Manifest
from ckptstore.core.ids import HOLD, CommitId
from ckptstore.core.paths import scratch_for
from ckptstore.errors import ReadOnly, Unavailable
from ckptstore.objects.pointer_files import (
    HOLLOW_POINTER,
    Pointer,
    is_pointer,
    read_pointer,
    write_pointer,
)

LARGE_BYTES = 1 << 20
"""Files without tensors stay below this size."""

_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{1,100}")


@dataclass(frozen=True, slots=True)
class Hollowed:
    """What a directory lost: its commit has it."""

    files: int
    bytes: int


def goes(name: str, recipe: FileRecipe) -> bool:
    """Whether a hollow directory lacks this file: it has tensors, or is large and no JSON."""
    has_tensors = any(isinstance(part, LeafPart) for part in recipe.parts)
    return has_tensors or (recipe.size >= LARGE_BYTES and not name.endswith(".json"))


def is_hollow(root: Path, manifest: Manifest) -> bool:
    """Whether a directory with a pointer lacks files of its commit."""
    return not all(os.path.lexists(root / name) for name in manifest.files)


def hollow_out(root: Path, manifest: Manifest, pointer: Pointer) -> Hollowed:
    """Remove the files of an adopted directory that `goes` says. Repeating it is harmless.

    The commit of `pointer` must be durable. Raises `FileChanged` if a file is not what it was when
    it was adopted; it stays. Raises `ReadOnly` or `Unavailable` if the directory cannot be changed;
    then it is whole, or hollow in part.
    """
    there = [name for name in manifest.files if os.path.lexists(root / name)]
    leaving = [name for name in there if goes(name, manifest.files[name])]
    try:
        for name in there:
            _check_unchanged(root / name, manifest.files[name])
        write_pointer(root / HOLLOW_POINTER, pointer)
        with scratch_for(root / HOLLOW_POINTER) as trash:
            trash.mkdir()
            for number, name in enumerate(leaving):
                _move(root / name, trash / str(number), manifest.files[name])
        for name, folder in sorted(manifest.folders.items(), reverse=True):
            restore_folder(root / name, folder)
    except OSError as error:
        kind = ReadOnly if isinstance(error, PermissionError) else Unavailable
        raise kind(
            f"cannot make {root} hollow: {error}; commit {pointer.id[:12]} has all of its files"
        ) from error
    return Hollowed(len(leaving), sum(manifest.files[name].size for name in leaving))


def _move(path: Path, gone: Path, recipe: FileRecipe) -> None:
    """Rename a file, which somebody may have replaced since it was looked at: then it goes back."""
    os.rename(path, gone)
    try:
        _check_unchanged(gone, recipe)
    except FileChanged as error:
        os.rename(gone, path)
        raise FileChanged(path) from error


def _check_unchanged(path: Path, recipe: FileRecipe) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or (found.st_size, found.st_mtime_ns) != (
        recipe.size,
        recipe.mtime_ns,
    ):
        raise FileChanged(path)


class Place(NamedTuple):
    """Where directories are held: a label of the path above them, and its number there in its file
    system, in hex. A move keeps the number, a copy has neither."""

    path: str
    number: str

    def __str__(self) -> str:
        return f"{self.path}-{self.number}"


@dataclass(frozen=True, slots=True)
class Held:
    """A directory with the name that the hold of `commit` has, in the place that it has."""

    place: Place
    root: Path
    commit: CommitId


def hold_of(place: Place, root: Path) -> str:
    """The tag that keeps the commit of the hollow directory `root`."""
    return f"{HOLD}/{place}/{_label(Path(os.path.realpath(root)).name)}"


def held_in(parent: Path, tags: Mapping[str, CommitId]) -> list[Held]:
    """The directories in `parent` that `tags` may hold, by their names."""
    roots = {_label(root.name): root for root in _directories(parent)}
    holds = ((tag.split("/"), commit) for tag, commit in sorted(tags.items()))
    return [
        Held(Place(*parts[1].partition("-")[::2]), roots[parts[2]], commit)
        for parts, commit in holds
        if len(parts) == 3 and parts[0] == HOLD and parts[2] in roots
    ]


def was_not_copied(root: Path, manifest: Manifest) -> bool:
    """Whether a hollow directory was not copied: its time is that of the directory that was
    adopted. A move keeps it."""
    with suppress(OSError):
        return root.stat().st_mtime_ns == manifest.folders[""].mtime_ns
    return False


def is_unchanged(root: Path, manifest: Manifest) -> bool:
    """Whether a directory is the one that was adopted: more than half of its files are, by size and
    time. Others may have been damaged."""
    same = 0
    for name, recipe in manifest.files.items():
        with suppress(OSError, FileChanged):
            _check_unchanged(root / name, recipe)
            same += 1
    return 2 * same > len(manifest.files)


def label_of(*parts: str) -> str:
    """A short name that stands for `parts`."""
    return blake3(os.fsencode("\0".join(parts))).hexdigest()[:12]


def copied(tags: Iterable[str], place: Place, parent: Path) -> list[tuple[str, CommitId]]:
    """The hollow directories in `parent` that have no hold in `place` among `tags`: the hold that
    each should have, and its commit."""
    wanted = {hold_of(place, root): root / HOLLOW_POINTER for root in _directories(parent)}
    return [
        (hold, read_pointer(pointer).id)
        for hold, pointer in sorted(wanted.items())
        if hold not in tags and is_pointer(pointer)
    ]


def abandoned(tags: Iterable[str], place: Place, parent: Path) -> list[str]:
    """The holds among `tags` of directories in `parent`, which is `place`, that are gone."""
    kept = {hold_of(place, root) for root in _directories(parent)}
    prefix = f"{HOLD}/{place}/"
    return sorted(tag for tag in tags if tag.startswith(prefix) and tag not in kept)


def _directories(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unavailable(f"cannot list {parent}: {error.strerror}") from error


def _label(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else label_of(name)
