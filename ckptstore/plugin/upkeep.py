"""Look after a store: policies, gc, disks, and what its index knows."""

from ckptstore.index.queries import PackInfo, TagInfo, Totals
from ckptstore.index.suspect_packs import DISTRUST_NAME, SuspectPacks
from ckptstore.maintenance import Counter, Progress, silent
from ckptstore.maintenance.check.data import load_record
from ckptstore.maintenance.disk_space import EVERYTHING, DiskWatch, expected_bytes, look, warning
from ckptstore.maintenance.forget import forget_commits, remove_tag, set_tag, undelete
from ckptstore.maintenance.gc import GcOptions, collect, plans_at
from ckptstore.maintenance.gc.session_monitor import activities
from ckptstore.maintenance.retention import (
    ForgetPlan,
    KeepBest,
    KeepLast,
    KeepSince,
    Policy,
    check_metrics,
    plan_policies,
)
from ckptstore.maintenance.usage import usage
