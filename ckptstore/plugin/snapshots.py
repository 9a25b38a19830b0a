"""Snapshots from inside, and the store as its own methods see it."""

from ckptstore.core.settings import Settings
from ckptstore.internals import MakeMetadata, PendingCommit, StoreInternals
from ckptstore.restore.restore import (
    RestoreOperation,
    RestoreOptions,
    RestoreReport,
    Select,
    assemble_nodes,
)
from ckptstore.snapshot import Snapshot, begin_restore, contents_of
