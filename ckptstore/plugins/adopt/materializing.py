"""How does an adopted commit become a directory again? It is built beside its name, compared with
its hashes, and renamed. In a hollow directory, the files that it lacks are.

Nothing is written outside: names are checked before, links are made last and never followed.
"""

import fnmatch
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.plugin.files import Descriptor, check_path, scratch_for, sync_path, write_cached
from ckptstore.plugin.leaves import segment
from ckptstore.plugin.model import Box, Shape, nbytes_of
from ckptstore.plugin.pointers import HOLLOW_POINTER, read_pointer
from ckptstore.plugin.reading import Memory, ReadRequest, Tree, coalesce
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugins.adopt.directory import Folder, restore_folder
from ckptstore.plugins.adopt.hashed_files import hash_file
from ckptstore.plugins.adopt.manifest import (
    FILES,
    MANIFEST,
    FileRecipe,
    LeafPart,
    Manifest,
    decode_manifest,
)
from ckptstore.plugins.foreign.strides import scatter, span_bytes

WINDOW_BYTES = 8 << 20
"""As much of a file, or a chunk, is read at once while the window before is hashed and written, all
in the processor's cache."""

WRITERS = 2
"""Files that are written at once."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODES = 0o777
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
    """Write an adopted directory, or its files whose names `select` matches; in a hollow directory
    of this commit, those that are not there.

    Raises `Conflict` if `directory` has other content, `NotFound` if nothing matches,
    `InvalidInput` for a commit that was not adopted, `Corrupt` if a file is not what it was. After
    an error nothing was written.
    """
    check_path(directory)
    target = Path(os.path.abspath(directory))
    whole = manifest_of(contents, commit)
    manifest = _selected(whole, select, commit)
    target = target.resolve() if target.is_symlink() else target
    if os.path.lexists(target / HOLLOW_POINTER):
        _check_hollow(target, commit, manifest)
        refill(contents, target, manifest, keep_pointer=manifest != whole)
        return _materialized(target, manifest)
    if target == Path.cwd():
        raise Conflict(f"{target} is the working directory; name one that can be replaced")
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
        restore_folder(target, manifest.folders[""])
        sync_path(target.parent)
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error}; nothing was written") from error
    return _materialized(target, manifest)


def _materialized(target: Path, manifest: Manifest) -> Materialized:
    size = sum(file.size for file in manifest.files.values())
    return Materialized(
        target, len(manifest.files), len(manifest.folders) - 1, len(manifest.links), size
    )


def _check_hollow(target: Path, commit: str, manifest: Manifest) -> None:
    """Raise `Conflict` unless a hollow directory is of `commit`, and its files and links are what
    they were."""
    pointer = read_pointer(target / HOLLOW_POINTER)
    if pointer.id != commit:
        raise Conflict(
            f"{target} is a hollow directory of commit {pointer.id[:12]}, wanted {commit[:12]}; "
            "choose another directory"
        )
    differ = (*differing(target, manifest), *differing_links(target, manifest))
    if changed := [name for name in differ if os.path.lexists(target / name)]:
        raise Conflict(
            f"{', '.join(changed[:5])} in {target} changed after it was adopted; nothing was "
            "written: move it away, or choose another directory"
        )


def differing(target: Path, manifest: Manifest) -> list[str]:
    """The files that a directory lacks, or has with other bytes than its commit."""
    return [
        name
        for name, recipe in manifest.files.items()
        if not (
            stat.S_ISREG(mode_of(target / name))
            and (target / name).stat().st_size == recipe.size
            and hash_file(target / name).blake3 == recipe.blake3
        )
    ]


def differing_links(target: Path, manifest: Manifest) -> list[str]:
    """The links that a directory lacks, or has other things in place of."""
    return [
        name
        for name, link in manifest.links.items()
        if not stat.S_ISLNK(mode_of(target / name)) or os.readlink(target / name) != link.target
    ]


def refill(
    contents: Contents, target: Path, manifest: Manifest, *, keep_pointer: bool = False
) -> list[str]:
    """Make the directory `target` what was adopted: write the files and links that it lacks, and
    replace those that differ, whose names this returns. Files that the commit does not have stay.

    Killed at any moment, this leaves the pointer of a hollow directory, or a whole directory.
    Raises as `materialize`.
    """
    try:
        found = differing(target, manifest)
        links = differing_links(target, manifest)
        replaced = [name for name in (*found, *links) if os.path.lexists(target / name)]
        for name in sorted(manifest.folders):
            if stat.S_ISLNK(mode_of(target / name)):
                raise Conflict(f"{target / name} is a link; wanted a directory: remove the link")
            (target / name).mkdir(exist_ok=True)
        lacking = Manifest(
            dict.fromkeys(manifest.folders, Folder(0o700, 0)),
            {name: manifest.links[name] for name in links},
            {name: manifest.files[name] for name in found},
        )
        with scratch_for(target / HOLLOW_POINTER) as scratch:
            write_tree(contents, lacking, scratch)
            for name in (*found, *links):
                os.rename(scratch / name, target / name)
        for name, recipe in manifest.files.items():
            (target / name).chmod(recipe.mode & _FILE_MODES)
            os.utime(target / name, ns=(recipe.mtime_ns, recipe.mtime_ns))
        for name in manifest.folders:
            sync_path(target / name)
        if not keep_pointer:
            (target / HOLLOW_POINTER).unlink(missing_ok=True)
        for name, folder in sorted(manifest.folders.items(), reverse=True):
            restore_folder(target / name, folder)
        sync_path(target)
    except OSError as error:
        raise Unavailable(
            f"cannot write {error.filename or target}: {error.strerror}; {target} is as it was, "
            "or has some of the files: repeat this"
        ) from error
    return replaced


def mode_of(path: Path) -> int:
    """The mode of what is there, 0 for nothing."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


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


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a leaf whose bytes follow each other in a file, or lie there by `spread`; then
    `nbytes` are those from the first element to the last."""

    tree: Tree
    number: int
    box: Box
    nbytes: int
    spread: "Spread | None" = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How the elements of a box lie in a file (`foreign.strides`), and what lies between them: the
    bytes of a literal."""

    dtype: str
    strides: Shape
    between: FileBox


