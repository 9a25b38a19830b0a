"""Which tensors lie in other files than the one that tells of them?"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckptstore.plugin.pointers import DIRECTORY_POINTERS
from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.parsers.entries import checked, entries_of, moved
from ckptstore.plugins.parsers.ocdbt import ocdbt_entries
from ckptstore.plugins.parsers.onnx_files import onnx_external
from ckptstore.plugins.parsers.pickle_ops import TooLarge, attributes, counts_of, items_of, walk

logger = logging.getLogger("ckptstore")

DCP_METADATA = DIRECTORY_POINTERS[0]
OCDBT_MANIFEST = "manifest.ocdbt"
ONNX_SUFFIX = ".onnx"
_OCDBT_FOLDER = "/d/"
"""Where the data files lie, below the manifest or below that of a process."""


def is_index(name: str) -> bool:
    """Whether a file of this name tells of tensors in other files."""
    base = name.rpartition("/")[2]
    return base in (DCP_METADATA, OCDBT_MANIFEST) or base.endswith(ONNX_SUFFIX)


def entries_elsewhere(
    name: str, index: Window, files: Mapping[str, Window]
) -> dict[str, list[Entry]]:
    """The tensors in other files that the index `name` tells of, by file. `files` are those below
    its folder, by their names relative to that."""
    parse: Callable[[Window, Mapping[str, Window]], dict[str, list[Entry]]]
    if name.endswith(ONNX_SUFFIX):
        parse, keys = onnx_external, list(files)
    elif name.endswith(OCDBT_MANIFEST):
        parse, keys = ocdbt_entries, [key for key in files if _OCDBT_FOLDER in f"/{key}"]
    else:
        keys = [key for key in files if key.endswith(".distcp") and "/" not in key]
        parse = _dcp_entries
    told = {key: files[key] for key in keys}
    try:
        found = parse(index, told)
    except TooLarge as error:
        logger.warning(
            "%s are kept as bytes, without tensors: of their metadata, %s",
            ", ".join(sorted(told)[:5]),
            error,
        )
        return {}
    except Exception:  # a forged file may raise anything
        return {}
    return {other: _checked_or_none(each, files[other].size) for other, each in found.items()}


def _dcp_entries(metadata: Window, files: Mapping[str, Window]) -> dict[str, list[Entry]]:
    """The tensors in the files of a DCP directory, each with its place in its global tensor."""
    found = attributes(walk(metadata.reader()))
    shapes: dict[str, list[tuple[Any, Any]]] = {}
    for name, item in items_of(found["state_dict_metadata"]):
        if not isinstance(name, str):
            continue
        chunks = [attributes(chunk) for chunk in attributes(item).get("chunks") or ()]
        shapes[name] = [
            (counts_of(chunk["offsets"]), counts_of(chunk["sizes"])) for chunk in chunks
        ]
    pieces = [(attributes(i), attributes(p)) for i, p in items_of(found["storage_data"])]
    entries: dict[str, list[Entry]] = {}
    for index, place in pieces:
        path, name = place.get("relative_path"), index.get("fqn")
        if not isinstance(path, str) or not isinstance(name, str) or path not in files:
            continue
        if place.get("transform_descriptors"):
            continue
        try:
            boxes = dict(shapes.get(name, ()))
            offset = None if index.get("offset") is None else counts_of(index["offset"])
            start = place["offset"]
            inner = _dcp_piece(files[path].part(start, place["length"]), name, offset, boxes)
        except Exception:
            continue
        mine = entries.setdefault(path, [])
        mine += [moved(entry, start) for entry in inner]
    return entries


def _dcp_piece(
    piece: Window, name: str, offset: tuple[int, ...] | None, boxes: Mapping[Any, Any]
) -> list[Entry]:
    """The tensors of one item: that of a piece of a tensor, or those of an object."""
    inner = entries_of(piece, name)
    if offset is None:
        return [replace(entry, name=f"{name}.{entry.name}") for entry in inner]
    if len(inner) == 1 and inner[0].shape == boxes.get(offset):
        return [replace(inner[0], name=name, saved_offsets=offset)]
    return []


def _checked_or_none(entries: list[Entry], size: int) -> list[Entry]:
    try:
        return checked(entries, size)
    except ValueError:
        return []
