"""The catalog in PostgreSQL: the tables that the log's entries change as they are appended, so it
is never behind."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import text

from ckptstore.core.ids import CommitId
from ckptstore.core.model import Schema
from ckptstore.index.catalog import add_schema, add_shards
from ckptstore.index.postgres import Database
from ckptstore.index.queries import Queries, Rows, ShardInfo
from ckptstore.log.entries import Entry, Position


class PostgresCatalog:
    """What `Catalog` is for a file."""

    in_memory = False

    def __init__(self, database: Database) -> None:
        self._database = database

    def position(self) -> Position:
        return self.queries().position()

    def queries(self) -> Queries:
        return Queries(self._ask)

    def fold(self, entries: Iterable[Entry]) -> bool:
        """Nothing: an entry was folded when it was appended."""
        return True

    def missing_schemas(self) -> list[str]:
        return self.queries().missing_schemas()

    def add_schema(self, schema_id: str, schema: Schema) -> bool:
        return self._database.write(lambda connection: add_schema(connection, schema_id, schema))

    def add_shards(self, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
        return self._database.write(lambda connection: add_shards(connection, commit, boxes))

    def reset(self) -> None:
        """Nothing: the tables are as sound as the log beside them."""

    def close(self) -> None:
        self._database.close()

    def _ask(self, sql: str, values: Mapping[str, Any]) -> Rows:
        return self._database.read(
            lambda connection: connection.execute(text(sql), values).fetchall()
        )
