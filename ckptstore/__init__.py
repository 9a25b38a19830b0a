"""A content-addressed, versioned checkpoint store for PyTorch.

    store = ckptstore.open("checkpoints")
    store.commit(app_state, step=100)
    store.resume(app_state)

Importing this package does not import torch; the first use of a name below does, where it must.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptstore.errors import (
    Busy,
    Cancelled,
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    ReadOnly,
    Thinned,
    Unavailable,
    Untrusted,
)

if TYPE_CHECKING:
    from ckptstore.commit.outages import Health
    from ckptstore.core.options import Async, CommitProgress, Ranks, Storage
    from ckptstore.internals import PendingCommit
    from ckptstore.maintenance.compact.plan import CompactPolicy
    from ckptstore.maintenance.retention import (
        KeepBest,
        KeepEverySteps,
        KeepLast,
        KeepPeriods,
        KeepWithin,
    )
    from ckptstore.open_store import Mirror, clone, open, open_pointer, write_pointer
    from ckptstore.snapshot import Snapshot
    from ckptstore.state.stateful import RNGState, StateDict
    from ckptstore.state.values import register_class, register_value
    from ckptstore.store import Store

__version__ = "0.2.0"

__all__ = [
    "Async",
    "Busy",
    "Cancelled",
    "CkptStoreError",
    "CommitProgress",
    "CompactPolicy",
    "Conflict",
    "Corrupt",
    "Health",
    "InvalidInput",
    "KeepBest",
    "KeepEverySteps",
    "KeepLast",
    "KeepPeriods",
    "KeepWithin",
    "Mirror",
    "NoSpace",
    "NotFound",
    "PendingCommit",
    "RNGState",
    "Ranks",
    "ReadOnly",
    "Snapshot",
    "StateDict",
    "Storage",
    "Store",
    "Thinned",
    "Unavailable",
    "Untrusted",
    "__version__",
    "clone",
    "open",
    "open_pointer",
    "register_class",
    "register_value",
    "write_pointer",
]

_LATER = {
    "Async": "ckptstore.core.options",
    "Health": "ckptstore.commit.outages",
    "Mirror": "ckptstore.open_store",
    "Ranks": "ckptstore.core.options",
    "Storage": "ckptstore.core.options",
    "clone": "ckptstore.open_store",
    "open": "ckptstore.open_store",
    "open_pointer": "ckptstore.open_store",
    "write_pointer": "ckptstore.open_store",
    "Store": "ckptstore.store",
    "PendingCommit": "ckptstore.internals",
    "CommitProgress": "ckptstore.core.options",
    "Snapshot": "ckptstore.snapshot",
    "StateDict": "ckptstore.state.stateful",
    "RNGState": "ckptstore.state.stateful",
    "register_class": "ckptstore.state.values",
    "register_value": "ckptstore.state.values",
    "KeepLast": "ckptstore.maintenance.retention",
    "KeepEverySteps": "ckptstore.maintenance.retention",
    "KeepBest": "ckptstore.maintenance.retention",
    "KeepWithin": "ckptstore.maintenance.retention",
    "CompactPolicy": "ckptstore.maintenance.compact.plan",
    "KeepPeriods": "ckptstore.maintenance.retention",
}


_OF_TORCH = {
    "save": "; ckptstore.open(place).commit(app_state, step=…) stores a state",
    "load": "; ckptstore.open(place).checkout(step).restore(app_state) restores one",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'ckptstore' has no attribute {name!r}{_OF_TORCH.get(name, '')}")


def __dir__() -> list[str]:
    return sorted(__all__)
