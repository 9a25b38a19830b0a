"""How is a commit written as safetensors files by workers, without an accelerator?

The files are named and divided as Hugging Face's `save_pretrained` does. The host that asks makes
them, with their headers and sizes, beside the target. Each worker opens the store and writes ranges
of them, a few MiB at a time, and makes its writes durable. When all have, the files get their name.
A worker that dies leaves a range that the next one writes again; a host that dies leaves files
without a name, which the next export to the same place removes.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptstore.errors import InvalidInput
from ckptstore.interop.formats.new_files import (
    EVERYTHING,
    Exported,
    Leaf,
    Written,
    header_of,
    left_out,
    put,
    refuse_taken,
    tensors_of,
)
from ckptstore.plugin.handles import Resolved, StoreHandle
from ckptstore.plugin.model import MIB, Box, CommitInfo, Shape, width_of
from ckptstore.plugin.progress import Counter, Progress, silent
from ckptstore.plugin.reading import Reader, contents_at, cut
from ckptstore.plugin.work import ThreadPool, each_done
from ckptstore.plugins.adopt.adopting import SUFFIX
from ckptstore.plugins.engine.work import Place
from ckptstore.plugins.engine.writing import Part, Piece, write_part
from ckptstore.plugins.parsers.safetensors_header import Header, read_header

SHARD_BYTES = 5 << 30
"""The largest file, as Hugging Face's default was for long; a larger tensor has one of its own."""

TASK_BYTES = 256 * MIB
"""So much a task writes: it opens the store first, which must not count."""

_NAME = "model"


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write, and its tensors by their names."""

    name: str
    header: Header
    tensors: Mapping[str, Leaf]


def export_on(
    executor: Executor,
    handle: StoreHandle,
    found: Resolved | CommitInfo,
    path: str | os.PathLike[str],
    *,
    select: str | Sequence[str] = EVERYTHING,
    shard_bytes: int | None = None,
    progress: Progress = silent,
) -> Exported:
    """Write the tensors of a commit by the workers of `executor`; see `OnWorkers.export`."""
    target = Path(os.path.abspath(path))
    refuse_taken(target)
    selects = (select,) if isinstance(select, str) else tuple(dict.fromkeys(select))
    if target.suffix == SUFFIX and shard_bytes is not None:
        raise InvalidInput(
            f"{target.name} is the name of one file, and --shard-size (shard_bytes=) is for "
            "several: name a directory"
        )
    with closing(ThreadPool(1)) as threads:
        contents = contents_at(handle, Reader(handle.config, handle.objects, threads), found)
        named = tensors_of(contents, selects)
        files = plan_files(named, target.suffix, shard_bytes or SHARD_BYTES)

        def write(scratch: Path) -> Written:
            if target.suffix != SUFFIX:
                scratch.mkdir()
                _write_index(scratch, files)
            parts = [
                Part(Place.of(handle), found.id, str(where), pieces)
                for where, file in ((scratch / file.name, file) for file in files)
                for pieces in _made(where, file)
            ]
            counter = Counter(progress, "data", sum(part.nbytes for part in parts))
            with closing(each_done(executor, write_part, parts)) as done:
                for part, _ in done:
                    counter.add(part.nbytes)
            for file in files:
                read_header(scratch / file.name)
            return Written(left_out(contents, named))

        return put(target, "safetensors", write)


def plan_files(named: Mapping[str, Leaf], suffix: str, shard_bytes: int) -> list[NewFile]:
    """The files for tensors, in the order of these: one for a path with `suffix`, else as many as
    keep each within `shard_bytes`. Pure."""
    if suffix == SUFFIX:
        return [NewFile("", header_of(named), named)]
    shards, size = [dict[str, Leaf]()], 0
    for name, (tree, i) in named.items():
        nbytes = tree.raw_bytes(i)
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tree, i
        size += nbytes
    if len(shards) == 1:
        return [NewFile(f"{_NAME}{SUFFIX}", header_of(named), named)]
    return [
        NewFile(f"{_NAME}-{n:05d}-of-{len(shards):05d}{SUFFIX}", header_of(shard), shard)
        for n, shard in enumerate(shards, 1)
    ]


def pieces_of(file: NewFile, limit_bytes: int) -> Iterator[Piece]:
    """The tensors of a file, cut into boxes of at most `limit_bytes`. Pure."""
    for entry in file.header.entries:
        tree, leaf = file.tensors[entry.name]
        shape, width = tree.schema.shapes[leaf], width_of(tree.schema.dtypes[leaf])
        at = len(file.header.raw) + entry.start
        for box in boxes_of(shape, width, limit_bytes) if entry.stop > entry.start else ():
            nbytes = prod(box.lengths) * width
            yield Piece(tree.schema.paths[leaf], box, at, nbytes)
            at += nbytes


def boxes_of(shape: Shape, width: int, limit_bytes: int) -> Iterator[Box]:
    """Boxes of at most `limit_bytes`, or of one element, that are a tensor one behind the other in
    its row-major memory. Pure."""
    whole = Box((0,) * len(shape), shape)
    axis = next((axis for axis, length in enumerate(shape) if length > 1), None)
    if axis is None or prod(shape) * width <= limit_bytes:
        yield whole
        return
    row_bytes = prod(shape[axis + 1 :]) * width
    step = max(1, limit_bytes // row_bytes)
    for first in range(0, shape[axis], step):
        lengths = (*shape[:axis], min(step, shape[axis] - first), *shape[axis + 1 :])
        for box in boxes_of(lengths, width, limit_bytes):
            offsets = list(box.offsets)
            offsets[axis] += first
            yield Box(tuple(offsets), box.lengths)


def _write_index(directory: Path, files: Sequence[NewFile]) -> None:
    """Name the file of each tensor, if there are several."""
    if len(files) > 1:
        size = sum(file.header.data_bytes for file in files)
        places = {name: file.name for file in files for name in file.tensors}
        document = {"metadata": {"total_size": size}, "weight_map": places}
        text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
        (directory / f"{_NAME}{SUFFIX}.index.json").write_text(f"{text}\n", encoding="utf-8")


def _made(where: Path, file: NewFile) -> Iterator[tuple[Piece, ...]]:
    """Make a file with its header and its size; yields the pieces of each task."""
    with open(where, "xb", buffering=0) as new:
        new.write(file.header.raw)
        os.ftruncate(new.fileno(), len(file.header.raw) + file.header.data_bytes)
    for some in cut(list(pieces_of(file, TASK_BYTES)), lambda piece: piece.nbytes, TASK_BYTES):
        yield tuple(some)
