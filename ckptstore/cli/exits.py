"""Exit codes of commands, and the errors behind them."""

import sqlite3
from enum import IntEnum

from ckptstore.errors import Busy, CkptStoreError, Corrupt, InvalidInput, NotFound


class Exit(IntEnum):
    """Exit codes; scripts may rely on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DAMAGED = 3
    NO_STORE = 10
    BUSY = 11
    INTERRUPTED = 130


class UsageError(CkptStoreError):
    """The command line cannot be understood. `command` is the part of it whose `--help` helps."""

    def __init__(self, message: str, command: str = "ckptstore") -> None:
        super().__init__(f"{message}; see `{command} --help`")


class NoStore(NotFound):
    """No store at the place that the command line names, or no place."""


class UnusableStore(CkptStoreError):
    """The place of the store holds something else, or a store of a newer format."""


def exit_of(error: BaseException) -> Exit:
    """The exit code for an error that ended a command."""
    match error:
        case UsageError() | InvalidInput():
            return Exit.USAGE
        case NoStore():
            return Exit.NO_STORE
        case Corrupt():
            return Exit.DAMAGED
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
    return Exit.BUSY if _busy(error) else Exit.FAILED


def _busy(error: BaseException) -> bool:
    """Whether others kept changing or locking the store, so that the command may be repeated."""
    from ckptstore.log.log import Refused

    cause = error.__cause__ or error
    locked = getattr(cause, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
    return locked or isinstance(error, Refused | Busy)
