"""TorchSnapshot's interface on a store: scripts change the import (docs/migrating.md).

    from ckptstore.interop.torchsnapshot import RNGState, Snapshot, StateDict

Names and signatures are those of TorchSnapshot 0.1.0. A snapshot is an ordinary commit, and a
commit is a snapshot. The package `torchsnapshot` is not needed; `ckptstore import` reads
directories that it wrote.
"""

from ckptstore.interop.torchsnapshot.manifest import INTERFACE_VERSION
from ckptstore.interop.torchsnapshot.snapshot import PendingSnapshot, Snapshot
from ckptstore.interop.torchsnapshot.stateful import AppState, RNGState, StateDict, Stateful

__version__ = INTERFACE_VERSION
"""The version of TorchSnapshot whose interface this is."""

__all__ = [
    "AppState",
    "PendingSnapshot",
    "RNGState",
    "Snapshot",
    "StateDict",
    "Stateful",
    "__version__",
]
