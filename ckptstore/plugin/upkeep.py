"""Look after a store: gc, disks, mirrors, repair, and what its index knows."""

from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
from ckptstore.maintenance import Spread, Stores
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
from ckptstore.maintenance.compact import CompactReport
from ckptstore.maintenance.compact.plan import CompactPolicy, policy_of
from ckptstore.maintenance.disk_space import (
    COMMITS_AHEAD,
    MAKE_ROOM,
    DiskRoom,
    DiskWatch,
    expected_bytes,
    free_bytes,
    gained_by,
    look,
    warning,
)
from ckptstore.maintenance.forget import (
    all_forgotten,
    carry_out,
    forget_by_policy,
    forget_commits,
    plan_retention,
    remove_tags,
    rename_tag,
    set_tag,
    undelete,
)
from ckptstore.maintenance.gc import GcOptions, GcReport, collect
from ckptstore.maintenance.gc.mark import short_keys
from ckptstore.maintenance.gc.plan import GcPlan
from ckptstore.maintenance.gc.session_monitor import Activity, activities
from ckptstore.maintenance.mirror import Mirrored, MirrorOptions, mirror
from ckptstore.maintenance.mirror_match import Leaves, compare_leaves
from ckptstore.maintenance.mirror_plan import (
    all_commits,
    choose,
    counterparts,
    find_akin,
    other_end,
    plan_between,
)
from ckptstore.maintenance.mover import WORKER_THREADS
from ckptstore.maintenance.repair import check_source, repair
from ckptstore.maintenance.thin import thin_commit
