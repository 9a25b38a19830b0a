"""Moving a store's log between the store and a database, and rebuilding a lost database.

A move appends `moved` to the old log, which ends appends there, then copies the entries, then
replaces `ckptstore.json`. The same command finishes an interrupted move; until then the store is
read-only.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice

from ckptstore.errors import Conflict, InvalidInput, NotFound
from ckptstore.plugin.handles import (
    VARIABLE,
    Log,
    Moved,
    StoreHandle,
    check_exclusive_create,
    database_log,
    encode_config,
    read_config,
)
from ckptstore.plugin.model import CONFIG_KEY, LOG_FILES, StoreConfig
from ckptstore.plugin.storage import open_storage
from ckptstore.plugins.postgres.log import PostgresLog, token_of

_SLICE = 500


@dataclass(frozen=True, slots=True)
class LogMoved:
    """The new place of the log, and its number of entries."""

    place: str
    generation: int
    entries: int


def move_log(
    place: str | os.PathLike[str],
    to: str | None,
    *,
    index: str | None = None,
) -> LogMoved:
    """Move the log to the database at `to`, or with None into the store itself. `index` is the
    database that holds it now, if any.

    Raises `InvalidInput` if it is there already, is being moved elsewhere, or cannot be there, and
    the errors of opening and appending.
    """
    with closing(StoreHandle(place, index=index)) as handle:
        handle.check_writable()
        if to is None:
            return _into_the_store(handle)
        target = database_log(to, handle.config.store, handle.storage)
        with closing(target.database):
            return _into_a_database(handle, target)


def restore_log(
    place: str | os.PathLike[str],
    *,
    index: str | None = None,
) -> int:
    """Bring the database that holds the log up to the copies of its entries, creating missing
    tables. Returns the number of missing entries.

    Raises `InvalidInput` for a store whose log is not in a database, `Corrupt` if the database
    disagrees with the copies.
    """
    with _log_of(place, index) as (config, log, files):
        try:
            log.name()
        except NotFound:
            log.make()
        missing = _fill(log, files)
        log.copy_rest()
        log.adopt(config.log_place)
        return missing


def migrate_tables(
    place: str | os.PathLike[str],
    *,
    index: str | None = None,
) -> tuple[str, str]:
    """Migrate the tables in the database to this version of ckptstore; their revision before and
    after."""
    with _log_of(place, index) as (_, log, _):
        before = log.revision()
        log.migrate()
        return before, log.revision()


def _into_the_store(handle: StoreHandle) -> LogMoved:
    log = handle.database
    if log is None:
        raise InvalidInput(f"the log of {handle.url} is in the store already")
    check_exclusive_create(handle.storage)
    _announce(handle, LOG_FILES)
    log.copy_rest()
    return _arrive(handle, LOG_FILES)


def _into_a_database(handle: StoreHandle, target: PostgresLog) -> LogMoved:
    # Left by a move that was interrupted, or by one in the other direction.
    try:
        name = target.make()
    except Conflict:
        name = target.name()
    if handle.config.in_database and token_of(name) == token_of(handle.config.log_place):
        raise InvalidInput(f"the log of {handle.url} is in {name} already")
    _announce(handle, name)
    if handle.database is not None:
        handle.database.copy_rest()
    _fill(target, handle.log)
    return _arrive(handle, name)


def _announce(handle: StoreHandle, name: str) -> None:
    """Append `moved`, unless an interrupted move already did."""
    state = handle.log.replay()
    if state.moved is None or state.moved[0] <= state.generation:
        handle.log.append(Moved(name, handle.config.generation + 1))
    elif state.moved[1] != name:
        raise InvalidInput(
            f"the log of {handle.url} is being moved to {state.moved[1]}: finish that move first"
        )


def _fill(target: PostgresLog, source: Log) -> int:
    entries, count = source.read_entries(*target.position()), 0
    while part := list(islice(entries, _SLICE)):
        target.fill(part)
        count += len(part)
    return count


def _arrive(handle: StoreHandle, name: str) -> LogMoved:
    config = handle.config.moved(name, handle.config.generation + 1)
    handle.storage.put(CONFIG_KEY, encode_config(config))
    return LogMoved(name, config.generation, handle.log.replay().n)


@contextmanager
def _log_of(
    place: str | os.PathLike[str], index: str | None
) -> Iterator[tuple[StoreConfig, PostgresLog, Log]]:
    """The content of `ckptstore.json`, the log in the database, which may be absent, and the
    copies of its entries."""
    with closing(open_storage(os.fspath(place))) as storage:
        config, way = read_config(storage), index or os.environ.get(VARIABLE)
        if not config.in_database or not way:
            raise InvalidInput(
                f"{storage.url}: wanted a store whose log is in a database, and --index or "
                f"${VARIABLE} to say which"
            )
        log = database_log(way, config.store, storage)
        with closing(log.database):
            yield config, log, Log(storage, config.store, config.generation)