def parts_of(contents: Contents, name: str, recipe: FileRecipe) -> list[FileBox]:
    """The parts of a file, in order. Raises `InvalidInput` unless they add up to it."""
    try:
        literal, number = contents.find(f"{FILES}/{segment(name)}")
    except NotFound as error:
        raise _unusable(name, "the commit has no literal of it") from error
    if literal.schema.kinds[number] != "bytes":
        raise _unusable(name, "its literal is no bytes")
    literal.check(number)
    parts: list[FileBox] = []
    position = begin = 0
    for part in recipe.parts:
        if isinstance(part, LeafPart):
            tree, leaf, box = _leaf(contents, name, part)
            found = FileBox(tree, leaf, box, nbytes_of(part.dtype, box.lengths))
            if part.strides is not None:
                span = span_bytes(part.dtype, box.lengths, part.strides)
                gap = span - found.nbytes
                between = FileBox(literal, number, Box((begin,), (gap,)), gap)
                found = replace(
                    found, nbytes=span, spread=Spread(part.dtype, part.strides, between)
                )
                begin += gap
        else:
            found = FileBox(literal, number, Box((begin,), (part,)), part)
            begin += part
        parts.append(found)
        position += found.nbytes
    if literal.raw_bytes(number) != begin:
        raise _unusable(name, f"its literal has not the {begin} bytes that its parts take")
    if position != recipe.size:
        raise _unusable(name, f"its parts have {position} bytes; wanted {recipe.size}")
    return parts


