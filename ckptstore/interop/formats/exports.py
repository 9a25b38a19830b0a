"""Write a commit as files of another format.

Bytes go from packs to files through at most some tens of MiB of memory. A file appears only when it
is complete.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.errors import InvalidInput
from ckptstore.interop.formats.new_files import (
    EVERYTHING,
    FORMATS,
    Exported,
    Format,
    Leaf,
    Selects,
    Written,
    header_of,
    left_out,
    put,
    refuse_taken,
    selected,
    tensors_of,
)
from ckptstore.plugin.reading import CommitContents, InFile, ReadRequest
from ckptstore.plugins.adopt.adopting import SUFFIX
from ckptstore.plugins.adopt.materializing import is_adopted, manifest_of, write_tree
from ckptstore.plugins.parsers.safetensors_header import Header, read_header

if TYPE_CHECKING:
    from ckptstore.plugin.snapshots import Snapshot

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def export(
    snapshot: "Snapshot",
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

    What was written is looked at before the call returns: `import_path` reads a `torch` or `dcp`
    export without `allow_pickle`, unless this call had it, and the files have the sizes that they
    were written with.

    Raises `Conflict` if `path` exists, `InvalidInput` for values that the format cannot hold,
    `Corrupt` for damaged chunks, and `Unavailable` if files cannot be written, or are not there
    afterwards. But for the last, nothing is left at `path`.
    """
    from ckptstore.plugin.snapshots import contents_of

    return export_contents(
        contents_of(snapshot),
        path,
        lambda: snapshot,
        format=format,
        select=select,
        allow_pickle=allow_pickle,
    )


def export_contents(
    contents: CommitContents,
    path: str | PathLike[str],
    snapshot: "Callable[[], Snapshot]",
    *,
    format: Format | None = None,
    select: str | Sequence[str] = EVERYTHING,
    allow_pickle: bool = False,
) -> Exported:
    """As `export`. The commit's `snapshot`, which needs torch, is for torch's formats alone."""
    target = Path(path)
    refuse_taken(target)
    chosen = format or _format_of(contents, target)
    selects = (select,) if isinstance(select, str) else tuple(dict.fromkeys(select))
    write: dict[Format, Callable[[Path], Written]] = {
        "files": lambda scratch: _write_files(contents, scratch, selects),
        "safetensors": lambda scratch: _write_safetensors(contents, scratch, selects),
        "torch": lambda scratch: _write_torch(snapshot(), scratch, selects, allow_pickle),
        "dcp": lambda scratch: _write_dcp(snapshot(), scratch, selects, allow_pickle),
    }
    return put(target, chosen, write[chosen])


def _format_of(contents: CommitContents, target: Path) -> Format:
    if is_adopted(contents):
        names = list(manifest_of(contents, contents.commit).files)
        one_file = target.suffix in (SUFFIX, *_TORCH_SUFFIXES)
        if len(names) != 1 and one_file:
            raise InvalidInput(
                f"{target.name} is the name of one file, and commit {contents.commit[:12]} is a "
                f"directory of {len(names)}: --format safetensors (format=…) writes its tensors "
                "into one file, with --select those of a key such as model; --format files writes "
                "the directory"
            )
        if len(names) != 1 or target.suffix == "" or _is_single(names, target):
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


def _write_files(contents: CommitContents, scratch: Path, selects: Selects) -> Written:
    if not is_adopted(contents):
        raise InvalidInput(
            f"commit {contents.commit[:12]} was not imported from files: it has no manifest of "
            "them; choose a --format"
        )
    if selects != (EVERYTHING,):
        raise InvalidInput(
            "the files of an import are exported all together; `ckptstore materialize --select` "
            "writes some"
        )
    manifest = manifest_of(contents, contents.commit)
    names = list(manifest.files)
    if _is_single(names, scratch):
        folder = scratch.with_name(f"{scratch.name}.d")
        write_tree(contents, manifest, folder, compare=False)
        os.rename(folder / names[0], scratch)
    else:
        write_tree(contents, manifest, scratch, compare=False)
        scratch.chmod(manifest.folders[""].mode | 0o700)
    return Written()


def _is_single(names: Sequence[str], target: Path) -> bool:
    """Whether the only file of an import becomes `target` itself: a name without a suffix is that
    of a directory."""
    return len(names) == 1 and target.suffix == Path(names[0]).suffix != ""


def _write_tensors(
    contents: CommitContents, target: Path, header: Header, tensors: Mapping[str, Leaf]
) -> None:
    """Write the file that `header` describes."""
    with open(target, "xb", buffering=0) as file:
        file.write(header.raw)
        wanted = []
        for entry in header.entries:
            tree, leaf = tensors[entry.name]
            if entry.stop > entry.start:
                place = InFile(file.fileno(), len(header.raw) + entry.start)
                wanted.append(ReadRequest(tree, leaf, place))
        contents.read(wanted)


# -- safetensors --


def _write_safetensors(contents: CommitContents, scratch: Path, selects: Selects) -> Written:
    named = tensors_of(contents, selects)
    _write_tensors(contents, scratch, header_of(named), named)
    read_header(scratch)
    return Written(left_out=left_out(contents, named))


# -- torch's own --


def _write_torch(
    snapshot: "Snapshot", scratch: Path, selects: Selects, allow_pickle: bool
) -> Written:
    from ckptstore.plugins.foreign.kinds import check_comes_back
    from ckptstore.plugins.foreign.plain_pickles import refused_by_torch, save

    state = _state(snapshot, selects, allow_pickle)
    # torch.save accepts no path that begins with a dot and has no suffix
    with open(scratch, "xb") as file:
        save(state, file)
    if not allow_pickle:
        check_comes_back(scratch, state)
    return Written(refused=tuple(refused_by_torch(state)))


def _write_dcp(
    snapshot: "Snapshot", scratch: Path, selects: Selects, allow_pickle: bool
) -> Written:
    from ckptstore.interop.dcp import store_to_dcp
    from ckptstore.interop.dcp.convert import PlainPlanner, write_directory

    if selects == (EVERYTHING,):
        store_to_dcp(snapshot, scratch, allow_pickle=allow_pickle)
        return Written()
    state = _state(snapshot, selects, allow_pickle)
    write_directory(
        scratch,
        state if isinstance(state, dict) else {selects[0]: state},
        PlainPlanner(allow_pickle),
    )
    return Written()


def _state(snapshot: "Snapshot", selects: Selects, allow_pickle: bool) -> object:
    """The value of one key; a dict of values by keys; or a dict of leaves by paths if not all of
    `selects` are keys.
    """
    if selects == (EVERYTHING,):
        return snapshot.state_dict(allow_pickle=allow_pickle)
    from ckptstore.plugin.snapshots import contents_of

    contents = contents_of(snapshot)
    if all(select in contents.trees for select in selects):
        found = {key: snapshot.state_dict(key, allow_pickle=allow_pickle) for key in selects}
        return found if len(selects) > 1 else found[selects[0]]
    paths = [tree.schema.paths[i] for tree, i in selected(contents, selects)]
    return {path: snapshot.read(path, allow_pickle=allow_pickle) for path in paths}


# -- files --
