"""How does a directory become the state of a commit? Tensors in its files become leaves, and all
other bytes literals.

Each file is read twice: for its hash, and for its chunks. Nothing is written below the directory.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptstore.errors import InvalidInput
from ckptstore.plugin.leaves import BytesSource, FlatState, Source, segment
from ckptstore.plugin.model import LeafKind, Node, Schema, Shape, width_of
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugin.writing import Flats
from ckptstore.plugins.adopt.directory import ListedFile, Listing, list_directory
from ckptstore.plugins.adopt.hashed_files import FileChanged, FileParts, HashedFile, hash_file
from ckptstore.plugins.adopt.manifest import (
    FILES,
    MANIFEST,
    MODEL,
    RESERVED,
    FileRecipe,
    LeafPart,
    Manifest,
    Part,
    encode_manifest,
)
from ckptstore.plugins.foreign.sources import (
    Entry,
    Joined,
    Strided,
    Window,
    check_tiling,
    shape_around,
)
from ckptstore.plugins.foreign.strides import gaps
from ckptstore.plugins.parsers.entries import entries_of
from ckptstore.plugins.parsers.indexes import (
    DCP_METADATA,
    OCDBT_MANIFEST,
    ONNX_SUFFIX,
    entries_elsewhere,
    is_index,
)

T = TypeVar("T")

SUFFIX = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors")
DCP_SHARD = re.compile(
    r"(?P<group>(?:.*/)?)shard-\d{5,}-(?P<stem>[^/]+)-(?P<part>\d{5,})-of-(?P<parts>\d{5,})\.safetensors"
)
_ROOT_GROUPS = {DCP_METADATA: "distcp", OCDBT_MANIFEST: "ocdbt"}


def read_twice(make: Callable[[], T]) -> T:
    """The result of `make`, which is called again once if a file changed meanwhile."""
    try:
        return make()
    except FileChanged:
        return make()


def adopted_state(root: Path, threads: ThreadPool, store: str) -> Flats:
    """The state of the directory `root`: its tensors, its files, its manifest. `store` is where the
    commit will be, which must not lie in `root`.

    Raises `InvalidInput` for a directory that a commit cannot hold, `Unavailable` if it cannot be
    read or changes.
    """
    place = Path(store)
    if place.is_dir() and place.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(
            f"the store {store} lies in {root}; adopt a directory without it, such as one "
            "checkpoint's"
        )
    return state_of(list_directory(root), threads)


def state_of(listing: Listing, threads: ThreadPool) -> Flats:
    """The state of what is listed. Raises `Unavailable` if it cannot be read or changes."""
    files: dict[str, HashedFile] = {}

    def read(item: tuple[str, ListedFile]) -> None:
        files[item[0]] = hash_file(item[1].path, item[1].identity)

    threads.spread(read, list(listing.files.items()))
    layout = _Layout(files)
    for group, found in _grouped(_parsed(listing, files)):
        layout.take(group, found)
    flats = layout.flats()
    parts = {name: layout.parts(name) for name in listing.files}
    recipes = {
        name: FileRecipe(
            files[name].size, files[name].mode, files[name].mtime_ns, files[name].blake3, each
        )
        for name, each in parts.items()
    }
    literals = [
        (name, _Leaf("", (), FileParts(files[name], _literals(each, layout.entries(name)))))
        for name, each in parts.items()
    ]
    manifest = encode_manifest(Manifest(listing.folders, listing.links, recipes))
    whole = Schema(0, (MANIFEST,), ("bytes",), ("",), ((),), (-1,))
    return {
        **flats,
        FILES: _flat(FILES, literals, "bytes"),
        MANIFEST: FlatState(whole, [BytesSource(manifest)]),
    }


def _literals(parts: Iterable[Part], entries: Iterable[Entry]) -> list[tuple[int, int]]:
    """The ranges of a file that its literal has: what lies between its tensors, and between the
    elements of one."""
    ranges, position = [], 0
    tensors = iter(entries)
    for part in parts:
        if isinstance(part, int):
            ranges.append((position, position + part))
            position += part
        else:
            entry = next(tensors)
            if entry.strides is not None:
                inner = gaps(entry.dtype, entry.shape, entry.strides)
                ranges += [(entry.start + first, entry.start + stop) for first, stop in inner]
            position = entry.stop
    return ranges


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors found in a file."""

    file: str
    group: str
    entries: list[Entry]


def _parsed(listing: Listing, files: Mapping[str, HashedFile]) -> list[_Found]:
    """The tensors in each file that has some."""
    found: dict[str, _Found] = {}

    def window(name: str) -> Window:
        # What is parsed is what was hashed: `read` compares it.
        return Window(files[name].read, 0, files[name].size)

    for name in sorted(filter(is_index, listing.files), key=lambda name: name.count("/")):
        below = name[: name.rfind("/") + 1]
        own = {
            other.removeprefix(below): window(other)
            for other in listing.files
            if other.startswith(below) and other != name
        }
        group = name if name.endswith(ONNX_SUFFIX) else below[:-1] or _ROOT_GROUPS[name]
        for part, entries in entries_elsewhere(name, window(name), own).items():
            found.setdefault(below + part, _Found(below + part, group, entries))
    for name in listing.files:
        if name not in found:
            entries = entries_of(window(name), name)
            found[name] = _Found(name, group_of(name, entries), entries)
    return [found[name] for name in sorted(found) if found[name].entries]


