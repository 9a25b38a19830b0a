"""Send commits to another store, and match the commits and leaves of two."""

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
