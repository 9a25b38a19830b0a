"""How does a commit become files of another format?

Bytes go from packs to files through at most some tens of MiB of memory. A file appears only when it
is complete.
"""

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote

from ckptstore.core.model import Node, Shape
from ckptstore.core.paths import check_path, scratch_for
from ckptstore.errors import Conflict, InvalidInput, NotFound, Unavailable
from ckptstore.interop.formats.directory import FILES, SUFFIX, group_keys
from ckptstore.interop.formats.safetensors_file import Header, encode_header, parse_header
from ckptstore.restore.reader import ReadRequest, Tree
from ckptstore.snapshot import Snapshot, contents_of

Format: TypeAlias = Literal["files", "safetensors", "torch", "dcp"]
FORMATS: tuple[Format, ...] = ("files", "safetensors", "torch", "dcp")

Selects: TypeAlias = tuple[str, ...]
EVERYTHING = "*"

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Exported:
    """The files written, their bytes, and the leaves left out: not selected, or not supported by
    the format.
    """

    format: Format
    files: tuple[Path, ...]
    bytes: int
    left_out: int


def export(
    snapshot: Snapshot,
    path: str | PathLike[str],
    *,
    format: Format | None = None,
    select: str | Sequence[str] = EVERYTHING,
    allow_pickle: bool = False,
) -> Exported:
    """Write a commit to `path`, which must not exist.

    `format` is by default that of the import (`files`: the same files, byte for byte), else it
    follows from the suffix (`.safetensors`, `.pt`). `select` takes keys of the state (`model`), or
    globs of leaf paths: one or several, each of which must match something. The export contains
    every leaf that one of them matches. `safetensors` takes tensors only, named by their paths,
    without the key if only one key has tensors. `torch` and `dcp` write one key as its value,
    several keys as a dict, and leaves by their paths; they hold the state in memory.

    Raises `Conflict` if `path` exists, `InvalidInput` for values that the format cannot hold, and
    `Corrupt` for damaged chunks; then nothing is left at `path`.
    """
    target = Path(path)
    check_path(target)
    if os.path.lexists(target):
        raise Conflict(f"{target} exists; nothing was written, choose another name")
    chosen = format or _format_of(snapshot, target)
    selects = (select,) if isinstance(select, str) else tuple(dict.fromkeys(select))
    write: Callable[[Snapshot, Path, Selects, bool], int] = {
        "files": _write_files,
        "safetensors": _write_safetensors,
        "torch": _write_torch,
        "dcp": _write_dcp,
    }[chosen]
    try:
        with _in_place(target) as scratch:
            left_out = write(snapshot, scratch, selects, allow_pickle)
    except OSError as error:
        raise Unavailable(f"cannot write {target}: {error}") from error
    files = (
        tuple(sorted(p for p in target.rglob("*") if p.is_file())) if target.is_dir() else (target,)
    )
    return Exported(chosen, files, sum(file.stat().st_size for file in files), left_out)


def _format_of(snapshot: Snapshot, target: Path) -> Format:
    names = _file_names(snapshot)
    if names and (len(names) > 1 or target.suffix in ("", Path(names[0]).suffix)):
        return "files"
    if target.suffix == SUFFIX:
        return "safetensors"
    if target.suffix in _TORCH_SUFFIXES:
        return "torch"
    raise InvalidInput(
        f"{target.name!r} does not say which format is wanted: name one with --format "
        f"({', '.join(FORMATS)})"
    )


# -- the same files again --


def _file_names(snapshot: Snapshot) -> list[str]:
    """The files of an imported commit; empty for any other commit."""
    tree = contents_of(snapshot).trees.get(FILES)
    skeleton = tree.schema.skeleton if tree else None
    if (
        not isinstance(skeleton, Node)
        or skeleton.type != "dict"
        or not all(isinstance(key, str) for key in skeleton.keys or ())
    ):
        return []
    assert tree
    plain = skeleton.children == tuple(range(len(tree.schema))) and set(tree.schema.kinds) <= {
        "bytes"
    }
    return list(skeleton.keys or ()) if plain else []