def group_of(name: str, entries: Iterable[Entry]) -> str:
    """The group of a file's tensors: that of its shards, or a group of its own."""
    if not name.endswith(SUFFIX):
        return name
    sharded = any(entry.saved_offsets is not None for entry in entries)
    if sharded and (shard := DCP_SHARD.fullmatch(name)):
        return shard["group"] + shard["stem"]
    return match["stem"] if (match := _SHARD.fullmatch(name)) else name.removesuffix(SUFFIX)


def _grouped(found: list[_Found]) -> list[tuple[str, _Found]]:
    """The key for the tensors of each file: `model` for the only group, or the only one of
    safetensors files."""
    groups = {each.group for each in found}
    tensors = {each.group for each in found if each.file.endswith(SUFFIX)} or groups
    main = next(iter(tensors)) if len(tensors) == 1 and MODEL not in groups else None
    return [(MODEL if each.group == main else each.group, each) for each in found]


@dataclass(frozen=True, slots=True)
class _Leaf:
    dtype: str
    shape: Shape
    source: Source


class _Layout:
    """The leaves of all files, while they are collected."""

    def __init__(self, files: Mapping[str, HashedFile]) -> None:
        self._files = files
        self._groups: dict[str, dict[str, list[tuple[str, Entry]]]] = {}
        self._keys: dict[str, tuple[str, list[Entry]]] = {}

    def take(self, key: str, found: _Found) -> None:
        """Add a file's tensors under `key`, or under the file's name if other files took their
        names; if they took that too, the file stays a literal."""
        for group in (key, found.file):
            taken = self._groups.get(group, {})
            if group not in RESERVED and not any(
                entry.name in taken and not _may_join(entry, taken[entry.name])
                for entry in found.entries
            ):
                here = self._groups.setdefault(group, {})
                for entry in found.entries:
                    here.setdefault(entry.name, []).append((found.file, entry))
                self._keys[found.file] = group, found.entries
                return

    def flats(self) -> dict[str, FlatState]:
        """The keys of the tensors. Boxes that do not make up a tensor stay in the literals."""
        return {
            key: _flat(key, leaves, "tensor")
            for key, group in self._groups.items()
            if (leaves := [(name, leaf) for name in group if (leaf := self._leaf(key, name))])
        }

    def _leaf(self, key: str, name: str) -> _Leaf | None:
        stored = self._groups[key][name]
        first = stored[0][1]
        width = width_of(first.dtype)
        pieces = [(entry.box, self._source(file, entry)) for file, entry in stored]
        boxes = [box for box, _ in pieces]
        try:
            shape = shape_around(boxes)
            check_tiling(name, shape, boxes)
        except (InvalidInput, ValueError):
            self._drop(key, name)
            return None
        return _Leaf(
            first.dtype, shape, pieces[0][1] if len(pieces) == 1 else Joined(shape, width, pieces)
        )

    def _source(self, file: str, entry: Entry) -> Source:
        whole = FileParts(self._files[file], [(entry.start, entry.stop)], width_of(entry.dtype))
        return whole if entry.strides is None else Strided(whole, entry)

    def _drop(self, key: str, name: str) -> None:
        for file in {file for file, _ in self._groups[key][name]}:
            kept = [entry for entry in self._keys[file][1] if entry.name != name]
            self._keys[file] = key, kept

    def entries(self, file: str) -> list[Entry]:
        """The tensors of a file that are leaves and have bytes, in order."""
        entries = self._keys.get(file, ("", []))[1]
        return [entry for entry in entries if entry.stop > entry.start]

    def parts(self, file: str) -> tuple[Part, ...]:
        """What a file is made of."""
        parts: list[Part] = []
        position, key = 0, self._keys.get(file, ("", []))[0]
        for entry in self.entries(file):
            if entry.start > position:
                parts.append(entry.start - position)
            boxes = [other.box for _, other in self._groups[key][entry.name]]
            path, shape = f"{segment(key)}/{segment(entry.name)}", shape_around(boxes)
            box = entry.box if len(boxes) > 1 else None
            parts.append(LeafPart(path, entry.dtype, shape, box, entry.strides))
            position = entry.stop
        rest = self._files[file].size - position
        return (*parts, rest) if rest else tuple(parts)


def _may_join(entry: Entry, others: list[tuple[str, Entry]]) -> bool:
    """Whether a piece may belong to the tensor of others with its name."""
    return all(
        entry.saved_offsets is not None
        and other.saved_offsets is not None
        and (other.dtype, len(other.shape)) == (entry.dtype, len(entry.shape))
        for _, other in others
    )


def _flat(key: str, leaves: Iterable[tuple[str, _Leaf]], kind: LeafKind) -> FlatState:
    """A key whose value is a dict of leaves, by name."""
    named = dict(leaves)
    count = len(named)
    schema = Schema(
        Node("dict", tuple(range(count)), tuple(named)),
        tuple(f"{segment(key)}/{segment(name)}" for name in named),
        (kind,) * count,
        tuple(leaf.dtype for leaf in named.values()),
        tuple(leaf.shape for leaf in named.values()),
        (-1,) * count,
    )
    return FlatState(schema, [leaf.source for leaf in named.values()])
