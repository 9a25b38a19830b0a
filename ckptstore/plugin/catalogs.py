"""What a database needs that keeps the log and the catalog of a store."""

from ckptstore.index.catalog_fold import Tables, add_schemas, add_statistics, fold_entries, stamp
from ckptstore.index.catalog_sqlite import REVISION
from ckptstore.index.queries import Queries, Rows
from ckptstore.index.tables import make_tables, migrate
from ckptstore.log.entries import Entry, Position, decode_entry
