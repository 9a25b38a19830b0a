"""Folding log entries into the tables of the catalog: `log.fold.apply` in SQL.

Statements are built once, and rows are gathered over many entries. A commit costs a dozen short
statements, whatever the history, and a thousand commits little more. Rows of packs are updated only
where they change: a commit may reuse all packs, but few of them are condemned.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ckptstore.core.ids import CommitId
from ckptstore.core.model import PackRecord, Schema
from ckptstore.index.queries import KINDS, ShardInfo
from ckptstore.index.tables import Execute
from ckptstore.log.entries import (
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Position,
    Register,
    Tag,
    Undelete,
    encode_entry,
)

_GATHERED = ("entries", "commits", "parents", "metrics", "packs", "commit_trees", "tags")
_DELETE_TAG = "DELETE FROM tags WHERE name = :key"
# Worded as the condition of the index `packs_condemned`; otherwise SQLite would not use it.
_CONDEMNED = "SELECT number FROM packs WHERE condemned"
_CONDEMN = "UPDATE packs SET condemned = :value WHERE number = :key"
_DELETE_PACK = "DELETE FROM packs WHERE number = :key"
_FORGET = "UPDATE commits SET forgotten = :value WHERE id = :key"
_SCHEMA = "SELECT number FROM schemas WHERE id = :key"
_SCHEMAS_OF = "SELECT schema FROM commit_trees WHERE n = :key"
_USES = "SELECT n FROM commit_trees WHERE schema = :key LIMIT 1"
_COMMIT = "SELECT n FROM commits WHERE id = :key"
_PURGE = tuple(
    f"DELETE FROM {table} WHERE n = :key"
    for table in ("commits", "parents", "metrics", "commit_trees", "shards")
)
_DROP_SCHEMA = (
    "DELETE FROM leaves WHERE schema = :key",
    "DELETE FROM schemas WHERE number = :key",
)
_SET_POSITION = "UPDATE position SET n = :n, hash = :hash, bytes = :bytes"
_POSITION = "SELECT n, hash, bytes FROM position"
_UNFILLED = "SELECT number FROM schemas WHERE id = :key AND leaves IS NULL"
_FILLED = "UPDATE schemas SET leaves = :count WHERE number = :key"
_SHARDED = "SELECT n FROM shards WHERE n = :key LIMIT 1"
_KIND = {kind: number for number, kind in enumerate(KINDS)}


def insert(execute: Execute, table: str, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows that have the same columns."""
    if rows:
        names, values = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
        execute(f"INSERT INTO {table} ({names}) VALUES ({values})", rows)


class CatalogFold:
    """A batch of entries in one transaction. `finish` writes the gathered rows."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._tags: dict[str, CommitId | None] = {}
        self._schemas: dict[str, int] = {}
        self._condemned = {number for (number,) in execute(_CONDEMNED)}

    def add(self, entry: Entry) -> None:
        """Fold the next entry."""
        body, n = entry.body, entry.n
        self._rows["entries"].append({"n": n, "data": encode_entry(entry)})
        match body:
            case Commit():
                self._commit(body, n, entry.time_ns)
            case Tag():
                self._tags[body.name] = body.commit
                self._set_condemned(body.reused, False)
            case Forget():
                self._set_forgotten(body.commits, n)
            case Undelete():
                self._set_forgotten(body.commits, 0)
                self._set_condemned(body.reused, False)
            case Condemn():
                self._set_condemned(body.packs, True)
                self._purge(body.purge)
            case Register():
                self._list(body.packs)
                self._set_condemned(body.condemn, True)
            case Delete():
                self._each(_DELETE_PACK, body.packs)
                self._condemned -= body.packs

    def finish(self, last: Entry) -> None:
        """Write the gathered rows; the catalog's position is `last` afterwards."""
        self._flush()
        self._execute(_SET_POSITION, last.position._asdict())

    def _commit(self, body: Commit, n: int, time_ns: int) -> None:
        self._rows["commits"].append(
            {
                "n": n,
                "id": body.commit,
                "content": body.content,
                "session": body.session,
                "run": body.run,
                "step": body.step,
                "message": body.message,
                "time_ns": time_ns,
                "logical_bytes": body.logical_bytes,
                "new_bytes": body.new_bytes,
                "leaves": body.leaves,
            }
        )
        self._rows["parents"].extend(
            {"n": n, "position": i, "parent": parent} for i, parent in enumerate(body.parents)
        )
        self._rows["metrics"].extend(
            {"n": n, "name": name, "value": None if math.isnan(x) else x}
            for name, x in body.metrics
        )
        self._rows["commit_trees"].extend(
            {"n": n, "key": key, "schema": self._schema(schema)} for key, schema in body.schemas
        )
        self._tags.update((name, body.commit) for name in body.tags)
        self._list(body.packs)
        self._set_condemned(body.reused, False)

    def _list(self, records: Iterable[PackRecord]) -> None:
        self._rows["packs"].extend(
            {
                "number": p.number,
                "id": p.id,
                "bytes": p.bytes,
                "chunks": p.chunks,
                "metadata": p.metadata,
            }
            for p in records
        )

    def _schema(self, schema: str) -> int:
        number = self._schemas.get(schema)
        if number is None:
            number = self._first(_SCHEMA, schema)
            if number is None:
                insert(self._execute, "schemas", [{"id": schema}])
                number = self._first(_SCHEMA, schema)
            self._schemas[schema] = number
        return number

    def _first(self, sql: str, key: object) -> Any:
        return first(self._execute, sql, key)

    def _set_condemned(self, numbers: frozenset[int], condemned: bool) -> None:
        changed = numbers - self._condemned if condemned else numbers & self._condemned
        self._each(_CONDEMN, changed, condemned)
        self._condemned = self._condemned | changed if condemned else self._condemned - changed

    def _set_forgotten(self, ids: Iterable[CommitId], n: int) -> None:
        self._each(_FORGET, ids, n)

    def _purge(self, ids: Iterable[CommitId]) -> None:
        self._flush()
        found = (self._first(_COMMIT, commit) for commit in ids)
        numbers = [n for n in found if n is not None]
        used = {
            schema
            for n in numbers
            for (schema,) in self._execute(_SCHEMAS_OF, {"key": n}).fetchall()
        }
        for statement in _PURGE:
            self._each(statement, numbers)
        unused = [schema for schema in used if self._first(_USES, schema) is None]
        for statement in _DROP_SCHEMA:
            self._each(statement, unused)
        self._schemas.clear()

    def _each(self, statement: Any, keys: Iterable[int | str], value: int | None = None) -> None:
        """Execute `statement` for each of `keys`, after the rows gathered so far."""
        rows = [{"key": key} if value is None else {"key": key, "value": value} for key in keys]
        if rows:
            self._flush()
            self._execute(statement, rows)

    def _flush(self) -> None:
        if self._tags:
            self._execute(_DELETE_TAG, [{"key": name} for name in self._tags])
            self._rows["tags"].extend(
                {"name": name, "commit_id": commit} for name, commit in self._tags.items() if commit
            )
            self._tags.clear()
        for table in _GATHERED:
            insert(self._execute, table, self._rows.pop(table, ()))


