"""What a commit is made from, and what comes out of one."""

from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest, Prepared, label_of
from ckptstore.commit.parts import GivenPart
from ckptstore.commit.pending import Pending
from ckptstore.commit.plan import ChunkRun, Extent, Flats, extent_of_bytes, is_floating, plan_chunks
from ckptstore.commit.transaction import Committed, Destination, TreeContent, WholeCommitter
from ckptstore.core.options import Async, Ranks
from ckptstore.log.sessions import Session
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.dedup import GcPin, items_of