def _write_files(snapshot: Snapshot, scratch: Path, selects: Selects, allow_pickle: bool) -> int:
    names = _file_names(snapshot)
    if not names:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} was not imported from files: it has no key {FILES!r} of "
            "files; choose a --format"
        )
    if selects != (EVERYTHING,):
        raise InvalidInput(
            "the files of an import are exported all together; --select is for the other formats"
        )
    files = contents_of(snapshot).trees[FILES].schema.paths
    headers = {
        name: parse_header(snapshot.read(path), name)
        for name, path in zip(names, files, strict=True)
        if name.endswith(SUFFIX)
    }
    keys = group_keys(headers)
    if not contents_of(snapshot).trees.keys() >= set(keys.values()):
        headers = {
            name: header.unsharded for name, header in headers.items()
        }  # earlier versions imported each file separately
        keys = group_keys(headers)
    shapes = _whole_shapes(headers, keys)
    single = len(names) == 1 and scratch.suffix == Path(names[0]).suffix
    for name, path in zip(names, files, strict=True):
        target = scratch if single else _below(scratch, name)
        if name in keys:
            _write_safetensors_again(snapshot, target, headers[name], keys[name], shapes)
        else:
            with _Writing(target) as file:
                contents_of(snapshot).read_paths({path: file.at(0)})
    return 0


def _below(root: Path, name: str) -> Path:
    """The path of the commit's file `name`. Raises `InvalidInput` for a name that leads out of
    `root`.
    """
    if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name or "\\" in name:
        raise InvalidInput(
            f"{name[:80]!r} is no name of a file: wanted names joined by '/', without '.' and '..'"
        )
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _whole_shapes(
    headers: Mapping[str, Header], keys: Mapping[str, str]
) -> dict[tuple[str, str], Shape]:
    """By key and name, the shape of each tensor that the files hold whole or in shards."""
    shapes: dict[tuple[str, str], Shape] = {}
    for file, header in headers.items():
        for entry in header.entries:
            known = shapes.get((keys[file], entry.name), entry.shape)
            shapes[keys[file], entry.name] = tuple(
                map(max, known, map(sum, zip(*entry.box, strict=True)))
            )
    return shapes


def _write_safetensors_again(
    snapshot: Snapshot,
    target: Path,
    header: Header,
    key: str,
    shapes: Mapping[tuple[str, str], Shape],
) -> None:
    """Write the file that `header` describes: the tensors under `key`, or shards of them. Raises
    `InvalidInput` if dtype or shape differ.
    """
    if key not in contents_of(snapshot).trees:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} has no tensors {key!r} for its files; choose a --format"
        )
    tree = contents_of(snapshot).trees[key]
    schema = tree.schema
    there = dict(
        zip(
            (schema.skeleton.keys if isinstance(schema.skeleton, Node) else ()) or (),
            range(len(schema)),
            strict=False,
        )
    )
    with _Writing(target) as file:
        file.at(0).write(0, memoryview(header.raw))
        wanted = []
        for entry in header.entries:
            i, shape = there.get(entry.name), shapes[key, entry.name]
            if i is None or (schema.dtypes[i], schema.shapes[i]) != (entry.dtype, shape):
                raise InvalidInput(
                    f"{key}/{entry.name} is not what its file says, {entry.dtype}{list(shape)}; "
                    "choose a --format"
                )
            if entry.stop > entry.start:
                wanted.append(
                    ReadRequest(
                        tree,
                        i,
                        file.at(len(header.raw) + entry.start),
                        None if entry.shape == shape else entry.box,
                    )
                )
        contents_of(snapshot).read(wanted)


# -- safetensors --


def _write_safetensors(
    snapshot: Snapshot, scratch: Path, selects: Selects, allow_pickle: bool
) -> int:
    chosen = list(_selected(snapshot, selects))
    tensors = [(tree, i) for tree, i in chosen if tree.schema.kinds[i] == "tensor"]
    one_key = len({tree.key for tree, _ in tensors}) == 1
    names = {_name(tree, i, one_key): tree.schema.paths[i] for tree, i in tensors}
    if len(names) != len(tensors):
        raise InvalidInput(
            "two tensors would have one name in a safetensors file; export fewer with --select"
        )
    listed = [
        (_name(tree, i, one_key), tree.schema.dtypes[i], tree.schema.shapes[i])
        for tree, i in tensors
    ]
    _write_tensors(snapshot, scratch, encode_header(listed, {"format": "pt"}), names)
    return sum(len(tree.schema) for tree in contents_of(snapshot).trees.values()) - len(tensors)


