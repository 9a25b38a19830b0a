"""Errors of ckptstore that are what scripts for TorchSnapshot expect as well: a `RuntimeError`, or
an `AssertionError`."""

from ckptstore.errors import CkptStoreError, InvalidInput, NotFound


class SnapshotFailed(CkptStoreError, RuntimeError):
    """A snapshot that was taken in the background was not made; `__cause__` says why."""


class UnusableState(InvalidInput, RuntimeError):
    """An application state, or what a function made of its tensors, cannot be a snapshot: change
    the call."""


class NoSuchObject(NotFound, RuntimeError):
    """A snapshot has nothing under a path: ask `get_manifest` for those that it has."""


class NoSuchKey(NoSuchObject, AssertionError):
    """A snapshot has no state under a key: ask `metadata` for those that it has."""


class MissingKeys(InvalidInput, AssertionError):
    """The target of a restore has keys that the snapshot lacks: leave them out, or pass
    `strict=False`."""
