"""Look for damage and repair it; the metadata of a commit without a snapshot."""

from ckptstore.maintenance.check import (
    Finding,
    Level,
    Report,
    Severity,
    Share,
    parse_level,
    parse_shard,
    parse_share,
)
from ckptstore.maintenance.check.data import load_record
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import (
    OfflineStore,
    offline_store_of,
    open_offline_store,
)
from ckptstore.maintenance.check.trees import metadata_of, read_document
from ckptstore.maintenance.repair import check_source, repair
