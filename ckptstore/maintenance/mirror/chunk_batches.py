"""Copying chunks to a mirror: batches of chunks, and the threads that read, verify and pack
them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice

from ckptstore.core.config import RUN_BYTES
from ckptstore.core.ids import ChunkId
from ckptstore.errors import Corrupt, NotFound
from ckptstore.objects import codecs
from ckptstore.objects.pack import TENSOR
from ckptstore.repository.chunk_reader import coalesce
from ckptstore.repository.pack_writer import PackSet, PackWriter
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Consecutive chunks of one leaf that the target lacks, at most `RUN_BYTES` of them."""

    ids: tuple[ChunkId, ...]
    sizes: tuple[int, ...]
    width: int

    @property
    def raw_bytes(self) -> int:
        return sum(self.sizes)


class DamagedMirrorSource(Exception):
    """The source cannot read what a commit needs; the message says why."""


@contextmanager
def reading_source() -> Iterator[None]:
    """Attribute damage found in the block to the source, not the target."""
    try:
        yield
    except (Corrupt, NotFound) as error:
        raise DamagedMirrorSource(str(error)) from error


def copy_chunks(
    source: StoreHandle,
    runs: Iterable[Sequence[ChunkBatch]],
    packs: PackSet,
    pack_writer: PackWriter,
) -> None:
    """Copy chunks from the source into packs of the target, on this thread."""
    memory = memoryview(bytearray(RUN_BYTES))
    try:
        for run in runs:
            sizes = [size for part in run for size in part.sizes]
            # Reused for every run, since fresh memory costs as much as the copy into it. Chunks may
            # be larger than a run.
            if sum(sizes) > len(memory):
                memory = memoryview(bytearray(sum(sizes)))
            ends = accumulate(sizes)
            buffers = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            ids = b"".join(chunk for part in run for chunk in part.ids)
            with reading_source():
                source.objects.read_into(ids, buffers, describe=lambda i: "being sent to a mirror")
            filled = iter(buffers)
            for part in run:
                split = packs.codec == codecs.ZSTD and part.width > 1
                pack_writer.add(
                    part.ids,
                    list(islice(filled, len(part.ids))),
                    part.width,
                    TENSOR,
                    codec=codecs.SPLIT_ZSTD if split else packs.codec,
                    run_bytes=part.raw_bytes,
                )
            pack_writer.flush()
        packs.close_aside(pack_writer)
    except BaseException:
        pack_writer.discard()
        raise


def cut(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Ranges of items of at most `limit_bytes` together, or of one item."""
    ends = list(accumulate(sizes, initial=0))
    return coalesce(ends[:-1], ends[1:], limit_bytes=limit_bytes)


def grouped(batch: Sequence[ChunkBatch], limit_bytes: int) -> list[Sequence[ChunkBatch]]:
    """Consecutive chunk batches of at most `limit_bytes` together."""
    return [batch[some] for some in cut([part.raw_bytes for part in batch], limit_bytes)]