def split(piece: FileBox, limit_bytes: int) -> Iterator[FileBox]:
    """A piece as pieces of at most `limit_bytes`, cut where the grid is if that is possible; one
    that is spread stays whole."""
    if piece.spread:
        yield piece
        return
    (offsets, lengths), nbytes = piece.box, piece.nbytes
    dim = next((i for i, n in enumerate(lengths) if n > 1), None)
    if nbytes <= limit_bytes or dim is None:
        if nbytes:
            yield piece
        return
    row = nbytes // lengths[dim]
    rows = 1 << max((limit_bytes // row).bit_length() - 1, 0)
    for first in range(0, lengths[dim], rows):
        count = min(rows, lengths[dim] - first)
        box = Box(
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*lengths[:dim], count, *lengths[dim + 1 :]),
        )
        yield from split(FileBox(piece.tree, piece.number, box, row * count), limit_bytes)


def _window_bytes(tree: Tree) -> int:
    """The most bytes of a window: less than a chunk would read chunks twice."""
    return max(WINDOW_BYTES, tree.chunk_bytes)


def _leaf(contents: Contents, name: str, part: LeafPart) -> tuple[Tree, int, Box]:
    """The leaf of a part, and the box of it that the part takes."""
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
    tree.check(number)  # before it is cut into pieces
    return tree, number, part.region


def _unusable(name: str, why: str) -> InvalidInput:
    return InvalidInput(f"the manifest cannot be used: {name[:80]!r}: {why}")


def write_tree(contents: Contents, manifest: Manifest, root: Path, *, compare: bool = True) -> None:
    """Write everything to the new directory `root`, whose mode and time are left to be set.

    Without `compare`, files are not compared with their hashes: the commit may have other tensors
    of the same shapes. Raises as `materialize`.
    """
    plan = {
        name: [
            piece
            for part in parts_of(contents, name, file)
            for piece in split(part, _window_bytes(part.tree))
        ]
        for name, file in manifest.files.items()
    }
    for name in sorted(manifest.folders):
        (root / name).mkdir(mode=0o700)

    with closing(ThreadPool(WRITERS)) as writers, closing(ThreadPool(WRITERS)) as readers:

        def write(name: str) -> None:
            windows = _windows(contents, plan[name], readers)
            _write_file(windows, root / name, manifest.files[name], compare)

        writers.spread(write, list(plan))
    for name, link in manifest.links.items():
        (root / name).symlink_to(link.target)
        os.utime(root / name, ns=(link.mtime_ns, link.mtime_ns), follow_symlinks=False)
    for name, folder in sorted(manifest.folders.items(), reverse=True):
        sync_path(root / name)
        if name:
            restore_folder(root / name, folder)


def read_pieces(contents: Contents, pieces: Sequence[FileBox], out: memoryview) -> int:
    """Read pieces into `out`, one behind the other; returns their bytes. The literal's bytes, which
    follow each other in its leaf, are read at once, since many may lie in one chunk."""
    reads: list[ReadRequest] = []
    literals: list[tuple[FileBox, memoryview]] = []
    spread: list[Callable[[], None]] = []
    size = 0
    for piece in pieces:
        here = out[size : size + piece.nbytes]
        size += piece.nbytes
        if piece.spread:
            between = piece.spread.between
            gap = memoryview(bytearray(between.nbytes))
            values = memoryview(bytearray(piece.nbytes - between.nbytes))
            if between.nbytes:
                literals.append((between, gap))
            reads.append(ReadRequest(piece.tree, piece.number, Memory(values), piece.box))
            place = piece.spread.dtype, piece.box.lengths, piece.spread.strides
            spread.append(partial(scatter, *place, values, gap, here))
        elif piece.tree.schema.kinds[piece.number] == "bytes":
            literals.append((piece, here))
        else:
            reads.append(ReadRequest(piece.tree, piece.number, Memory(here), piece.box))
    if literals:
        first = literals[0][0]
        total = sum(len(here) for _, here in literals)
        joined = literals[0][1] if len(literals) == 1 else memoryview(bytearray(total))
        box = Box(first.box.offsets, (total,))
        reads.append(ReadRequest(first.tree, first.number, Memory(joined), box))
    contents.read(reads)
    if len(literals) > 1:
        position = 0
        for piece, here in literals:
            here[:] = joined[position : position + piece.nbytes]
            position += piece.nbytes
    for fill in spread:
        fill()
    return size


def _windows(
    contents: Contents, pieces: Sequence[FileBox], readers: ThreadPool
) -> Iterator[memoryview]:
    """The bytes of pieces, window by window. While the caller has one, the next is read; it is
    gone when the caller asks for that."""
    limit = max((max(_window_bytes(piece.tree), piece.nbytes) for piece in pieces), default=0)
    ends = list(accumulate((piece.nbytes for piece in pieces), initial=0))

    def read(window: slice, memory: memoryview) -> memoryview:
        return memory[: read_pieces(contents, pieces[window], memory)]

    here, free = (memoryview(bytearray(min(limit, ends[-1]))) for _ in range(2))
    before: Future[memoryview] | None = None
    for window in coalesce(ends[:-1], ends[1:], limit_bytes=limit):
        ahead = readers.submit(partial(read, window, free))
        if before is not None:
            yield before.result()
        before, here, free = ahead, free, here
    if before is not None:
        yield before.result()


def _write_file(
    windows: Iterable[memoryview], path: Path, recipe: FileRecipe, compare: bool
) -> None:
    """Write a file whose name is new, window by window, and compare what is written with its hash.
    It is durable when this returns, and has its mode and time."""
    file = Descriptor(os.open(path, _NEW, 0o600))
    hashed, position = blake3(), 0
    for window in windows:
        hashed.update(window)
        write_cached(file.fd, position, [window])
        position += len(window)
    if compare and (found := hashed.hexdigest()) != recipe.blake3:
        raise Corrupt(
            f"{path.name[:80]!r} is not the file that was adopted: its BLAKE3 is {found[:12]}; "
            f"wanted {recipe.blake3[:12]}; run `ckptstore fsck`"
        )
    os.fchmod(file.fd, recipe.mode & _FILE_MODES)
    os.utime(file.fd, ns=(recipe.mtime_ns, recipe.mtime_ns))
    os.fsync(file.fd)
