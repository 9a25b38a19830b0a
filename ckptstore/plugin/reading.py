"""Read leaves of commits, or parts of them, into memory."""

from ckptstore.contents import CommitContents, Leaf, Trees, contents_at, leaf_of
from ckptstore.repository.chunk_reader import coalesce, cut
from ckptstore.repository.footers import read_table
from ckptstore.restore.read_plan import ChunkTarget, select
from ckptstore.restore.reader import (
    ChunkRead,
    Destination,
    InFile,
    Memory,
    NamedChunks,
    Reader,
    ReadRequest,
    Tree,
    refuse_losses,
)
