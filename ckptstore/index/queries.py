"""Catalog queries: portable SQL with named parameters, for any connection.

`index.catalog_sqlite` runs them with the standard library alone, `Catalog.queries` through
SQLAlchemy. Answers are as of the last folded log entry.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, Self, TypeAlias

from ckptstore.core.ids import (
    Ancestor,
    Best,
    CommitId,
    Latest,
    Name,
    Ref,
    SessionId,
    Step,
    parse_ref,
)
from ckptstore.core.model import CommitInfo
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.index.rows import (
    KINDS,
    LeafInfo,
    PackInfo,
    Rows,
    RunInfo,
    ShardInfo,
    TagInfo,
    Totals,
    Types,
    kind_of,
    shape_of,
    typed,
)
from ckptstore.log.entries import Position
from ckptstore.log.state import circular

Ask: TypeAlias = Callable[[str, Mapping[str, Any]], Rows]

__all__ = ["KINDS", "Ask", "LeafInfo", "PackInfo", "Queries", "Rows", "ShardInfo"]

_MAYBE_INT = (int, NoneType)
_MAYBE_FLOAT = (int, float, NoneType)
_ANY_BYTES = (bytes, memoryview)
_NO_VALUES: Mapping[str, Any] = {}
_COMMIT_TYPES: Types = (int, str, str, str, str, _MAYBE_INT, str, int, int, int, int, int)
_COMMIT = (
    "n, id, content, session, run, step, message, time_ns, logical_bytes, new_bytes, "
    "leaves, forgotten"
)
_BATCH = 500


class Queries:
    """Queries on a catalog. They raise `Corrupt` if it is damaged and `Unavailable` if it does not
    answer."""

    def __init__(self, ask: Ask, close: Callable[[], None] = lambda: None) -> None:
        self._ask = ask
        self._other: Callable[[Corrupt], Queries] | None = None
        self.close = close
        """Close the connection, if these queries own it."""

    def or_else(self, other: "Callable[[Corrupt], Queries]") -> Self:
        """If this catalog turns out to be damaged, answer from the one that `other` returns for the
        error."""
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
        return Position(*self._one((int, str, int), "SELECT n, hash, bytes FROM position"))

    def log(
        self,
        run: str | None = None,
        limit: int | None = None,
        *,
        before: int | None = None,
        forgotten: bool = False,
    ) -> list[CommitInfo]:
        """Commits, newest first: of one run or all, at most `limit`, from entries below `before`;
        forgotten ones on request."""
        tests = [
            *(["run = :run"] if run is not None else []),
            *(["n < :before"] if before is not None else []),
            *([] if forgotten else ["forgotten = 0"]),
        ]
        where = f" WHERE {' AND '.join(tests)}" if tests else ""
        stop = " LIMIT :limit" if limit is not None else ""
        values = {"run": run, "before": before, "limit": limit}
        rows = self._rows(
            _COMMIT_TYPES, f"SELECT {_COMMIT} FROM commits{where} ORDER BY n DESC{stop}", values
        )
        return [
            info
            for start in range(0, len(rows), _BATCH)
            for info in self._infos(rows[start : start + _BATCH])
        ]

    def commit(self, commit: CommitId) -> CommitInfo:
        """One commit, forgotten or not; raises `NotFound`."""
        rows = self._rows(
            _COMMIT_TYPES, f"SELECT {_COMMIT} FROM commits WHERE id = :id", {"id": commit}
        )
        if not rows:
            raise NotFound(
                f"no commit {commit[:12]}: it was never made here or has been purged; see "
                "`ckptstore log`"
            )
        return self._infos(rows)[0]

    def commits(self, refs: Sequence[Ref | str | int], run: str | None = None) -> list[CommitInfo]:
        """The commits that `refs` name."""
        return [self.commit(self.resolve(ref, run)) for ref in refs]

    def resolve(self, ref: Ref | str | int, run: str | None = None) -> CommitId:
        """Resolve `ref`. Steps, `latest` and `best:` are looked up in the ref's run, else in `run`,
        else in all runs.

        Raises `NotFound` with the nearest names, `InvalidInput` for an ambiguous id prefix.
        """
        ref = parse_ref(ref) if isinstance(ref, str | int) else ref
        if isinstance(ref, Step):
            return self._step(ref, run if ref.run is None else ref.run)
        if isinstance(ref, Latest):
            return self._latest(run if ref.run is None else ref.run)
        if isinstance(ref, Best):
            return self._best(ref, run if ref.run is None else ref.run)
        if isinstance(ref, Name):
            return self._name(ref)
        return self._ancestor(self.resolve(ref.base, run), ref)

    def tags(self) -> list[TagInfo]:
        sql = (
            "SELECT t.name, t.commit_id, c.run, c.step FROM tags t JOIN commits c ON c.id = "
            "t.commit_id ORDER BY t.name"
        )
        return [TagInfo(*row) for row in self._rows((str, str, str, _MAYBE_INT), sql)]

    def runs(self) -> list[RunInfo]:
        """Runs with commits that are not forgotten, the most recent first."""
        rows = self._rows(
            (str, int, str, _MAYBE_INT, int),
            "SELECT c.run, g.commits, c.id, c.step, c.time_ns"
            " FROM (SELECT MAX(n) AS n, COUNT(*) AS commits FROM commits WHERE forgotten = 0 GROUP "
            "BY run) g"
            " JOIN commits c ON c.n = g.n ORDER BY c.n DESC",
        )
        return [RunInfo(*row) for row in rows]

    def leaves(self, schema: str) -> list[LeafInfo] | None:
        """The leaves of a schema in order, or None if they are missing."""
        found = self._rows(
            (int,),
            "SELECT number FROM schemas WHERE id = :id AND leaves IS NOT NULL",
            {"id": schema},
        )
        if not found:
            return None
        sql = (
            "SELECT path, kind, dtype, shape, alias FROM leaves WHERE schema = :number ORDER BY "
            "number"
        )
        types = (str, kind_of, str, shape_of, int)
        return [LeafInfo(*row) for row in self._rows(types, sql, {"number": found[0][0]})]

    def missing_schemas(self) -> list[str]:
        """The schemas that commits name and whose leaves are missing."""
        sql = "SELECT id FROM schemas WHERE leaves IS NULL ORDER BY number"
        return [row[0] for row in self._rows((str,), sql)]

    def shards(self, commit: CommitId) -> list[ShardInfo]:
        """The boxes of a multi-rank commit; none for a commit of one rank."""
        sql = (
            "SELECT s.path, s.rank, s.offsets, s.lengths FROM shards s JOIN commits c ON c.n = "
            "s.n WHERE c.id = :id ORDER BY s.number"
        )
        return [
            ShardInfo(*row)
            for row in self._rows((str, int, shape_of, shape_of), sql, {"id": commit})
        ]

    def entry(self, n: int) -> bytes | None:
        """The copy of log entry `n`, if it was folded here. Unverified."""
        rows = self._rows((_ANY_BYTES,), "SELECT data FROM entries WHERE n = :n", {"n": n})
        return bytes(rows[0][0]) if rows else None

    def packs(self) -> list[PackInfo]:
        sql = "SELECT number, id, bytes, chunks, metadata, condemned FROM packs ORDER BY number"
        rows = self._rows((int, str, int, int, int, int), sql)
        return [
            PackInfo(row[0], row[1], row[2], row[3], bool(row[4]), bool(row[5])) for row in rows
        ]

    def totals(self) -> Totals:
        # The casts are for PostgreSQL, whose sums of integers are decimals.
        commits = self._one(
            (int,) * 4,
            "SELECT COUNT(CASE WHEN forgotten = 0 THEN 1 END), COUNT(CASE WHEN forgotten <> 0 THEN "
            "1 END),"
            " CAST(COALESCE(SUM(CASE WHEN forgotten = 0 THEN logical_bytes END), 0) AS BIGINT), "
            "COUNT(DISTINCT run) FROM commits",
        )
        packs = self._one(
            (int,) * 5,
            "SELECT COUNT(*), CAST(COALESCE(SUM(bytes), 0) AS BIGINT), CAST(COALESCE(SUM(chunks), "
            "0) AS BIGINT),"
            " COUNT(CASE WHEN condemned THEN 1 END), CAST(COALESCE(SUM(CASE WHEN condemned THEN "
            "bytes END), 0) AS BIGINT) FROM packs",
        )
        return Totals(*commits, *self._one((int,), "SELECT COUNT(*) FROM tags"), *packs)

    def _rows(
        self, types: Types, sql: str, values: Mapping[str, Any] = _NO_VALUES, *, one: bool = False
    ) -> list[tuple[Any, ...]]:
        """The rows, each column checked against its type. If this catalog is damaged, use the other
        one."""
        try:
            return typed(types, self._ask(sql, values), one=one)
        except Corrupt as error:
            if self._other is None:
                raise
            self._ask, self._other = self._other(error)._ask, None
            return typed(types, self._ask(sql, values), one=one)

    def _one(self, types: Types, sql: str) -> tuple[Any, ...]:
        return self._rows(types, sql, one=True)[0]

    def _step(self, ref: Step, run: str | None) -> CommitId:
        if found := self._newest("step = :step", run, step=ref.step):
            return found
        if ref.prefix and (ids := self._ids(ref.prefix)):
            return _only(ref.prefix, ids)
        raise NotFound(f"no commit of step {ref.step}{_of(run)}; {self._steps_near(ref.step, run)}")

    def _latest(self, run: str | None) -> CommitId:
        if found := self._newest("1 = 1", run):
            return found
        raise NotFound(f"no commit{_of(run)} yet; {self._runs_there()}")

    def _best(self, ref: Best, run: str | None) -> CommitId:
        found = self._first_id(
            "SELECT c.id FROM metrics m JOIN commits c ON c.n = m.n WHERE m.name = :metric AND "
            "m.value IS NOT NULL AND c.forgotten = 0"
            f"{_run_test(run)} ORDER BY m.value {'DESC' if ref.order == 'max' else 'ASC'}, m.n "
            "DESC LIMIT 1",
            {"metric": ref.metric, "run": run},
        )
        if found:
            return found
        sql = "SELECT DISTINCT name FROM metrics ORDER BY name LIMIT 20"
        names = [row[0] for row in self._rows((str,), sql)]
        raise NotFound(
            f"no commit{_of(run)} has a metric {ref.metric!r}; "
            + (f"there are {', '.join(names)}" if names else "none has metrics")
        )

    def _name(self, ref: Name) -> CommitId:
        sql = "SELECT commit_id FROM tags WHERE name = :name"
        if found := self._first_id(sql, {"name": ref.name}):
            return found
        if ref.prefix and (ids := self._ids(ref.prefix)):
            return _only(ref.prefix, ids)
        raise NotFound(
            f"no tag {'or commit ' if ref.prefix else ''}{ref.name!r}; {self._names_near(ref.name)}"
        )

    def _ancestor(self, commit: CommitId, ref: Ancestor) -> CommitId:
        # A chain of parents longer than the number of commits is a circle, which would never end.
        ((commits,),) = self._rows((int,), "SELECT COUNT(*) FROM commits", {})
        rows = self._rows(
            (str, int, _MAYBE_INT),
            "WITH RECURSIVE line (id, depth) AS (SELECT CAST(:id AS VARCHAR(64)), 0 UNION ALL "
            "SELECT p.parent, line.depth + 1 FROM line"
            " JOIN commits c ON c.id = line.id JOIN parents p ON p.n = c.n AND p.position = 0 "
            "WHERE line.depth < :depth)"
            " SELECT line.id, line.depth, c.n FROM line LEFT JOIN commits c ON c.id = line.id "
            "ORDER BY line.depth DESC LIMIT 1",
            {"id": commit, "depth": min(ref.generations, commits)},
            one=True,
        )
        ancestor, depth, n = rows[0]
        if n is None:
            raise NotFound(
                f"the first parent {depth} generations before {commit[:12]}, {ancestor[:12]}, has "
                "been purged; see `ckptstore log`"
            )
        if depth == commits < ref.generations:
            raise circular(CommitId(ancestor))
        if depth < ref.generations:
            raise NotFound(
                f"commit {commit[:12]} has {depth} generations of first parents; wanted "
                f"{ref.generations}"
            )
        return CommitId(ancestor)

    def _newest(self, test: str, run: str | None, **values: Any) -> CommitId | None:
        sql = (
            f"SELECT id FROM commits WHERE {test} AND forgotten = 0{_run_test(run)} ORDER BY n "
            "DESC LIMIT 1"
        )
        return self._first_id(sql, {"run": run, **values})

    def _first_id(self, sql: str, values: Mapping[str, Any]) -> CommitId | None:
        rows = self._rows((str,), sql, values)
        return CommitId(rows[0][0]) if rows else None

    def _ids(self, prefix: str) -> list[CommitId]:
        sql = "SELECT id FROM commits WHERE id >= :low AND id < :high ORDER BY id LIMIT 6"
        rows = self._rows((str,), sql, {"low": prefix, "high": prefix + "g"})
        return [CommitId(row[0]) for row in rows]

    def _steps_near(self, step: int, run: str | None) -> str:
        near: set[int] = set()
        for test, order in (("step <= :step", "DESC"), ("step >= :step", "ASC")):
            sql = (
                f"SELECT DISTINCT step FROM commits WHERE {test} AND forgotten = "
                f"0{_run_test(run)} ORDER BY step {order} LIMIT 3"
            )
            near.update(row[0] for row in self._rows((int,), sql, {"step": step, "run": run}))
        if near:
            return f"the nearest steps are {', '.join(map(str, sorted(near)))}"
        return self._runs_there()

    def _names_near(self, name: str) -> str:
        # Imported here, because queries that succeed need not wait for it.
        from difflib import get_close_matches

        tags = [tag.name for tag in self.tags()]
        near = get_close_matches(name, tags, n=5, cutoff=0.5) or tags[:5]
        if near:
            return f"there are the tags {', '.join(near)}"
        return f"there are no tags; {self._runs_there()}"

    def _runs_there(self) -> str:
        if runs := self.runs():
            return f"runs with commits: {', '.join(info.run for info in runs[:10])}"
        return "the store has no commits"

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
            ) in rows
        ]

    def _details(
        self, numbers: Sequence[int], ids: Sequence[str]
    ) -> Iterator[dict[Any, list[Any]]]:
        """Parents, metrics, schemas and tags of commits, in that order, by number or id."""
        for types, sql, of in (
            (
                (int, str),
                "SELECT n, parent FROM parents WHERE n IN ({}) ORDER BY n, position",
                numbers,
            ),
            (
                (int, str, _MAYBE_FLOAT),
                "SELECT n, name, value FROM metrics WHERE n IN ({}) ORDER BY n, name",
                numbers,
            ),
            (
                (int, str, str),
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


def _only(prefix: str, ids: Sequence[CommitId]) -> CommitId:
    if len(ids) > 1:
        some = ", ".join(commit[: max(12, len(prefix) + 4)] for commit in ids[:5]) + (
            ", …" if len(ids) > 5 else ""
        )
        raise InvalidInput(f"{prefix!r} begins several commit ids: {some}; give more digits")
    return ids[0]


def _run_test(run: str | None) -> str:
    return "" if run is None else " AND run = :run"


def _of(run: str | None) -> str:
    return "" if run is None else f" in run {run!r}"
