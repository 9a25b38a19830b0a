"""How is an adopted directory described, so that it can be written again? One JSON document per
commit, which is checked before anything is written.

A file is a list of parts: bytes of its literal, which lie one behind the other in the leaf of its
name under the key `files`, and leaves, or boxes of leaves.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.plugin.encoding import canonical, field
from ckptstore.plugin.model import WIDTHS, Box, Shape
from ckptstore.plugins.adopt.directory import Folder, Link
from ckptstore.plugins.foreign.sources import check_tiling
from ckptstore.plugins.foreign.strides import can_be_strided

FILES = "files"
MANIFEST = "manifest"
MODEL = "model"
RESERVED = (FILES, MANIFEST)

VERSION = 1
_TIME = re.compile(r"-?[0-9]{1,19}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LeafPart:
    """All bytes of a tensor, or those of a box of it. `dtype` and `shape` are the tensor's.

    With `strides`, the elements lie in the file by these, and what lies between them is the next of
    the literal's bytes.
    """

    path: str
    dtype: str
    shape: Shape
    box: Box | None = None
    strides: Shape | None = None

    @property
    def region(self) -> Box:
        """The box that it takes."""
        return self.box or Box.whole(self.shape)


Part: TypeAlias = int | LeafPart
"""A number of the literal's bytes, or a leaf's."""


@dataclass(frozen=True, slots=True)
class FileRecipe:
    """A file: what it is made of, and what it was. `blake3` is that of all its bytes, in hex."""

    size: int
    mode: int
    mtime_ns: int
    blake3: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A directory: its folders, itself as `""`, its links and its files, by relative name."""

    folders: dict[str, Folder]
    links: dict[str, Link]
    files: dict[str, FileRecipe]


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical JSON of a manifest; times are strings, since they exceed 2^53."""
    document = {
        "version": VERSION,
        "folders": {
            name: [folder.mode, str(folder.mtime_ns)] for name, folder in manifest.folders.items()
        },
        "links": {name: [link.target, str(link.mtime_ns)] for name, link in manifest.links.items()},
        "files": {
            name: {
                "size": file.size,
                "mode": file.mode,
                "mtime_ns": str(file.mtime_ns),
                "blake3": file.blake3,
                "parts": [_part_to_json(part) for part in file.parts],
            }
            for name, file in manifest.files.items()
        },
    }
    return canonical.encode(document)


def _part_to_json(part: Part) -> Any:
    if isinstance(part, int):
        return part
    if part.strides is not None:
        where = [*map(list, part.region), list(part.strides)]
    else:
        where = [*map(list, part.box or ())]
    return [part.path, part.dtype, list(part.shape), *where]


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`. Raises `InvalidInput` for anything else, and for names that
    lead out of the directory or through a link."""
    try:
        document = canonical.decode(data)
        if (version := document.get("version")) != VERSION:
            _refuse(f"it is of version {version!r:.20}; this version reads {VERSION}")
        manifest = Manifest(
            {name: Folder(*_mode_and_time(f)) for name, f in _table(document, "folders").items()},
            {name: _link(link) for name, link in _table(document, "links").items()},
            {name: _file(file) for name, file in _table(document, "files").items()},
        )
    except InvalidInput:
        raise
    except (AttributeError, CkptStoreError, LookupError, TypeError, ValueError) as error:
        raise InvalidInput(f"the manifest of an adopted directory is damaged: {error}") from error
    _check_names(manifest)
    _check_parts(manifest)
    return manifest


def _table(document: Any, name: str) -> dict[str, Any]:
    return field(document, name, dict)


def _mode_and_time(found: Any) -> tuple[int, int]:
    mode, time = found
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        _refuse(f"{mode!r:.40} is not the mode of a file")
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        _refuse(f"{time!r:.40} is not a time in ns")
    return mode, int(time)


def _link(found: Any) -> Link:
    target, time = found
    if not isinstance(target, str) or not target or "\0" in target:
        _refuse(f"{target!r:.40} is not the text of a link")
    return Link(target, _mode_and_time([0, time])[1])


def _file(found: Any) -> FileRecipe:
    mode, mtime_ns = _mode_and_time([found["mode"], found["mtime_ns"]])
    size, hashed = found["size"], found["blake3"]
    if not _are_counts([size]) or not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
        _refuse("a file has no size, or no hash")
    parts = tuple(_part(part) for part in field(found, "parts", list))
    return FileRecipe(size, mode, mtime_ns, hashed, parts)


def _part(found: Any) -> Part:
    if _are_counts([found]):
        return int(found)
    path, dtype, shape, *box = found
    named = isinstance(path, str) and isinstance(dtype, str) and dtype in WIDTHS
    if not named or len(box) not in (0, 2, 3) or not all(map(_are_counts, (shape, *box))):
        _refuse(f"{str(found)[:80]} is not a part of a file")
    part = LeafPart(path, dtype, tuple(shape), Box(*map(tuple, box[:2])) if box else None)
    if len(box) < 3:
        return part
    if not can_be_strided(dtype, part.region.lengths, tuple(box[2])):
        _refuse(f"{str(found)[:80]} has strides that no part of a file has")
    whole = part.box == Box.whole(part.shape)
    return replace(part, strides=tuple(box[2]), box=None if whole else part.box)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


def _check_names(manifest: Manifest) -> None:
    if "" not in manifest.folders:
        _refuse("it lacks the directory itself")
    names = [*manifest.folders, *manifest.links, *manifest.files]
    if len(set(names)) != len(names):
        _refuse("a name is there twice")
    for name in names:
        parts = name.split("/")
        if name and (not {"", ".", ".."}.isdisjoint(parts) or "\0" in name):
            _refuse(f"{name[:80]!r} is not the name of a file in the directory")
        if name and "/".join(parts[:-1]) not in manifest.folders:
            _refuse(f"what {name[:80]!r} would lie in is not a directory")


def _check_parts(manifest: Manifest) -> None:
    """Raise `InvalidInput` if files have the same bytes of a leaf twice, or lack some."""
    boxes: dict[tuple[str, str, Shape], list[Box]] = {}
    for file in manifest.files.values():
        for part in file.parts:
            if isinstance(part, LeafPart):
                boxes.setdefault((part.path, part.dtype, part.shape), []).append(part.region)
    if len({path for path, _, _ in boxes}) != len(boxes):
        _refuse("a leaf is there with two shapes")
    for (path, _, shape), stored in boxes.items():
        check_tiling(f"{path} in the manifest", shape, stored)


def _refuse(why: str) -> NoReturn:
    raise InvalidInput(f"the manifest of an adopted directory cannot be used: {why}")
