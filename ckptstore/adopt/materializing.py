"""How does an adopted commit become a directory again? It is built beside its name, compared with
its hashes, and renamed.

Nothing is written outside: names are checked before, links are made last and never followed.
"""

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ckptstore.adopt.directory import Folder
from ckptstore.adopt.hashed_files import hexdigest_of
from ckptstore.adopt.manifest import (
    FILES,
    MANIFEST,
    FileRecipe,
    LeafPart,
    Manifest,
    decode_manifest,
)
from ckptstore.core.geometry import nbytes_of
from ckptstore.core.model import Box
from ckptstore.core.paths import check_path, scratch_for, sync_path
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import ReadRequest, Tree
from ckptstore.state.leaf_sources import segment
from ckptstore.storage.local_files import Descriptor, transfer

BATCH_FILES = 64
"""Files that are open at once."""

COMPARING = 2
"""Threads that compare files with their hashes."""

_FILE_MODES, _FOLDER_MODES = 0o777, 0o3777
"""Modes that are set again: no file that was adopted runs as somebody else."""


class Contents(Protocol):
    """The contents of a commit."""

    @property
    def trees(self) -> Mapping[str, Tree]: ...

    def find(self, path: str) -> tuple[Tree, int]: ...

    def read(self, requests: Sequence[ReadRequest]) -> None: ...

    def leaf_bytes(self, tree: Tree, number: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Materialized:
    """What was written below `path`."""

    path: Path
    files: int
    folders: int
    links: int
    bytes: int


def is_adopted(contents: Contents) -> bool:
    """Whether the commit says how to write files again."""
    tree = contents.trees.get(MANIFEST)
    return tree is not None and tree.schema.kinds == ("bytes",) and FILES in contents.trees


def manifest_of(contents: Contents, commit: str) -> Manifest:
    """The manifest of an adopted commit. Raises `InvalidInput` for any other commit."""
    if not is_adopted(contents):
        raise InvalidInput(
            f"commit {commit[:12]} was not adopted from a directory: it has no manifest; write it "
            "with `ckptstore export`"
        )
    return decode_manifest(contents.leaf_bytes(contents.trees[MANIFEST], 0))


def materialize(
    contents: Contents, commit: str, directory: str | os.PathLike[str], select: str = "*"
) -> Materialized:
    """Write an adopted directory, or its files whose names `select` matches.

    Raises `Conflict` if `directory` has content, `NotFound` if nothing matches, `InvalidInput` for
    a commit that was not adopted, `Corrupt` if a file is not what it was. After an error nothing
    was written.
    """
    target = Path(directory)
    check_path(target)
    manifest = _selected(manifest_of(contents, commit), select, commit)
    target = target.resolve() if target.is_symlink() else target
    try:
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise Conflict(
                f"{target} exists and is not an empty directory; nothing was written, choose "
                "another name"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_for(target) as scratch:
            write_tree(contents, manifest, scratch)
            os.rename(scratch, target)
        _restore_folder(target, manifest.folders[""])
        sync_path(target.parent)
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error}; nothing was written") from error
    size = sum(file.size for file in manifest.files.values())
    return Materialized(
        target, len(manifest.files), len(manifest.folders) - 1, len(manifest.links), size
    )


def _selected(manifest: Manifest, select: str, commit: str) -> Manifest:
    """The files, links and directories that `select` matches, and the directories around them."""
    if select == "*":
        return manifest

    def matching(names: Iterable[str]) -> set[str]:
        return {name for name in names if name and fnmatch.fnmatchcase(name, select)}

    files, links = matching(manifest.files), matching(manifest.links)
    folders = matching(manifest.folders)
    if not files | links | folders:
        raise NotFound(f"commit {commit[:12]} has no files that {select!r} matches")
    kept = {""} | folders | {above for name in files | links | folders for above in _above(name)}
    return replace(
        manifest,
        folders={name: each for name, each in manifest.folders.items() if name in kept},
        links={name: each for name, each in manifest.links.items() if name in links},
        files={name: each for name, each in manifest.files.items() if name in files},
    )


def _above(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


@dataclass(slots=True)
class _Into:
    """A destination in a file: bytes of a leaf from `begin` on go to `offset`, for each of its
    ranges, which follow each other in the leaf."""

    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    file: Descriptor | None = None

    def memory(self) -> None:
        """Bytes are passed to `write`."""

    def write(self, start: int, data: memoryview) -> None:
        assert self.file is not None
        for begin, stop, offset in self.ranges:
            first, end = max(start, begin), min(start + len(data), stop)
            if first < end:
                here = data[first - start : end - start]
                transfer(os.pwritev, self.file.fd, offset + first - begin, [here])


@dataclass(frozen=True, slots=True)
class _FilePlan:
    """The reads that make up a file, and where each goes."""

    reads: tuple[ReadRequest, ...]
    places: tuple[_Into, ...]

    def opened(self, file: Descriptor | None) -> None:
        """Send the bytes to `file`."""
        for place in self.places:
            place.file = file


def _plan(contents: Contents, name: str, recipe: FileRecipe) -> _FilePlan:
    """How to write a file. Raises `InvalidInput` unless its parts add up to it."""
    literal, position, begin = _Into(), 0, 0
    reads, places = [], []
    for part in recipe.parts:
        if isinstance(part, LeafPart):
            tree, number, nbytes = _leaf(contents, name, part)
            places.append(_Into([(0, nbytes, position)]))
            reads.append(ReadRequest(tree, number, places[-1], part.box))
            position += nbytes
        else:
            literal.ranges.append((begin, begin + part, position))
            begin, position = begin + part, position + part
    try:
        tree, number = contents.find(f"{FILES}/{segment(name)}")
    except NotFound as error:
        raise _unusable(name, "the commit has no literal of it") from error
    if tree.schema.kinds[number] != "bytes" or tree.raw_bytes(number) != begin:
        raise _unusable(name, f"its literal has not the {begin} bytes that its parts take")
    if position != recipe.size:
        raise _unusable(name, f"its parts have {position} bytes; wanted {recipe.size}")
    if begin:
        places.append(literal)
        reads.append(ReadRequest(tree, number, literal))
    return _FilePlan(tuple(reads), tuple(places))


def _leaf(contents: Contents, name: str, part: LeafPart) -> tuple[Tree, int, int]:
    """The leaf of a part, and the bytes that the part takes."""
    try:
        tree, number = contents.find(part.path)
    except NotFound as error:
        raise _unusable(name, f"the commit has no leaf {part.path[:80]!r}") from error
    schema = tree.schema
    if (schema.kinds[number], schema.dtypes[number], schema.shapes[number]) != (
        "tensor",
        part.dtype,
        part.shape,
    ):
        raise InvalidInput(
            f"{part.path} is not what its file says, {part.dtype}{list(part.shape)}; choose a "
            "--format of `ckptstore export`"
        )
    box = part.box or Box.whole(part.shape)
    if not (
        len(part.shape) == len(box.offsets) == len(box.lengths)
        and all(o + n <= size for o, n, size in zip(*box, part.shape, strict=True))
    ):
        raise _unusable(name, f"{part.path[:80]!r} has no such part")
    return tree, number, nbytes_of(part.dtype, box.lengths)


def _unusable(name: str, why: str) -> InvalidInput:
    return InvalidInput(f"the manifest cannot be used: {name[:80]!r}: {why}")


def write_tree(contents: Contents, manifest: Manifest, root: Path, *, compare: bool = True) -> None:
    """Write everything to the new directory `root`, whose mode and time are left to be set.

    Without `compare`, files are not compared with their hashes: the commit may have other tensors
    of the same shapes. Raises as `materialize`.
    """
    plan = {name: _plan(contents, name, file) for name, file in manifest.files.items()}
    for name in sorted(manifest.folders):
        (root / name).mkdir(mode=0o700)
    names = list(plan)
    for first in range(0, len(names), BATCH_FILES):
        some = {name: plan[name] for name in names[first : first + BATCH_FILES]}
        _write_files(contents, some, root)
    files = [(root / name, name, file, compare) for name, file in manifest.files.items()]
    with closing(ThreadPool(COMPARING)) as threads:
        threads.spread(lambda file: _finish(*file), files)
    for name, link in manifest.links.items():
        (root / name).symlink_to(link.target)
        os.utime(root / name, ns=(link.mtime_ns, link.mtime_ns), follow_symlinks=False)
    for name, folder in sorted(manifest.folders.items(), reverse=True):
        sync_path(root / name)
        if name:
            _restore_folder(root / name, folder)


def _restore_folder(path: Path, folder: Folder) -> None:
    path.chmod(folder.mode & _FOLDER_MODES)
    os.utime(path, ns=(folder.mtime_ns, folder.mtime_ns))


def _write_files(contents: Contents, plan: Mapping[str, _FilePlan], root: Path) -> None:
    """Write files, whose names are new."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for name, each in plan.items():
        each.opened(Descriptor(os.open(root / name, flags, 0o600)))
    contents.read([read for each in plan.values() for read in each.reads])
    for each in plan.values():
        each.opened(None)


def _finish(path: Path, name: str, file: FileRecipe, compare: bool) -> None:
    """Compare a file with its recipe, make it durable, and give it its mode and time."""
    if compare and (found := hexdigest_of(path)) != file.blake3:
        raise Corrupt(
            f"{name[:80]!r} is not the file that was adopted: its BLAKE3 is {found[:12]}; wanted "
            f"{file.blake3[:12]}; run `ckptstore fsck`"
        )
    sync_path(path)
    path.chmod(file.mode & _FILE_MODES)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
