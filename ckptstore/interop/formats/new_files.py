"""What do exports have in common? Which tensors, under which names, and files that appear only when
they are complete."""

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.plugin.files import check_path, scratch_for, sync_path
from ckptstore.plugin.leaves import shown
from ckptstore.plugin.reading import CommitContents, Tree
from ckptstore.plugins.adopt.commit_files import tensor_name
from ckptstore.plugins.parsers.safetensors_header import Header, encode_header

Format: TypeAlias = Literal["files", "safetensors", "torch", "dcp"]
FORMATS: tuple[Format, ...] = ("files", "safetensors", "torch", "dcp")

Selects: TypeAlias = tuple[str, ...]
EVERYTHING = "*"


@dataclass(frozen=True, slots=True)
class Exported:
    """The files written, their bytes, and the leaves left out: not selected, or not supported by
    the format. `refused` has the path and the class of each object that `torch.load` refuses
    unless it is told to trust the file; `import_path` reads it.
    """

    format: Format
    files: tuple[Path, ...]
    bytes: int
    left_out: int
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What a format left out or wrote in a way of its own, as in `Exported`."""

    left_out: int = 0
    refused: tuple[tuple[str, str], ...] = ()


Leaf: TypeAlias = tuple[Tree, int]


def refuse_taken(target: Path) -> None:
    """Raise `Conflict` if there is something at `target`, `InvalidInput` if it is no path."""
    check_path(target)
    if os.path.lexists(target):
        raise Conflict(f"{target} exists; nothing was written, choose another name")


def put(target: Path, format: Format, write: Callable[[Path], Written]) -> Exported:
    """Put at `target`, which must not exist, what `write` makes at the path that it is given.
    Raises as `export`."""
    refuse_taken(target)
    try:
        with _in_place(target) as scratch:
            written = write(scratch)
            sizes = _sizes(scratch)
        _check_there(target, sizes)
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error}") from error
    files = tuple(sorted(target / name for name in sizes))
    return Exported(format, files, sum(sizes.values()), written.left_out, written.refused)


def selected(contents: CommitContents, selects: Selects) -> Iterator[Leaf]:
    """The leaves that any of `selects` matches. Raises `NotFound` for one that matches none."""
    unmatched = set(selects)
    for key, tree in contents.trees.items():
        for i, path in enumerate(tree.schema.paths):
            if matching := {
                select for select in selects if key == select or fnmatch.fnmatchcase(path, select)
            }:
                unmatched -= matching
                yield tree, i
    for select in selects:
        if select in unmatched:
            raise NotFound(
                f"commit {contents.commit[:12]} has no leaves {select!r}; `ckptstore ls "
                f"{contents.commit[:12]}` lists them"
            )


def tensors_of(contents: CommitContents, selects: Selects) -> dict[str, Leaf]:
    """The tensors that any of `selects` matches, by their names in safetensors files. Raises
    `InvalidInput` if two have one name, and as `selected`."""
    chosen = [
        (tree, i) for tree, i in selected(contents, selects) if tree.schema.kinds[i] == "tensor"
    ]
    one_key = len({tree.key for tree, _ in chosen}) == 1
    named = {_name(tree, i, one_key): (tree, i) for tree, i in chosen}
    if len(named) != len(chosen):
        raise InvalidInput(
            "two tensors would have one name in a safetensors file; export fewer with --select"
        )
    return named


def _name(tree: Tree, i: int, one_key: bool) -> str:
    path = tree.schema.paths[i]
    return tensor_name(path) if one_key else ".".join(map(shown, path.split("/")))


def header_of(named: Mapping[str, Leaf]) -> Header:
    """The header of a file with these tensors. Raises `InvalidInput`."""
    listed = [
        (name, tree.schema.dtypes[i], tree.schema.shapes[i]) for name, (tree, i) in named.items()
    ]
    return encode_header(listed, {"format": "pt"})


def left_out(contents: CommitContents, named: Mapping[str, Leaf]) -> int:
    """How many leaves of a commit are not among `named`."""
    return sum(len(tree.schema) for tree in contents.trees.values()) - len(named)


def _sizes(root: Path) -> dict[str, int]:
    """The size of each file at or below `root`, by its relative name."""
    return {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in _all(root)
        if path.is_file()
    }


def _check_there(target: Path, sizes: Mapping[str, int]) -> None:
    """Raise `Unavailable` unless all that was written is at `target` now."""
    found = _sizes(target) if os.path.lexists(target) else {}
    if missing := [name for name, size in sizes.items() if found.get(name) != size]:
        raise Unavailable(
            f"{target / missing[0]} is not there as it was written ({len(missing)} of {len(sizes)} "
            "files): the file system lost it after the rename; see to the storage, remove what is "
            "there, then repeat"
        )


@contextmanager
def _in_place(target: Path) -> Iterator[Path]:
    """A temporary name beside `target`. If the block succeeds, its content is made durable and
    renamed to `target`; otherwise it is removed. Raises `Conflict` if somebody made `target`
    meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_for(target) as new:
        yield new
        for path in _all(new):
            if not path.is_symlink():
                sync_path(path)
        _rename_new(new, target)
    sync_path(target.parent)


def _rename_new(new: Path, target: Path) -> None:
    """Rename what is at `new`, but replace nothing."""
    with suppress(OSError):  # not every filesystem has links
        if not new.is_dir():
            os.link(new, target)  # unlike a rename, this replaces no file
            return
    if os.path.lexists(target):
        raise Conflict(f"{target} appeared meanwhile and stays; choose another name")
    os.rename(new, target)


def _all(path: Path) -> list[Path]:
    """A file, or a directory with all that lies below it."""
    return [path, *path.rglob("*")]