def _name(tree: Tree, i: int, one_key: bool) -> str:
    segments = tree.schema.paths[i].split("/")
    return ".".join(
        unquote(segment)
        for segment in (segments[1:] if one_key and len(segments) > 1 else segments)
    )


def _write_tensors(
    snapshot: Snapshot, target: Path, header: Header, paths: Mapping[str, str]
) -> None:
    with _Writing(target) as file:
        file.at(0).write(0, memoryview(header.raw))
        base = len(header.raw)
        contents_of(snapshot).read_paths(
            {paths[entry.name]: file.at(base + entry.start) for entry in header.entries}
        )


def _selected(snapshot: Snapshot, selects: Selects) -> Iterator[tuple[Tree, int]]:
    """The leaves that any of `selects` matches. Raises `NotFound` for one that matches none."""
    unmatched = set(selects)
    for key, tree in contents_of(snapshot).trees.items():
        for i, path in enumerate(tree.schema.paths):
            if matching := {
                select for select in selects if key == select or fnmatch.fnmatchcase(path, select)
            }:
                unmatched -= matching
                yield tree, i
    for select in selects:
        if select in unmatched:
            raise NotFound(
                f"commit {snapshot.id[:12]} has no leaves {select!r}; `ckptstore ls "
                f"{snapshot.id[:12]}` lists them"
            )


# -- torch's own --


def _write_torch(snapshot: Snapshot, scratch: Path, selects: Selects, allow_pickle: bool) -> int:
    import torch

    state = _state(snapshot, selects, allow_pickle)
    with open(
        scratch, "xb"
    ) as file:  # torch.save accepts no path that begins with a dot and has no suffix
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return 0


def _write_dcp(snapshot: Snapshot, scratch: Path, selects: Selects, allow_pickle: bool) -> int:
    from torch.distributed.checkpoint.state_dict_saver import save

    from ckptstore.interop.dcp import store_to_dcp
    from ckptstore.interop.dcp.convert import errors_of_dcp

    if selects == (EVERYTHING,):
        store_to_dcp(snapshot, scratch, allow_pickle=allow_pickle)
        return 0
    state = _state(snapshot, selects, allow_pickle)
    with errors_of_dcp(scratch):
        save(
            state if isinstance(state, dict) else {selects[0]: state},
            checkpoint_id=scratch,
            no_dist=True,
        )
    return 0


def _state(snapshot: Snapshot, selects: Selects, allow_pickle: bool) -> object:
    """The value of one key; a dict of values by keys; or a dict of leaves by paths if not all of
    `selects` are keys.
    """
    if selects == (EVERYTHING,):
        return snapshot.state_dict(allow_pickle=allow_pickle)
    if all(select in contents_of(snapshot).trees for select in selects):
        found = {key: snapshot.state_dict(key, allow_pickle=allow_pickle) for key in selects}
        return found if len(selects) > 1 else found[selects[0]]
    paths = [tree.schema.paths[i] for tree, i in _selected(snapshot, selects)]
    return {path: snapshot.read(path, allow_pickle=allow_pickle) for path in paths}


# -- files --


class _At:
    """A destination for a leaf's bytes: a file from an offset on."""

    def __init__(self, descriptor: int, base: int) -> None:
        self._descriptor, self._base = descriptor, base

    def memory(self) -> None:
        """Bytes are passed to `write`."""

    def write(self, start: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self._base + start + done)


class _Writing:
    """A file being written; durable when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "_Writing":
        self._file = open(self._path, "xb", buffering=0)
        return self

    def at(self, base: int) -> _At:
        return _At(self._file.fileno(), base)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


@contextmanager
def _in_place(target: Path) -> Iterator[Path]:
    """A temporary name beside `target`, renamed to it if the block succeeds and removed
    otherwise.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_for(target) as new:
        yield new
        for folder in [path for path in new.rglob("*") if path.is_dir()] + [new] * new.is_dir():
            _sync(folder)
        os.rename(new, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Make a file's bytes or a directory's names durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
