"""What can go wrong, as a tree of classes by what the caller does next.

Each message says what, which, wanted, got and the next step.
"""

from collections.abc import Mapping
from types import MappingProxyType


class CkptStoreError(Exception):
    """Root of every error that ckptstore raises on purpose.

    `causes` says what failed on which rank, where several ranks did something together; empty
    otherwise.
    """

    causes: Mapping[int, str] = MappingProxyType({})


class NotFound(CkptStoreError, KeyError):
    """A store, commit, tag or leaf that was asked for is not there: ask for another."""

    # KeyError prints the repr of its argument; people read the message itself.
    __str__ = Exception.__str__


class Thinned(NotFound):
    """The commit no longer has this leaf: take it from a commit that has it, or leave it out."""


class InvalidInput(CkptStoreError, ValueError):
    """What the caller passed in cannot be used: change the call."""


class Conflict(CkptStoreError):
    """What the caller wants contradicts what others did meanwhile: look again, then decide."""


class Corrupt(CkptStoreError):
    """Stored bytes are not what was written: restore from elsewhere, run `ckptstore fsck`."""


class Untrusted(CkptStoreError):
    """A commit lacks a signature that the caller requires: get it from a place that you trust."""


class Unavailable(CkptStoreError):
    """Storage did not answer or has no room: make it available, then repeat the call."""


class NoSpace(Unavailable):
    """Storage is full, or over its quota: `ckptstore forget` and `ckptstore gc --now` make room,
    then repeat the call."""


class Busy(Unavailable):
    """Others were faster each time, within the time allowed: nothing was changed, repeat the
    call."""


class Cancelled(CkptStoreError):
    """The caller gave this commit up: nothing was changed."""


class ReadOnly(CkptStoreError):
    """This store or this handle may not be written: open it differently."""
