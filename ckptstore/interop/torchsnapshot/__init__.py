"""How do scripts for TorchSnapshot use a store? By changing the import (docs/migrating.md).

    from ckptstore.interop.torchsnapshot import RNGState, Snapshot, StateDict

Names and signatures are those of TorchSnapshot 0.1.0. A snapshot is an ordinary commit, and a
commit is a snapshot. The package `torchsnapshot` is not needed; `ckptstore import` reads
directories that it wrote.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptstore.interop.torchsnapshot.manifest import INTERFACE_VERSION

if TYPE_CHECKING:
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

_LATER = {
    "PendingSnapshot": "ckptstore.interop.torchsnapshot.snapshot",
    "Snapshot": "ckptstore.interop.torchsnapshot.snapshot",
    "AppState": "ckptstore.interop.torchsnapshot.stateful",
    "RNGState": "ckptstore.interop.torchsnapshot.stateful",
    "StateDict": "ckptstore.interop.torchsnapshot.stateful",
    "Stateful": "ckptstore.interop.torchsnapshot.stateful",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
