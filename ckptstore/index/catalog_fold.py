"""Folding log entries into the tables of the catalog: `log.fold.apply` in SQL.

Statements are built once, and rows are gathered over many entries. A commit costs a dozen short
statements, whatever the history, and a thousand commits little more. Rows of packs are updated only
where they change: a commit may reuse all packs, but few of them are condemned.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, text, update

from ckptstore.core.ids import CommitId
from ckptstore.core.model import PackRecord, Schema
from ckptstore.index.queries import KINDS, ShardInfo
from ckptstore.index.tables import (
    commit_trees,
    commits,
    entries,
    leaves,
    metrics,
    packs,
    parents,
    position,
    schemas,
    shards,
    tags,
)
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

_INSERTED = (entries, commits, parents, metrics, packs, commit_trees, tags)
_INSERT = {table: insert(table) for table in (*_INSERTED, schemas)}
_DELETE_TAG = delete(tags).where(tags.c.name == bindparam("key"))
# Worded as the condition of the index `packs_condemned`; otherwise SQLite would not use it.
_CONDEMNED = select(packs.c.number).where(text("condemned"))
_CONDEMN = (
    update(packs).where(packs.c.number == bindparam("key")).values(condemned=bindparam("value"))
)
_DELETE_PACK = delete(packs).where(packs.c.number == bindparam("key"))
_FORGET = (
    update(commits).where(commits.c.id == bindparam("key")).values(forgotten=bindparam("value"))
)
_SCHEMA = select(schemas.c.number).where(schemas.c.id == bindparam("key"))
_SCHEMAS_OF = select(commit_trees.c.schema).where(commit_trees.c.n == bindparam("key"))
_USES = select(commit_trees.c.n).where(commit_trees.c.schema == bindparam("key")).limit(1)
_COMMIT = select(commits.c.n).where(commits.c.id == bindparam("key"))
_PURGE = tuple(
    delete(table).where(table.c.n == bindparam("key"))
    for table in (commits, parents, metrics, commit_trees, shards)
)
_DROP_SCHEMA = (
    delete(leaves).where(leaves.c.schema == bindparam("key")),
    delete(schemas).where(schemas.c.number == bindparam("key")),
)
_SET_POSITION = update(position).values(
    n=bindparam("new_n"), hash=bindparam("new_hash"), bytes=bindparam("new_bytes")
)

_POSITION = select(position.c.n, position.c.hash, position.c.bytes)
_UNFILLED = select(schemas.c.number).where(
    schemas.c.id == bindparam("key"), schemas.c.leaves.is_(None)
)
_FILLED = (
    update(schemas).where(schemas.c.number == bindparam("key")).values(leaves=bindparam("count"))
)
_LEAVES = insert(leaves)
_SHARDS = insert(shards)
_SHARDED = select(shards.c.n).where(shards.c.n == bindparam("key")).limit(1)
_KIND = {kind: number for number, kind in enumerate(KINDS)}

Within: TypeAlias = AbstractContextManager[object]


class CatalogFold:
    """A batch of entries in one transaction. `finish` writes the gathered rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[Table, list[dict[str, Any]]] = defaultdict(list)
        self._tags: dict[str, CommitId | None] = {}
        self._schemas: dict[str, int] = {}
        self._condemned = {number for (number,) in connection.execute(_CONDEMNED)}

    def add(self, entry: Entry) -> None:
        """Fold the next entry."""
        body, n = entry.body, entry.n
        self._rows[entries].append({"n": n, "data": encode_entry(entry)})
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
        self._connection.execute(
            _SET_POSITION, {"new_n": last.n, "new_hash": last.hash, "new_bytes": last.bytes}
        )

    def _commit(self, body: Commit, n: int, time_ns: int) -> None:
        self._rows[commits].append(
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
        self._rows[parents].extend(
            {"n": n, "position": i, "parent": parent} for i, parent in enumerate(body.parents)
        )
        self._rows[metrics].extend(
            {"n": n, "name": name, "value": None if math.isnan(x) else x}
            for name, x in body.metrics
        )
        self._rows[commit_trees].extend(
            {"n": n, "key": key, "schema": self._schema(schema)} for key, schema in body.schemas
        )
        self._tags.update((name, body.commit) for name in body.tags)
        self._list(body.packs)
        self._set_condemned(body.reused, False)

    def _list(self, records: Iterable[PackRecord]) -> None:
        self._rows[packs].extend(
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
            number = self._connection.execute(_SCHEMA, {"key": schema}).scalar()
            if number is None:
                self._connection.execute(_INSERT[schemas], {"id": schema})
                number = int(self._connection.execute(_SCHEMA, {"key": schema}).scalar_one())
            self._schemas[schema] = number
        return number

    def _set_condemned(self, numbers: frozenset[int], condemned: bool) -> None:
        changed = numbers - self._condemned if condemned else numbers & self._condemned
        self._each(_CONDEMN, changed, condemned)
        self._condemned = self._condemned | changed if condemned else self._condemned - changed

    def _set_forgotten(self, ids: Iterable[CommitId], n: int) -> None:
        self._each(_FORGET, ids, n)

    def _purge(self, ids: Iterable[CommitId]) -> None:
        self._flush()
        numbers = [
            n for commit in ids for (n,) in self._connection.execute(_COMMIT, {"key": commit})
        ]
        used = {
            schema
            for n in numbers
            for (schema,) in self._connection.execute(_SCHEMAS_OF, {"key": n})
        }
        for statement in _PURGE:
            self._each(statement, numbers)
        for statement in _DROP_SCHEMA:
            self._each(
                statement,
                [
                    schema
                    for schema in used
                    if not self._connection.execute(_USES, {"key": schema}).first()
                ],
            )
        self._schemas.clear()

    def _each(self, statement: Any, keys: Iterable[int | str], value: int | None = None) -> None:
        """Execute `statement` for each of `keys`, after the rows gathered so far."""
        rows = [{"key": key} if value is None else {"key": key, "value": value} for key in keys]
        if rows:
            self._flush()
            self._connection.execute(statement, rows)

    def _flush(self) -> None:
        if self._tags:
            self._connection.execute(_DELETE_TAG, [{"key": name} for name in self._tags])
            self._rows[tags].extend(
                {"name": name, "commit_id": commit} for name, commit in self._tags.items() if commit
            )
            self._tags.clear()
        for table in _INSERTED:
            if rows := self._rows.pop(table, None):
                self._connection.execute(_INSERT[table], rows)


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
    connection: Connection,
    entries: Sequence[Entry],
    *,
    at: Position | None = None,
    at_once: Callable[[Connection], Within] = nullcontext,
) -> bool:
    """Fold `entries` within a transaction; False if they do not follow the position, which is `at`
    if the caller knows it.

    `at_once` wraps statements whose results nobody needs.
    """
    at = at or Position(*connection.execute(_POSITION).one())
    new = [entry for entry in entries if entry.n > at.n]
    if not new:
        return True
    if (new[0].n - 1, new[0].prev_hash, new[0].prev_bytes) != at:
        return False
    folding = CatalogFold(connection)
    for entry in new:
        folding.add(entry)
    with at_once(connection):
        folding.finish(new[-1])
    return True


def add_schema(connection: Connection, schema_id: str, schema: Schema) -> bool:
    """Add the leaves of a schema within a transaction."""
    number = connection.execute(_UNFILLED, {"key": schema_id}).scalar()
    if number is not None:
        kinds = map(_KIND.__getitem__, schema.kinds)
        columns = zip(
            schema.paths, kinds, schema.dtypes, schema.shapes, schema.aliases, strict=True
        )
        if rows := list(leaf_rows(number, columns)):
            connection.execute(_LEAVES, rows)
        connection.execute(_FILLED, {"key": number, "count": len(schema)})
    return True


def add_shards(connection: Connection, commit: CommitId, boxes: Sequence[ShardInfo]) -> bool:
    """Add the boxes of a commit within a transaction."""
    n = connection.execute(_COMMIT, {"key": commit}).scalar()
    if n is not None and boxes and not connection.execute(_SHARDED, {"key": n}).first():
        connection.execute(
            _SHARDS, [_shard_row(n, number, box) for number, box in enumerate(boxes)]
        )
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
