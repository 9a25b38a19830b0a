"""`log.state.apply` in SQL: log entries as changes of the catalog's tables.

Statements are built once, and rows are gathered over many entries. A commit costs a dozen short
statements, whatever the history, and a thousand commits little more. Rows of packs are updated only
where they change: a commit may reuse all packs, but few of them are condemned.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol, TypeAlias

from ckptstore.core.ids import CommitId, StoreId
from ckptstore.core.model import PackRecord
from ckptstore.index.catalog_sqlite import REVISION
from ckptstore.index.queries import Rows
from ckptstore.log.entries import (
    Commit,
    Condemn,
    Delete,
    Entry,
    Forget,
    Position,
    Reduced,
    Register,
    Tag,
    Undelete,
    encode_entry,
    origin,
)
from ckptstore.log.state import State

_INSERTED = (
    *("entries", "commits", "parents", "metrics"),
    *("packs", "commit_trees", "tags", "replaced"),
)
_DELETE_TAG = "DELETE FROM tags WHERE name = :key"
# Worded as the condition of the index `packs_condemned`; otherwise SQLite would not use it.
_CONDEMNED = "SELECT number FROM packs WHERE condemned"
_CONDEMN = "UPDATE packs SET condemned = :value WHERE number = :key"
_DELETE_PACK = "DELETE FROM packs WHERE number = :key"
_FORGET = "UPDATE commits SET forgotten = :value WHERE id = :key"
_PLACE = "SELECT place, time_ns FROM commits WHERE id = :key"
_FORGET_HOLDER = f"{_FORGET} AND forgotten = 0"
_HOLDER = "SELECT commit_id FROM replaced WHERE id = :key"
_REPLACE = "UPDATE replaced SET commit_id = :value WHERE commit_id = :key"
_NOT_REPLACED = "DELETE FROM replaced WHERE id = :key"
_SCHEMAS = "SELECT id, number FROM schemas WHERE id IN ({})"
_ASKED = 500
"""Schemas that one statement asks for: SQLite and PostgreSQL limit its parameters."""
_SCHEMAS_OF = "SELECT schema FROM commit_trees WHERE n = :key"
_USES = "SELECT n FROM commit_trees WHERE schema = :key LIMIT 1"
_COMMIT = "SELECT n FROM commits WHERE id = :key"
_PURGE = tuple(
    f"DELETE FROM {table} WHERE n = :key"
    for table in ("commits", "parents", "metrics", "commit_trees")
)
_DROP_SCHEMA = "DELETE FROM schemas WHERE number = :key"
_ADD_SCHEMA = "UPDATE schemas SET data = :value WHERE id = :key"
_ADD_STATISTICS = (
    "INSERT INTO statistics VALUES (:key, :data) ON CONFLICT (key) DO UPDATE "
    "SET data = excluded.data WHERE length(excluded.data) > length(statistics.data)"
)
_SET_POSITION = "UPDATE position SET n = :n, hash = :hash, bytes = :bytes"
_POSITION = "SELECT n, hash, bytes FROM position"

Within: TypeAlias = AbstractContextManager[object]


class Tables(Protocol):
    """The catalog's tables within a transaction. The SQL is portable between SQLite and PostgreSQL,
    with named parameters."""

    def rows(self, sql: str, values: Mapping[str, Any]) -> Rows:
        """The rows that a query selects."""

    def change(self, sql: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute a statement once for each of `rows`, which give its parameters."""


@cache
def _insert(table: str, columns: tuple[str, ...]) -> str:
    names = ", ".join(f'"{column}"' for column in columns)
    return f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{each}' for each in columns)})"


