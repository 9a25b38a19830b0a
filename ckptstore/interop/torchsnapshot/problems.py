"""What this interface raises where scripts for TorchSnapshot expect a `RuntimeError`: an error of ckptstore's that is one too."""

from ckptstore.errors import CkptStoreError, InvalidInput, NotFound


class SnapshotFailed(CkptStoreError, RuntimeError):
    """A snapshot that was taken in the background was not made; `__cause__` says why."""


class UnusableState(InvalidInput, RuntimeError):
    """An application state, or what a function made of its tensors, cannot be a snapshot: change the call."""


class NoSuchObject(NotFound, RuntimeError):
    """A snapshot has nothing under a path: ask `get_manifest` for those that it has."""
