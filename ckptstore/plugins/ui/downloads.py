"""Tensors of a commit as files for a browser: one as .npy, or several as .safetensors.

Bytes are read and verified a slice at a time while they are sent, so memory does not grow with the
file.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.model import CommitInfo, box_of_region, width_of
from ckptstore.plugin.reading import Memory, ReadRequest, Tree
from ckptstore.plugin.text import selector
from ckptstore.plugins.parsers.safetensors_header import encode_header
from ckptstore.plugins.ui.commit_views import Found, leaf_at, leaves_of
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.tensor_views import numpy_dtype, regions
from ckptstore.plugins.ui.values import clip

SLICE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Download:
    """A file: its name, its length, and its bytes in pieces."""

    name: str
    nbytes: int
    pieces: Iterator[bytes]


def one_tensor(store: OpenStore, id_: str, number: str, format: str) -> Download:
    """One leaf as `npy` or `safetensors`. Raises `InvalidInput` for a leaf without that form, and
    `Thinned`."""
    info = store.commit(id_)
    found = leaf_at(store, info, number)
    if format == "safetensors":
        return _safetensors(store, info, [found], f"{info.id[:12]}-leaf-{number}.safetensors")
    tree, i = found
    dtype, shape = tree.schema.dtypes[i], tree.schema.shapes[i]
    described = numpy_dtype(dtype) if tree.schema.kinds[i] == "tensor" else None
    if described is None:
        raise InvalidInput(f"NumPy has no {dtype or tree.schema.kinds[i]}; take .safetensors")
    tree.check(i)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head,
        {"descr": described.str, "fortran_order": False, "shape": shape},
    )
    nbytes = len(head.getvalue()) + tree.raw_bytes(i)
    name = f"{info.id[:12]}-leaf-{number}.npy"
    return Download(name, nbytes, _pieces(store, info, head.getvalue(), [found]))


def selection(store: OpenStore, id_: str, select: str) -> Download:
    """The tensors whose paths match the glob `select`, as one .safetensors file. Raises `NotFound`
    if there are none, and `Thinned` if one of them is gone."""
    info, is_selected = store.commit(id_), selector(select)
    found = [
        (tree, i)
        for tree, i in leaves_of(store, info)
        if tree.schema.kinds[i] == "tensor" and is_selected(tree.schema.paths[i])
    ]
    if not found:
        raise NotFound(f"no tensor of commit {info.id[:12]} matches {clip(select)!r}")
    return _safetensors(store, info, found, f"{info.id[:12]}.safetensors")


def _safetensors(store: OpenStore, info: CommitInfo, found: list[Found], name: str) -> Download:
    for tree, i in found:
        if (kind := tree.schema.kinds[i]) != "tensor":
            raise InvalidInput(f"{clip(tree.schema.paths[i])} is a {kind}, no tensor")
        tree.check(i)
    schemas = [(tree.schema, i) for tree, i in found]
    listed = [(schema.paths[i], schema.dtypes[i], schema.shapes[i]) for schema, i in schemas]
    header = encode_header(listed, {"format": "pt"})
    at = {schema.paths[i]: place for place, (schema, i) in enumerate(schemas)}
    found = [found[at[entry.name]] for entry in header.entries]
    head = header.raw
    nbytes = len(head) + sum(tree.raw_bytes(i) for tree, i in found)
    return Download(name, nbytes, _pieces(store, info, head, found))


def _pieces(store: OpenStore, info: CommitInfo, head: bytes, found: list[Found]) -> Iterator[bytes]:
    yield head
    for tree, i in found:
        yield from _tensor(store, info, tree, i)


def _tensor(store: OpenStore, info: CommitInfo, tree: Tree, i: int) -> Iterator[bytes]:
    shape, width = tree.schema.shapes[i], width_of(tree.schema.dtypes[i])
    for _, region in regions(shape, max(1, SLICE_BYTES // width)):
        box, _ = box_of_region(shape, region)
        buffer = bytearray(width * math.prod(box.lengths))
        request = ReadRequest(tree, i, Memory(memoryview(buffer)), box)
        store.reader.read([request], info.id)
        yield bytes(buffer)