def _insert_into(tables: Tables, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that have values for the same columns."""
    tables.change(_insert(table, tuple(rows[0])), rows)


def stamp(tables: Tables, store: StoreId) -> None:
    """Write the rows that every catalog of `store` has into new tables: its revision, and the
    position before the first entry."""
    start = origin(store)
    _insert_into(tables, "alembic_version", [{"version_num": REVISION}])
    first = {"id": 1, "store": store, "n": start.n, "hash": start.hash, "bytes": start.bytes}
    _insert_into(tables, "position", [first])


class CatalogFold:
    """A batch of entries in one transaction. `finish` writes the gathered rows."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._tags: dict[str, CommitId | None] = {}
        self._schemas: dict[str, int] = {}
        self._condemned = {number for (number,) in tables.rows(_CONDEMNED, {})}

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
                for commit in body.commits:
                    self._take_back(commit, n)
                    self._set_forgotten([commit], 0)
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

    def add_state(self, state: State, entries_to_it: Iterable[Entry]) -> None:
        """Fill empty tables with `state` and copies of the entries that led to it, without folding
        these again."""
        for entry in entries_to_it:
            self._rows["entries"].append({"n": entry.n, "data": encode_entry(entry)})
            if not isinstance(body := entry.body, Commit):
                continue
            if (row := state.commits.get(body.commit)) is not None and row.n == entry.n:
                self._insert(body, row.n, row.place, row.time_ns, row.soft)
        lasts = {commit: state.in_place_of(commit) for commit in state.replaced}
        self._rows["replaced"].extend({"id": c, "commit_id": last} for c, last in lasts.items())
        self._tags.update(state.tags.items())
        records = (
            PackRecord(pack.id, pack.bytes, pack.chunks, pack.metadata, number)
            for number, pack in state.packs.items()
        )
        self._list(records)
        condemned = frozenset(number for number, pack in state.packs.items() if not pack.live)
        self._set_condemned(condemned, True)

    def finish(self, last: Position) -> None:
        """Write the gathered rows; the catalog's position is `last` afterwards."""
        self._flush()
        self._tables.change(_SET_POSITION, [last._asdict()])

    def _commit(self, body: Commit, n: int, time_ns: int) -> None:
        place, reduced = n, body if isinstance(body, Reduced) else None
        if reduced and reduced.replaces and (old := self._row(_PLACE, reduced.replaces)):
            place, time_ns = old
            self._set_forgotten([reduced.replaces], n)
            self._put_in_place(body.commit, reduced.replaces)
        else:
            self._put_in_place(body.commit)
        self._insert(body, n, place, time_ns, 0)
        self._tags.update((name, body.commit) for name in body.tags)
        self._list(body.packs)
        self._set_condemned(body.reused, False)

    def _insert(self, body: Commit, n: int, place: int, time_ns: int, forgotten: int) -> None:
        """The rows of one commit."""
        reduced = body if isinstance(body, Reduced) else None
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
                "forgotten": forgotten,
                "place": place,
                "thinned": json.dumps(reduced.thinned if reduced else ()),
                "lossy": json.dumps(reduced.cast if reduced else ()),
            }
        )
        self._rows["parents"].extend(
            {"n": n, "position": i, "parent": parent} for i, parent in enumerate(body.parents)
        )
        self._rows["metrics"].extend(
            {"n": n, "name": name, "value": None if math.isnan(x) else x}
            for name, x in body.metrics
        )
        self._number({schema for _, schema in body.schemas})
        self._rows["commit_trees"].extend(
            {"n": n, "key": key, "schema": self._schemas[schema]} for key, schema in body.schemas
        )

    def _take_back(self, commit: CommitId, n: int) -> None:
        """Undo that another commit has the place of `commit`."""
        last = self._in_place_of(commit)
        if last != commit and self._row(_COMMIT, commit):
            self._each(_FORGET_HOLDER, [last], n)
            self._put_in_place(commit)

    def _put_in_place(self, commit: CommitId, *others: CommitId) -> None:
        """As `log.state._in_place`; but here each row names the last commit of its place."""
        for last in {self._in_place_of(each) for each in (commit, *others)} - {commit}:
            self._tables.change(_NOT_REPLACED, [{"key": commit}])
            self._tables.change(_REPLACE, [{"key": last, "value": commit}])
            _insert_into(self._tables, "replaced", [{"id": last, "commit_id": commit}])

    def _in_place_of(self, commit: CommitId) -> CommitId:
        # Folding entries leaves no row of this table to be written later.
        found = self._tables.rows(_HOLDER, {"key": commit})
        return CommitId(found[0][0]) if found else commit

    def _row(self, sql: str, key: str) -> Any:
        self._flush()
        return next(iter(self._tables.rows(sql, {"key": key})), None)

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

    def _number(self, ids: AbstractSet[str]) -> None:
        """Look up the numbers of schemas; those that have none get one."""
        self._look_up(ids)
        if new := sorted(ids - self._schemas.keys()):
            _insert_into(self._tables, "schemas", [{"id": schema} for schema in new])
            self._look_up(ids)

    def _look_up(self, ids: AbstractSet[str]) -> None:
        unknown = sorted(ids - self._schemas.keys())
        for start in range(0, len(unknown), _ASKED):
            some = {f"id{i}": each for i, each in enumerate(unknown[start : start + _ASKED])}
            sql = _SCHEMAS.format(", ".join(f":{name}" for name in some))
            for schema, number in self._tables.rows(sql, some):
                self._schemas[schema] = number

    def _set_condemned(self, numbers: frozenset[int], condemned: bool) -> None:
        changed = numbers - self._condemned if condemned else numbers & self._condemned
        self._each(_CONDEMN, changed, condemned)
        self._condemned = self._condemned | changed if condemned else self._condemned - changed

    def _set_forgotten(self, ids: Iterable[CommitId], n: int) -> None:
        self._each(_FORGET, ids, n)

    def _purge(self, ids: Iterable[CommitId]) -> None:
        self._flush()
        numbers = [n for commit in ids for (n,) in self._tables.rows(_COMMIT, {"key": commit})]
        used = {schema for n in numbers for (schema,) in self._tables.rows(_SCHEMAS_OF, {"key": n})}
        for statement in _PURGE:
            self._each(statement, numbers)
        unused = (n for n in used if not self._tables.rows(_USES, {"key": n}))
        self._each(_DROP_SCHEMA, unused)
        self._schemas.clear()

    def _each(self, sql: str, keys: Iterable[int | str], value: int | None = None) -> None:
        """Execute `sql` for each of `keys`, after the rows gathered so far."""
        rows = [{"key": key} if value is None else {"key": key, "value": value} for key in keys]
        if rows:
            self._flush()
            self._tables.change(sql, rows)

    def _flush(self) -> None:
        if self._tags:
            self._tables.change(_DELETE_TAG, [{"key": name} for name in self._tags])
            self._rows["tags"].extend(
                {"name": name, "commit_id": commit} for name, commit in self._tags.items() if commit
            )
            self._tags.clear()
        for table in _INSERTED:
            if rows := self._rows.pop(table, None):
                _insert_into(self._tables, table, rows)


