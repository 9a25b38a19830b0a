"""How does an adopted directory become small, and lose nothing?

A hollow directory keeps its small files and a pointer to its commit; the others are in the commit
alone. The pointer is durable before the first file goes, and goes after the last file is back
(`materializing.refill`): a directory without a pointer is whole, and one with a pointer lacks at
most what its commit has.

The pointer has a random id, and the store keeps the commit under a tag of that id, the *hold*
(`adoption`). A move or a rename changes neither; a copy has the same id and shares the hold.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import ReadOnly, Unavailable
from ckptstore.plugin.files import scratch_for
from ckptstore.plugin.model import random_digits
from ckptstore.plugin.pointers import HOLLOW_POINTER, Pointer, write_pointer
from ckptstore.plugins.adopt.directory import Identity, restore_folder
from ckptstore.plugins.adopt.hashed_files import FileChanged, HashedFile, hash_file
from ckptstore.plugins.adopt.manifest import FileRecipe, LeafPart, Manifest

LARGE_BYTES = 1 << 20
"""Files without tensors stay below this size."""


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


def hollow_out(
    root: Path, manifest: Manifest, pointer: Pointer, hold: Callable[[], object]
) -> Hollowed:
    """Remove the files of an adopted directory that `goes` says. Repeating it is harmless.

    The commit of `pointer` must be durable. All that is there is compared with it first. `hold` is
    called when the pointer is durable, before anything goes: it holds the commit, or does so again
    if a release looked for pointers meanwhile.
    Raises `FileChanged` if a file has other bytes; it stays. Raises `ReadOnly` or `Unavailable` if
    the directory cannot be changed; then it is whole, or hollow in part.
    """
    for name in manifest.folders:
        if name and (root / name).is_symlink():
            raise FileChanged(
                root / name,
                f"{root / name} is a link by now, and what lies behind it is none of {root}: "
                "nothing was removed; put the directory in its place, then repeat this",
            )
    there = [name for name in manifest.files if os.path.lexists(root / name)]
    leaving = [name for name in there if goes(name, manifest.files[name])]
    try:
        compared = {name: _compared(root / name, manifest.files[name], pointer) for name in there}
        write_pointer(root / HOLLOW_POINTER, pointer)
        hold()
        with scratch_for(root / HOLLOW_POINTER) as trash:
            trash.mkdir()
            for number, name in enumerate(leaving):
                _move(root / name, trash / str(number), compared[name])
        for name, folder in sorted(manifest.folders.items(), reverse=True):
            restore_folder(root / name, folder)
    except OSError as error:
        kind = ReadOnly if isinstance(error, PermissionError) else Unavailable
        raise kind(
            f"cannot make {root} hollow: {error}; commit {pointer.id[:12]} has all of its files"
        ) from error
    return Hollowed(len(leaving), sum(manifest.files[name].size for name in leaving))


def _compared(path: Path, recipe: FileRecipe, pointer: Pointer) -> HashedFile:
    """A file whose bytes are those of its commit. Size and time are no proof: a program may have
    written other bytes and set the time back."""
    found = hash_file(path)
    if found.blake3 != recipe.blake3:
        raise FileChanged(
            path,
            f"{path} changed after it was adopted: its bytes are not those of commit "
            f"{pointer.id[:12]}; it stays. Move it away, then `ckptstore materialize {path.parent}`"
            " brings back what the commit has",
        )
    return found


def _move(path: Path, gone: Path, compared: HashedFile) -> None:
    """Rename a file, which somebody may have replaced or written to since it was compared: then it
    goes back."""
    os.rename(path, gone)
    try:
        status = gone.lstat()
        if (Identity.of(status), status.st_size, status.st_mtime_ns) != (
            compared.identity,
            compared.size,
            compared.mtime_ns,
        ):
            raise FileChanged(path)
    except BaseException:
        _put_back(gone, path)
        raise


def _put_back(gone: Path, path: Path) -> None:
    """Give a file its name again, or one beside it if the name is taken."""
    try:
        os.link(gone, path)  # unlike a rename, this replaces no file
    except OSError:
        os.rename(gone, path.with_name(f"{path.name}.{random_digits(4)}"))
