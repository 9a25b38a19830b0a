"""An invalid row of the catalog: the query is still answered, from a rebuilt catalog."""

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from shutil import copyfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.core.model import CommitInfo
from ckptstore.core.refs import find, parse_ref
from ckptstore.errors import NotFound
from ckptstore.index.queries import Queries
from ckptstore.maintenance.check.indexes import reindex
from ckptstore.repository.store_handle import CATALOG_NAME
from tests.maintenance.collecting import opened
from tests.maintenance.stores import make_store

NONSENSE = ("x'ff00'", "'text'", "-7")


class NotText(bytes):
    """Bytes to be stored as text, which they may not be."""


def answers(queries: Queries) -> list[Any]:
    """What every kind of question is answered."""
    infos: list[CommitInfo] = queries.log(forgotten=True)
    named = [named_by(queries, ref) for ref in ("first", "best:loss", 1, "latest", "main@latest~1")]
    schemas = [queries.schema(schema) for info in infos for schema in info.schemas.values()]
    return [
        infos,
        named,
        schemas,
        queries.tags(),
        queries.runs(),
        queries.packs(),
        queries.totals(),
        queries.missing_schemas(),
    ]


def named_by(queries: Queries, ref: str | int) -> str | None:
    """The commit that a listing takes `ref` for; what is restored is looked up in the log."""
    try:
        return find(queries, parse_ref(ref), None)
    except NotFound as error:
        return str(error)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("rows") / "store")


def columns(catalog: Path) -> Iterator[tuple[str, str]]:
    with closing(sqlite3.connect(catalog)) as connection:
        tables = [
            name
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
            )
        ]
        for table in tables:
            yield from (
                (table, row[1]) for row in connection.execute(f"PRAGMA table_info({table})")
            )


def spoil(catalog: Path, table: str, column: str, value: str) -> bool:
    """Whether the first row could be changed so."""
    with closing(sqlite3.connect(catalog)) as connection:
        try:
            where = (
                f"WHERE {column} = (SELECT MIN({column}) FROM {table})"
                if table != "position"
                else ""
            )
            changed = connection.execute(f"UPDATE {table} SET {column} = {value} {where}").rowcount
            connection.commit()
        except sqlite3.Error:
            return False
        return changed > 0


def every_trial(store: Path) -> list[tuple[str, str, str]]:
    with opened(store) as handle:
        reindex(handle)
    return [
        (table, column, value)
        for table, column in columns(store / "index" / CATALOG_NAME)
        for value in NONSENSE
    ]


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_question_is_answered_whatever_any_row_says(
    store: Path, seed: int, part: int
) -> None:
    """The catalog is whole again before each trial. A third of them, other ones in each run, and
    all of them in the long test."""
    every = every_trial(store)
    trials = Random(seed).sample(every, len(every) // part)
    catalog, whole = store / "index" / CATALOG_NAME, store.parent / "whole.sqlite"
    with opened(store) as handle:
        reindex(handle)
        wanted = answers(handle.queries())
        handle.catalog.close()
    copyfile(catalog, whole)
    healed = tried = 0
    for table, column, value in trials:
        for suffix in ("-wal", "-shm"):
            catalog.with_name(catalog.name + suffix).unlink(missing_ok=True)
        copyfile(whole, catalog)
        if spoil(catalog, table, column, value):
            tried += 1
            with opened(store) as handle:
                # A key or a number that is merely another one changes a listing, and nobody but
                # fsck knows.
                healed += answers(handle.queries()) == wanted
    assert healed > tried // 3 > 0


VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([2**63 - 1, -(2**63), -1, 0, math.inf, 1e300])
    | st.floats()
    | st.text(max_size=70)
    | st.sampled_from(["[" * 100_000, '[["a", 1]]', "9" * 5000, "a" * 70_000, "f" * 64, "\0"])
    | st.binary(max_size=80)
    | st.binary(min_size=1, max_size=8).map(NotText)
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("update", "update one", "insert", "delete")),
        st.integers(0, 100),
        st.lists(VALUES, min_size=16, max_size=16),
    ),
    min_size=1,
    max_size=4,
)


def rewrite(catalog: Path, changes: list[tuple[str, int, list[object]]]) -> None:
    """Change rows as no constraint would allow it: the file is damaged, or another's."""
    with closing(sqlite3.connect(catalog, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        loose = "sql"
        for word in (" NOT NULL", "VARCHAR(64)", "BIGINT", "TEXT", "BOOLEAN", "DOUBLE"):
            loose = f"replace({loose}, '{word}', '')"
        connection.execute(f"UPDATE sqlite_master SET sql = {loose} WHERE type = 'table'")
    places = list(columns(catalog))
    with closing(sqlite3.connect(catalog, isolation_level=None)) as connection:
        for kind, at, values in changes:
            table, column = places[at % len(places)]
            names = [name for of, name in places if of == table]
            marks = ["CAST(? AS TEXT)" if isinstance(v, NotText) else "?" for v in values]
            one = f'WHERE "{column}" = (SELECT max("{column}") FROM "{table}")'
            statement, count = {
                "update": (f'UPDATE OR REPLACE "{table}" SET "{column}" = {marks[0]}', 1),
                "update one": (f'UPDATE OR REPLACE "{table}" SET "{column}" = {marks[0]} {one}', 1),
                "insert": (
                    f'INSERT OR REPLACE INTO "{table}" VALUES ({", ".join(marks[: len(names)])})',
                    len(names),
                ),
                "delete": (f'DELETE FROM "{table}" {one}', 0),
            }[kind]
            # A row id is a number whatever is asked for.
            with suppress(sqlite3.IntegrityError):
                connection.execute(statement, values[:count])


@settings(max_examples=settings().max_examples * 3 // 10)  # each makes two catalogs
@given(changes=CHANGES)
def test_any_rows_are_answered_from_or_the_catalog_is_made_anew(
    store: Path, changes: list[tuple[str, int, list[object]]]
) -> None:
    catalog = store / "index" / CATALOG_NAME
    with opened(store) as handle:
        reindex(handle)
        wanted = answers(handle.queries())
        handle.catalog.close()
    rewrite(catalog, changes)
    with opened(store) as handle:
        answers(handle.queries())
        handle.follow()
        reindex(handle)
        assert answers(handle.queries()) == wanted


@pytest.mark.parametrize(
    ("table", "column"),
    [("schemas", "data"), ("commits", "logical_bytes"), ("packs", "bytes")],
)
def test_a_row_that_cannot_be_decoded_heals_the_catalog_for_good(
    store: Path, table: str, column: str
) -> None:
    catalog = store / "index" / CATALOG_NAME
    with opened(store) as handle:
        reindex(handle)
        wanted = answers(handle.queries())
    assert spoil(catalog, table, column, "x'ff00'")
    with opened(store) as handle:
        assert answers(handle.queries()) == wanted
    with closing(sqlite3.connect(catalog)) as connection:
        assert not connection.execute(f"SELECT 1 FROM {table} WHERE {column} = x'ff00'").fetchall()
