"""One store on the disks, or in the memory, of many hosts (docs/recovery.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.plugins.hosts.joining import join

__all__ = ["join"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # an agent, which starts through here, needs nothing of it
        from ckptstore.plugins.hosts import joining

        return getattr(joining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
