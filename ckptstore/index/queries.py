"""Catalog queries: portable SQL with named parameters, for any connection.

`index.catalog_sqlite` runs them with the standard library alone, `Catalog.queries` through
SQLAlchemy. Answers are as of the last folded log entry.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple, Self, TypeAlias

from ckptstore.core.ids import CommitId, PackId, SessionId
from ckptstore.core.model import CommitInfo, Schema
from ckptstore.core.refs import Best
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.entries import Position
from ckptstore.objects.schema import decode_schema

Rows: TypeAlias = Sequence[Any]
"""Rows, each indexed and unpacked as a tuple is."""

Column: TypeAlias = "type | tuple[type, ...] | Callable[[Sequence[Any]], Sequence[Any]]"
"""A column's values: of a type, of one of several, or as a function returns them all. It raises
what `typed` takes for damage."""

Types: TypeAlias = tuple[Column, ...]


class TagInfo(NamedTuple):
    name: str
    commit: CommitId
    run: str
    step: int | None


class RunInfo(NamedTuple):
    """A run with its newest commit."""

    run: str
    commits: int
    latest: CommitId
    step: int | None
    time_ns: int


class Point(NamedTuple):
    """A commit as a point of curves. `metric` is the metric of its run that most of the commits
    asked for have, a loss among equals, and None if this commit lacks it. A NaN has no value."""

    id: CommitId
    run: str
    time_ns: int
    logical_bytes: int
    new_bytes: int
    metric: str | None
    value: float | None


class PackInfo(NamedTuple):
    number: int
    id: PackId
    bytes: int
    chunks: int
    metadata: bool
    condemned: bool


class Totals(NamedTuple):
    """Counts of the store; `commits` leaves out forgotten ones."""

    commits: int
    forgotten: int
    runs: int
    tags: int


def typed(types: Types, rows: Rows, *, one: bool) -> list[tuple[Any, ...]]:
    """Check each column of `rows` against its type. A value of another type is damage."""
    try:
        columns = zip(types, zip(*rows, strict=True), strict=True) if rows else ()
        found = list(zip(*(_decoded(type_, values) for type_, values in columns), strict=True))
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise Corrupt(
            f"the catalog has an invalid row: {error}; run `ckptstore reindex`"
        ) from error
    if one and len(found) != 1:
        raise Corrupt(f"the catalog has {len(found)} rows instead of one; run `ckptstore reindex`")
    return found


def _decoded(type_: Column, values: Sequence[Any]) -> Sequence[Any]:
    """The values of a column, decoded. Types are compared once each: pages ask for 100,000
    values."""
    if not isinstance(type_, type | tuple):
        return type_(values)
    for wrong in {each for each in map(type, values) if not issubclass(each, type_)}:
        value = next(value for value in values if type(value) is wrong)
        raise TypeError(f"{value!r:.60} has the wrong type")
    return values


def _each(decode: Callable[[Any], Any]) -> Column:
    """A column whose values `decode` converts, one by one."""
    return lambda values: [decode(value) for value in values]


def _hex_ids(values: Sequence[Any]) -> Sequence[Any]:
    """A column of ids of commits, contents or schemas."""
    _decoded(str, values)
    if {*map(len, values)} - {_ID_DIGITS} or not _DIGITS.fullmatch("".join(values)):
        raise ValueError("an id is none")
    return values


def _counts(values: Sequence[Any]) -> Sequence[Any]:
    """A column of numbers that are not negative."""
    if min(_decoded(int, values), default=0) < 0:
        raise ValueError(f"{min(values)} counts nothing")
    return values


def _texts(text: Any) -> tuple[str, ...]:
    """A column with a JSON list of texts."""
    if text == _NO_TEXTS:
        return ()
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{text!r:.60} is no list of texts")
    return tuple(found)


def _texts_by_name(text: Any) -> dict[str, str]:
    """A column with a JSON list of pairs of texts."""
    if text == _NO_TEXTS:
        return {}
    pairs = json.loads(text)
    if not isinstance(pairs, list) or not all(isinstance(each, list) for each in pairs):
        raise TypeError(f"{text!r:.60} is no list of pairs")
    return dict(map(_pair, pairs))


def _pair(texts: list[Any]) -> tuple[str, str]:
    name, value = texts
    if not (isinstance(name, str) and isinstance(value, str)):
        raise TypeError(f"{texts!r:.60} is no pair of texts")
    return name, value


Ask: TypeAlias = Callable[[str, Mapping[str, Any]], Rows]
Other: TypeAlias = "Callable[[Corrupt | Unavailable], Queries]"

_ID_DIGITS = 64
_DIGITS = re.compile("[0-9a-f]*")
_MAYBE_INT = (int, NoneType)
_MAYBE_STR = (str, NoneType)
_MAYBE_FLOAT = (int, float, NoneType)
_ANY_BYTES = (bytes, memoryview)
_NO_TEXTS = "[]"
_NO_VALUES: Mapping[str, Any] = {}
_COMMIT_TYPES: Types = (
    *(_counts, _hex_ids, _hex_ids, str, str, _MAYBE_INT, str, int, _counts, _counts, _counts, int),
    _each(_texts),
    _each(_texts_by_name),
)
_COMMIT = (
    "n, id, content, session, run, step, message, time_ns, logical_bytes, new_bytes, "
    "leaves, forgotten, thinned, lossy"
)
_POINTS = """
WITH shown AS (
    SELECT n, run, place FROM commits
    WHERE forgotten = 0 ORDER BY place DESC, n DESC LIMIT :limit
), ranked AS (
    SELECT s.run, m.name, ROW_NUMBER() OVER (PARTITION BY s.run
        ORDER BY COUNT(m.name) DESC, REPLACE(m.name, 'loss', '') = m.name, m.name) AS rank
    FROM shown s LEFT JOIN metrics m ON m.n = s.n GROUP BY s.run, m.name
)
SELECT c.id, c.run, c.time_ns, c.logical_bytes, c.new_bytes, m.name, m.value
FROM ranked r CROSS JOIN commits c LEFT JOIN metrics m ON m.n = c.n AND m.name = r.name
WHERE r.rank = 1 AND c.run = r.run AND c.forgotten = 0
AND c.place >= (SELECT MIN(place) FROM shown) ORDER BY c.place DESC, c.n DESC"""
_BATCH = 500


class Queries:
    """Queries on a catalog. They raise `Corrupt` if it is damaged and `Unavailable` if it does not
    answer."""

    def __init__(self, ask: Ask, close: Callable[[], None] = lambda: None) -> None:
        self._ask = ask
        self._other: Other | None = None
        self.close = close
        """Close the connection, if these queries own it."""

    def or_else(self, other: "Other") -> Self:
        """If this catalog turns out to be damaged or does not answer, answer from the one that
        `other` returns for the error."""
        self._other = other
        return self

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Answer all queries within the block from one snapshot. Requires a catalog in a file and a
        connection of its own."""
        self._ask("BEGIN", _NO_VALUES)
        try:
            yield
        finally:
            self._ask("ROLLBACK", _NO_VALUES)

    def position(self) -> Position:
        """The last folded log entry; `n` is 0 before the first."""
        return Position(*self._one((_counts, str, _counts), "SELECT n, hash, bytes FROM position"))

    def log(
        self,
        run: str | None = None,
        limit: int | None = None,
        *,
        forgotten: bool = False,
    ) -> list[CommitInfo]:
        """Commits, newest first: of one run or all, at most `limit`; forgotten ones on request."""
        return list(self.each(run, limit, forgotten=forgotten))

    def each(
        self, run: str | None = None, limit: int | None = None, *, forgotten: bool = False
    ) -> Iterator[CommitInfo]:
        """As `log`, a few hundred commits in memory at a time."""
        where = ("1 = 1" if forgotten else "forgotten = 0") + _in(run)
        stop = " LIMIT :limit" if limit is not None else ""
        sql = f"SELECT {_COMMIT} FROM commits WHERE {where} ORDER BY place DESC, n DESC{stop}"
        rows = self._rows(_COMMIT_TYPES, sql, {"run": run, "limit": limit})
        for start in range(0, len(rows), _BATCH):
            yield from self._infos(rows[start : start + _BATCH])

    def commit(self, commit: CommitId) -> CommitInfo:
        """One commit, forgotten or not; raises `NotFound`."""
        return self.commits([commit])[0]

    def commits(self, ids: Sequence[CommitId]) -> list[CommitInfo]:
        """Several commits, as `commit`."""
        found: dict[CommitId, CommitInfo] = {}
        for start in range(0, len(ids), _BATCH):
            values = {f"v{i}": id_ for i, id_ in enumerate(ids[start : start + _BATCH])}
            names = ", ".join(f":{name}" for name in values)
            sql = f"SELECT {_COMMIT} FROM commits WHERE id IN ({names})"
            for info in self._infos(self._rows(_COMMIT_TYPES, sql, values)):
                found[info.id] = info
        for id_ in ids:
            if id_ not in found:
                raise NotFound(
                    f"no commit {id_[:12]}: it was never made here or has been purged; see "
                    "`ckptstore log`"
                )
        return [found[id_] for id_ in ids]

    def points(self, limit: int) -> list[Point]:
        """The newest `limit` commits, newest first."""
        types = (_hex_ids, str, int, _counts, _counts, _MAYBE_STR, _MAYBE_FLOAT)
        return [Point(*row) for row in self._rows(types, _POINTS, {"limit": limit})]

    def children(self, commit: CommitId) -> list[CommitInfo]:
        """The commits that have `commit` as a parent, and are not forgotten, newest first."""
        ids = self._column(
            _hex_ids,
            "SELECT c.id FROM parents p JOIN commits c ON c.n = p.n LEFT JOIN replaced r "
            "ON r.id = p.parent WHERE COALESCE(r.commit_id, p.parent) = :id AND c.forgotten = 0 "
            "ORDER BY c.place DESC, c.n DESC",
            {"id": commit},
        )
        return self.commits([*dict.fromkeys(ids)])

    def tags(self) -> list[TagInfo]:
        sql = (
            "SELECT t.name, t.commit_id, c.run, c.step FROM tags t JOIN commits c ON c.id = "
            "t.commit_id ORDER BY t.name"
        )
        return [TagInfo(*row) for row in self._rows((str, _hex_ids, str, _MAYBE_INT), sql)]

    def runs(self) -> list[RunInfo]:
        """Runs with commits that are not forgotten, the most recent first."""
        rows = self._rows(
            (str, int, _hex_ids, _MAYBE_INT, int),
            "SELECT c.run, g.commits, c.id, c.step, c.time_ns"
            " FROM (SELECT MAX(place) AS place, COUNT(*) AS commits FROM commits"
            " WHERE forgotten = 0 GROUP BY run) g"
            " JOIN commits c ON c.place = g.place AND c.forgotten = 0 ORDER BY c.place DESC",
        )
        return [RunInfo(*row) for row in rows]

    def schema(self, schema: str) -> Schema | None:
        """The schema of that id, or None if it is missing."""
        sql = "SELECT data FROM schemas WHERE id = :id AND data IS NOT NULL"
        rows = self._rows((_each(decode_schema),), sql, {"id": schema})
        return rows[0][0] if rows else None

    def schemas(self) -> list[str]:
        """The schemas that were added."""
        sql = "SELECT id FROM schemas WHERE data IS NOT NULL ORDER BY number"
        return self._column(_hex_ids, sql)

    def missing_schemas(self) -> list[str]:
        """The schemas that commits name and that were not added yet."""
        sql = "SELECT id FROM schemas WHERE data IS NULL ORDER BY number"
        return [row[0] for row in self._rows((_hex_ids,), sql)]

    def statistics(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The measured statistics of chunks, by key; unmeasured chunks are left out."""
        found: dict[bytes, bytes] = {}
        for start in range(0, len(keys), _BATCH):
            values = {f"v{i}": key for i, key in enumerate(keys[start : start + _BATCH])}
            names = ", ".join(f":{name}" for name in values)
            sql = f"SELECT key, data FROM statistics WHERE key IN ({names})"
            found.update(self._rows((bytes, bytes), sql, values))
        return found

    def entry(self, n: int) -> bytes | None:
        """The copy of log entry `n`, if it was folded here. Unverified."""
        rows = self._rows((_ANY_BYTES,), "SELECT data FROM entries WHERE n = :n", {"n": n})
        return bytes(rows[0][0]) if rows else None

    def packs(self, session: SessionId | None = None) -> list[PackInfo]:
        """The packs that the log lists, or those of one session."""
        where = "" if session is None else "WHERE id >= :low AND id < :high "
        sql = (
            f"SELECT number, id, bytes, chunks, metadata, condemned FROM packs {where}"
            "ORDER BY number"
        )
        names = {"low": f"{session}-", "high": f"{session}."}
        rows = self._rows((_counts, str, _counts, _counts, int, int), sql, names)
        return [
            PackInfo(row[0], row[1], row[2], row[3], bool(row[4]), bool(row[5])) for row in rows
        ]

    def totals(self) -> Totals:
        commits = self._one(
            (int,) * 3,
            "SELECT COUNT(CASE WHEN forgotten = 0 THEN 1 END), COUNT(CASE WHEN forgotten <> 0 THEN "
            "1 END), COUNT(DISTINCT run) FROM commits",
        )
        return Totals(*commits, *self._one((int,), "SELECT COUNT(*) FROM tags"))

    def _rows(
        self, types: Types, sql: str, values: Mapping[str, Any] = _NO_VALUES, *, one: bool = False
    ) -> list[tuple[Any, ...]]:
        """The rows, each column checked against its type. If this catalog is damaged or does not
        answer, use the other one."""
        try:
            return typed(types, self._ask(sql, values), one=one)
        except (Corrupt, Unavailable) as error:
            if self._other is None:
                raise
            other = self._other(error)
            self._ask, self._other = other._ask, other._other
            return self._rows(types, sql, values, one=one)

    def _one(self, types: Types, sql: str) -> tuple[Any, ...]:
        return self._rows(types, sql, one=True)[0]

    # -- as `core.refs` asks --

    def newest(self, run: str | None, step: int | None = None) -> CommitId | None:
        test = "" if step is None else " AND step = :step"
        where = f"forgotten = 0{test}{_in(run)}"
        sql = f"SELECT id FROM commits WHERE {where} ORDER BY place DESC LIMIT 1"
        return self._first(sql, {"step": step, "run": run})

    def best(self, ref: Best, run: str | None) -> CommitId | None:
        return self._first(
            "SELECT c.id FROM metrics m JOIN commits c ON c.n = m.n WHERE m.name = :metric AND "
            f"m.value IS NOT NULL AND c.forgotten = 0{_in(run)} ORDER BY m.value "
            f"{'DESC' if ref.order == 'max' else 'ASC'}, c.place DESC LIMIT 1",
            {"metric": ref.metric, "run": run},
        )

    def tagged(self, name: str) -> CommitId | None:
        return self._first("SELECT commit_id FROM tags WHERE name = :name", {"name": name})

    def beginning(self, prefix: str) -> list[CommitId]:
        sql = "SELECT id FROM commits WHERE id >= :low AND id < :high ORDER BY id LIMIT 6"
        return self._column(_hex_ids, sql, {"low": prefix, "high": f"{prefix}g"})

    def parents_of(self, commit: CommitId) -> list[CommitId] | None:
        found = self._column(
            _MAYBE_STR,
            "SELECT COALESCE(r.commit_id, p.parent) FROM commits c LEFT JOIN parents p "
            "ON p.n = c.n AND p.position = 0 LEFT JOIN replaced r ON r.id = p.parent "
            "WHERE c.id = :id",
            {"id": commit},
        )
        return [parent for parent in found if parent] if found else None

    def _column(self, type_: Column, sql: str, values: Mapping[str, Any] = _NO_VALUES) -> list[Any]:
        return [value for (value,) in self._rows((type_,), sql, values)]

    def _first(self, sql: str, values: Mapping[str, Any]) -> CommitId | None:
        return next(iter(self._column(_hex_ids, sql, values)), None)

    def _infos(self, rows: Rows) -> list[CommitInfo]:
        numbers = [row[0] for row in rows]
        parents, metrics, schemas, tags = self._details(numbers, [row[1] for row in rows])
        return [
            CommitInfo(
                id=CommitId(id_),
                content=content,
                n=n,
                session=SessionId(session),
                run=run,
                step=step,
                message=message,
                time_ns=time_ns,
                parents=tuple(CommitId(row[0]) for row in parents[n]),
                metrics={name: math.nan if value is None else value for name, value in metrics[n]},
                tags=tuple(row[0] for row in tags[id_]),
                logical_bytes=logical_bytes,
                new_bytes=new_bytes,
                leaves=leaves,
                forgotten=forgotten != 0,
                thinned=thinned,
                cast=lossy,
                schemas=dict(schemas[n]),
            )
            for (
                n,
                id_,
                content,
                session,
                run,
                step,
                message,
                time_ns,
                logical_bytes,
                new_bytes,
                leaves,
                forgotten,
                thinned,
                lossy,
            ) in rows
        ]

    def _details(
        self, numbers: Sequence[int], ids: Sequence[str]
    ) -> Iterator[dict[Any, list[Any]]]:
        """Parents, metrics, schemas and tags of commits, in that order, by number or id."""
        for types, sql, of in (
            (
                (int, _hex_ids),
                "SELECT p.n, COALESCE(r.commit_id, p.parent) FROM parents p LEFT JOIN replaced r "
                "ON r.id = p.parent WHERE p.n IN ({}) ORDER BY p.n, p.position",
                numbers,
            ),
            (
                (int, str, _MAYBE_FLOAT),
                "SELECT n, name, value FROM metrics WHERE n IN ({}) ORDER BY n, name",
                numbers,
            ),
            (
                (int, str, _hex_ids),
                "SELECT t.n, t.key, s.id FROM commit_trees t JOIN schemas s ON s.number = t.schema "
                "WHERE t.n IN ({}) ORDER BY t.n, t.key",
                numbers,
            ),
            (
                (str, str),
                "SELECT commit_id, name FROM tags WHERE commit_id IN ({}) ORDER BY name",
                ids,
            ),
        ):
            values = {f"v{i}": value for i, value in enumerate(of)}
            grouped: dict[Any, list[Any]] = defaultdict(list)
            for row in self._rows(
                types, sql.format(", ".join(f":{name}" for name in values)), values
            ):
                grouped[row[0]].append(row[1:])
            yield grouped


def _in(run: str | None) -> str:
    return "" if run is None else " AND run = :run"
