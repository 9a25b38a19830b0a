"""How does a worker write ranges of a file? It imports no torch: memory is for the bytes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from ckptstore.plugin.handles import find_commit
from ckptstore.plugin.model import MIB, Box, CommitId
from ckptstore.plugin.reading import CommitContents, InFile, Reader, ReadRequest, contents_at
from ckptstore.plugin.work import ThreadPool
from ckptstore.plugins.engine.work import Place, not_reached, open_at, readers

READ_BYTES = 64 * MIB
"""Bound of the memory to read into, unless chunks are larger than a quarter of it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor at `path`, whose bytes go to a file from `at` on."""

    path: str
    box: Box
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one task writes into `file`, from a commit of the store at `place`."""

    place: Place
    commit: CommitId
    file: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def write_part(part: Part) -> None:
    """Write some ranges of a file, durably, in a worker. The file must be there: a worker that does
    not see it is elsewhere, or too late. Raises as the reads do, and `Unavailable`."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(part.file, "r+b", buffering=0))
        except OSError as error:
            raise not_reached(part.file, error) from error
        contents, wanted = stack.enter_context(_contents(part)), []
        for piece in part.pieces:
            tree, leaf = contents.find(piece.path)
            wanted.append(ReadRequest(tree, leaf, InFile(file.fileno(), piece.at), piece.box))
        budget_bytes = max(READ_BYTES, 4 * contents.reader.chunk_bytes)
        contents.read(wanted, memory_budget_bytes=budget_bytes)
        os.fsync(file.fileno())


@contextmanager
def _contents(part: Part) -> Iterator[CommitContents]:
    """The commit of a part, in the store opened anew: by its log it knows where gc has moved
    chunks."""
    with ExitStack() as stack:
        handle = stack.enter_context(closing(open_at(part.place)))
        found = find_commit(handle, part.commit, None)
        threads = stack.enter_context(closing(ThreadPool(readers(handle.storage))))
        yield contents_at(handle, Reader(handle.config, handle.objects, threads), found)
