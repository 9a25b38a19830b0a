"""Which errors do scripts for TorchSnapshot expect? ckptstore's errors that are also a
`RuntimeError` or an `AssertionError`.
"""

from ckptstore.errors import CkptStoreError, InvalidInput, NotFound


class SnapshotFailed(CkptStoreError, RuntimeError):
    """A background snapshot failed; `__cause__` has the reason."""


class UnusableState(InvalidInput, RuntimeError):
    """An application state, or prepared tensors of it, cannot be a snapshot: change the call."""


class NoSuchObject(NotFound, RuntimeError):
    """A snapshot has nothing under a path: `get_manifest` lists its paths."""


class NoSuchKey(NoSuchObject, AssertionError):
    """A snapshot has no state under a key: `metadata` lists its keys."""


class MissingKeys(InvalidInput, AssertionError):
    """The target of a restore has keys that the snapshot lacks: leave them out, or pass
    `strict=False`."""
