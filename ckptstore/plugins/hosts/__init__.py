"""One store on the disks, or in the memory, of many hosts (docs/recovery.md)."""

from ckptstore.plugins.hosts.join import join

__all__ = ["join"]
