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
from ckptstore.repository.pack_writer import PackSet
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


class CopyWorker:
    """A thread that copies chunks from the source into its own pack in the target."""

    def __init__(
        self, source: StoreHandle, runs: Iterable[Sequence[ChunkBatch]], packs: PackSet
    ) -> None:
        self._source, self._runs, self._packs = source, runs, packs
        self._pack_writer = packs.pack_writer()
        self._memory = bytearray(RUN_BYTES)

    def work(self) -> None:
        try:
            for run in self._runs:
                self._run(run)
            self._packs.close_aside(self._pack_writer)
        except BaseException:
            self._pack_writer.discard()
            raise

    def _run(self, run: Sequence[ChunkBatch]) -> None:
        buffers = self._buffers([size for chunk_batch in run for size in chunk_batch.sizes])
        ids = b"".join(chunk for chunk_batch in run for chunk in chunk_batch.ids)
        with reading_source():
            self._source.objects.read_into(
                ids, buffers, describe=lambda i: "being sent to a mirror"
            )
        filled = iter(buffers)
        for chunk_batch in run:
            codec = (
                codecs.SPLIT_ZSTD
                if self._packs.codec == codecs.ZSTD and chunk_batch.width > 1
                else self._packs.codec
            )
            raws = list(islice(filled, len(chunk_batch.ids)))
            self._pack_writer.add(
                chunk_batch.ids,
                raws,
                chunk_batch.width,
                TENSOR,
                codec=codec,
                run_bytes=chunk_batch.raw_bytes,
            )
        self._pack_writer.flush()

    def _buffers(self, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for chunks of `sizes`, reused for every batch, since fresh memory costs as much
        as the copy into it."""
        # Chunks may be larger than a run.
        if sum(sizes) > len(self._memory):
            self._memory = bytearray(sum(sizes))
        memory, ends = memoryview(self._memory), list(accumulate(sizes))
        return [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def cut(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Ranges of items of at most `limit_bytes` together, or of one item."""
    ends = list(accumulate(sizes, initial=0))
    return coalesce(ends[:-1], ends[1:], limit_bytes=limit_bytes)


def grouped(batch: Sequence[ChunkBatch], limit_bytes: int) -> list[Sequence[ChunkBatch]]:
    """Consecutive chunk batches of at most `limit_bytes` together."""
    return [batch[some] for some in cut([part.raw_bytes for part in batch], limit_bytes)]
