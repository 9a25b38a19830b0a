"""Disposable indexes on the host: the catalog of the log in SQL, the chunk index in LMDB; and the
log where `ckptstore.json` says that it is, in the store itself or in a database.
"""

import os
from typing import TYPE_CHECKING

from ckptstore.core.config import StoreConfig
from ckptstore.core.ids import StoreId
from ckptstore.errors import InvalidInput
from ckptstore.storage.contract import Storage

if TYPE_CHECKING:
    from ckptstore.plugins.postgres.log import PostgresLog

VARIABLE = "CKPTSTORE_INDEX"


def open_log_place(
    config: StoreConfig, storage: Storage, index: str | None, of_several: bool = False
) -> "PostgresLog | None":
    """The database that holds the log, or None if the log is in the store. `index` is its URL, by
    default `$CKPTSTORE_INDEX`; `of_several` means that it was given for several stores, so it is
    ignored for a store whose log is in itself.

    Raises `InvalidInput` if the log is elsewhere: two callers with different places would write two
    histories.
    """
    if not config.in_database:
        if index is not None and not of_several:
            raise InvalidInput(
                f"the log of {storage.url} is in the store itself, not in a database: leave index "
                "out, or move the log: "
                f"`ckptstore migrate --log-to URL`"
            )
        return None
    way = index or os.environ.get(VARIABLE)
    if not way:
        raise InvalidInput(
            f"the log of {storage.url} is in {config.log_place}: name that database, with "
            'storage=Storage(index="postgresql+psycopg://USER@HOST/DATABASE") (index= in fsspec), '
            f"--index (--to-index, --from-index for the other end of a mirror) or ${VARIABLE}"
        )
    log = database_log(way, config.store, storage)
    try:
        log.check(config.log_place)
    except BaseException:
        log.database.close()
        raise
    return log


def database_log(index: str, store: StoreId, storage: Storage) -> "PostgresLog":
    """The log of `store` in the database at `index`, whether or not it exists."""
    # Imported here because most stores have no database.
    from ckptstore.plugins.postgres.database import Database
    from ckptstore.plugins.postgres.log import PostgresLog

    return PostgresLog(Database(index, store), storage, store)