def first(execute: Execute, sql: str, key: object) -> Any:
    """The first column of the first row of a query, None if there is none."""
    row = execute(sql, {"key": key}).fetchone()
    return None if row is None else row[0]


def leaf_rows(
    schema: int, columns: Iterable[tuple[str, int, str, tuple[int, ...], int]]
) -> Iterator[dict[str, Any]]:
    """Rows of `leaves` for path, kind, dtype, shape and alias of each leaf."""
    shapes: dict[tuple[int, ...], str] = {}
    for number, (path, kind, dtype, shape, alias) in enumerate(columns):
        lengths = shapes.get(shape)
        if lengths is None:
            lengths = shapes[shape] = ",".join(map(str, shape))
        yield {
            "schema": schema,
            "number": number,
            "path": path,
            "kind": kind,
            "dtype": dtype,
            "shape": lengths,
            "alias": alias,
        }


def fold_entries(
    execute: Execute,
    entries: Sequence[Entry],
    *,
    at: Position | None = None,
    at_once: AbstractContextManager[object] | None = None,
) -> bool:
    """Fold `entries` within a transaction; False if they do not follow the position, which is `at`
    if the caller knows it.

    Statements whose results nobody needs run within `at_once`.
    """
    at = at or Position(*execute(_POSITION).fetchone())
    new = [entry for entry in entries if entry.n > at.n]
    if not new:
        return True
    if (new[0].n - 1, new[0].prev_hash, new[0].prev_bytes) != at:
        return False
    folding = CatalogFold(execute)
    for entry in new:
        folding.add(entry)
    with at_once or nullcontext():
        folding.finish(new[-1])
    return True


def add_schema(execute: Execute, schema_id: str, schema: Schema) -> bool:
    """Add the leaves of a schema within a transaction."""
    number = first(execute, _UNFILLED, schema_id)
    if number is not None:
        kinds = map(_KIND.__getitem__, schema.kinds)
        columns = zip(
            schema.paths, kinds, schema.dtypes, schema.shapes, schema.aliases, strict=True
        )
        insert(execute, "leaves", list(leaf_rows(number, columns)))
        execute(_FILLED, {"key": number, "count": len(schema)})
    return True


def add_shards(execute: Execute, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
    """Add the boxes of a commit within a transaction."""
    n = first(execute, _COMMIT, commit)
    if n is not None and first(execute, _SHARDED, n) is None:
        insert(execute, "shards", [_shard_row(n, number, box) for number, box in enumerate(boxes)])
    return True


def _shard_row(n: int, number: int, box: ShardInfo) -> dict[str, Any]:
    offsets, lengths = (",".join(map(str, numbers)) for numbers in (box.offsets, box.lengths))
    return {
        "n": n,
        "number": number,
        "path": box.path,
        "rank": box.rank,
        "offsets": offsets,
        "lengths": lengths,
    }