def fold_entries(
    tables: Tables,
    entries: Sequence[Entry],
    *,
    at: Position | None = None,
    at_once: Within | None = None,
) -> bool:
    """Fold `entries` within a transaction; False if they do not follow the position, which is `at`
    if the caller knows it.

    `at_once` wraps statements whose results nobody needs.
    """
    at = at or _position(tables)
    new = [entry for entry in entries if entry.n > at.n]
    if not new:
        return True
    if (new[0].n - 1, new[0].prev_hash, new[0].prev_bytes) != at:
        return False
    folding = CatalogFold(tables)
    for entry in new:
        folding.add(entry)
    with at_once or nullcontext():
        folding.finish(new[-1].position)
    return True


def fold_state(tables: Tables, state: State, entries_to_it: Iterable[Entry]) -> bool:
    """Fill the empty tables with `state` within a transaction; False if they are not empty."""
    if _position(tables).n:
        return False
    folding = CatalogFold(tables)
    folding.add_state(state, entries_to_it)
    folding.finish(state.position)
    return True


def _position(tables: Tables) -> Position:
    """The last folded entry. Raises `ValueError` for tables without one."""
    ((n, digest, nbytes),) = tables.rows(_POSITION, {})
    return Position(n, digest, nbytes)


def add_schemas(tables: Tables, found: Mapping[str, bytes]) -> bool:
    """Add encoded schemas that commits name within a transaction."""
    rows = [{"key": schema, "value": data} for schema, data in found.items()]
    tables.change(_ADD_SCHEMA, rows)
    return True


def add_statistics(tables: Tables, found: Mapping[bytes, bytes]) -> bool:
    """Add measured statistics by key within a transaction. Statistics replace moments, which are
    shorter; otherwise the first measurement stays."""
    rows = [{"key": key, "data": data} for key, data in found.items()]
    tables.change(_ADD_STATISTICS, rows)
    return True
