"""What a commit is made from, and what comes out of one."""

from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest, Prepared, label_of
from ckptstore.commit.pending import Pending
from ckptstore.commit.plan import ChunkRun, Extent, Flats, is_floating, plan_chunks
from ckptstore.commit.transaction import Committed, Destination, WholeCommitter
from ckptstore.core.options import Ranks
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import GcPin, items_of
