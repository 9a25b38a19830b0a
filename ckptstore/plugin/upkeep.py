"""Look after a store: gc, forgetting, disks, and what its index knows."""

from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
from ckptstore.maintenance import Spread, Stores
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
from ckptstore.maintenance.mover import WORKER_THREADS
from ckptstore.maintenance.thin import thin_commit
