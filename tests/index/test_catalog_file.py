"""A catalog that cannot be used is migrated or replaced, wherever it comes from, and never
raises."""

import gc
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from ckptstore.core.ids import StoreId
from ckptstore.errors import Corrupt, Unavailable
from ckptstore.index import catalog, tables
from ckptstore.index.catalog import Catalog
from ckptstore.index.catalog_sqlite import REVISION, open_catalog
from ckptstore.objects.schema import encode_schema
from tests.index.building import MODEL, STORE, LogBuilder, flat_schema
from tests.support.workloads import FIFTH_REVISION, FIRST_REVISION, FOURTH_REVISION, THIRD_REVISION

ROOT = Path(__file__).parents[2]


def some_log(commits: int = 30) -> LogBuilder:
    log = LogBuilder()
    for n in range(1, commits + 1):
        log.commit(step=n, metrics=[("loss", 1 / n)], tags=["newest"], packs=[n])
    return log


def made(path: Path, log: LogBuilder) -> Path:
    with closing(Catalog.open(path, STORE)) as catalog:
        assert catalog.fold(log.entries)
    return path


def schema_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(
            " ".join(sql.split())
            for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        )


def test_a_file_that_is_no_catalog_is_closed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(b"x" * 8192)
    gc.disable()  # a collection would close it, too
    try:
        assert open_catalog(path, STORE) is None
        assert str(path) not in {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    finally:
        gc.enable()


def test_a_fresh_catalog_and_a_migrated_one_have_the_same_schema(tmp_path: Path) -> None:
    fresh, migrated = made(tmp_path / "fresh", LogBuilder()), tmp_path / "migrated"
    assert tables.migrate_file(partial(catalog._connect, migrated))
    assert schema_of(migrated) == schema_of(fresh)


def test_the_newest_migration_is_the_revision_that_is_stamped() -> None:
    config = Config()
    config.set_main_option("script_location", str(tables.migrations()))
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


EARLIER = {
    "0001": FIRST_REVISION,
    "0002": f"{THIRD_REVISION} DROP TABLE entries; UPDATE alembic_version SET version_num = '0002'",
    "0003": THIRD_REVISION,
    "0004": FOURTH_REVISION,
    "0005": FIFTH_REVISION,
}
"""What makes a catalog of today one of each earlier revision."""


def test_every_earlier_revision_is_tried() -> None:
    config = Config()
    config.set_main_option("script_location", str(tables.migrations()))
    assert {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()} == {
        *EARLIER,
        REVISION,
    }


@pytest.mark.parametrize("revision", EARLIER)
def test_an_older_catalog_is_migrated_with_its_rows(tmp_path: Path, revision: str) -> None:
    log = some_log()
    path = made(tmp_path / "catalog.sqlite", log)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(EARLIER[revision])
    assert open_catalog(path, STORE) is None
    with closing(Catalog.open(path, STORE)) as catalog:
        assert catalog.position() == log.entries[-1].position
        assert catalog.queries().tagged("newest") == log.entries[-1].body.commit
        assert catalog.queries().newest(None) == log.entries[-1].body.commit
        assert catalog.missing_schemas() == [MODEL]
        assert catalog.add_schemas({MODEL: encode_schema(flat_schema(3))})
        assert catalog.queries().schema(MODEL) == flat_schema(3)


def test_opening_a_current_catalog_does_not_import_alembic(tmp_path: Path) -> None:
    path = made(tmp_path / "catalog.sqlite", some_log(2))
    code = (
        f"import sys; from ckptstore.index.catalog import Catalog; Catalog.open({str(path)!r}, "
        f"{STORE!r}); print('alembic' in sys.modules)"
    )
    for place in (path, tmp_path / "fresh.sqlite"):
        done = subprocess.run(
            [sys.executable, "-c", code.replace(str(path), str(place))],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "False"


def _execute(sql: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(sql)

    return spoil


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


SPOILED: dict[str, Callable[[Path], object]] = {
    "of another store": _execute(f"UPDATE position SET store = '{'6' * 32}'"),
    "of a newer ckptstore": _execute("UPDATE alembic_version SET version_num = '9999'"),
    "half migrated": _execute("DROP TABLE tags; UPDATE alembic_version SET version_num = '0001'"),
    "without a revision": _execute("DROP TABLE alembic_version"),
    "without a position": _execute("DELETE FROM position"),
    "somebody else's database": lambda path: (path.unlink(), _execute("CREATE TABLE t (x)")(path)),
    "no database": lambda path: path.write_bytes(random.randbytes(20_000)),
    "empty": lambda path: path.write_bytes(b""),
    "a broken header": lambda path: path.write_bytes(b"\0" * 100 + path.read_bytes()[100:]),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_catalog_that_cannot_be_used_is_replaced_by_an_empty_one(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    log = some_log()
    path = made(tmp_path / "catalog.sqlite", log)
    spoil(path)
    with closing(Catalog.open(path, STORE)) as catalog:
        assert not catalog._opened().in_memory
        assert catalog.position().n == 0
        assert catalog.fold(log.entries)
        assert len(catalog.queries().log()) == 30


@pytest.mark.parametrize("missing", ["tags", "commits", "metrics", "commit_trees"])
def test_a_table_that_is_gone_is_noticed_when_it_is_needed(tmp_path: Path, missing: str) -> None:
    log = some_log()
    path = made(tmp_path / "catalog.sqlite", log)
    _execute(f"DROP TABLE {missing}")(path)
    log.commit(metrics=[("loss", 1.0)], tags=["newest"])
    with closing(Catalog.open(path, STORE)) as catalog:
        assert not catalog.fold(log.entries)
        assert catalog.position().n == 0
        assert catalog.fold(log.entries)


@pytest.mark.parametrize("trials", [12, pytest.param(400, marks=pytest.mark.soak)])
def test_whatever_bytes_change_the_catalog_is_rebuilt_or_answers(
    tmp_path: Path, seed: int, trials: int
) -> None:
    log, rng = some_log(300), random.Random(seed)
    good = made(tmp_path / "good.sqlite", log)
    for n in range(trials):
        path = tmp_path / f"{n}.sqlite"
        shutil.copy(good, path)
        with path.open("r+b") as file:
            for _ in range(rng.choice((1, 20, 300))):
                file.seek(rng.randrange(good.stat().st_size))
                file.write(rng.randbytes(rng.choice((1, 16))))
        if rng.random() < 0.3:
            os.truncate(path, rng.randrange(good.stat().st_size))
        with closing(Catalog.open(path, STORE)) as catalog:
            for _ in range(3):
                try:
                    catalog.fold(log.entries[catalog.position().n :])
                    catalog.queries().log()
                    catalog.queries().packs()
                    break
                except (Corrupt, Unavailable):
                    catalog.reset()
            catalog.reset()
            assert catalog.fold(log.entries)
            assert len(catalog.queries().log()) == 300


def test_a_truncated_catalog_below_an_open_one_is_replaced(tmp_path: Path) -> None:
    log = some_log(300)
    path = made(tmp_path / "catalog.sqlite", log)
    with closing(Catalog.open(path, STORE)) as catalog:
        os.truncate(path, 8192)
        with pytest.raises((Corrupt, Unavailable)):
            catalog.queries().log()
        catalog.reset()
        assert catalog.fold(log.entries)


def test_a_place_that_cannot_be_written_means_a_catalog_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    log = some_log()
    with closing(Catalog.open(tmp_path / "file" / "catalog.sqlite", STORE)) as catalog:
        assert catalog._opened().in_memory
        assert catalog.fold(log.entries)
        assert len(catalog.queries().log()) == 30


def test_two_stores_do_not_share_a_catalog(tmp_path: Path) -> None:
    path = made(tmp_path / "catalog.sqlite", some_log())
    with closing(Catalog.open(path, StoreId("6" * 32))) as other:
        assert other.position().n == 0
    with closing(Catalog.open(path, STORE)) as catalog:
        assert catalog.position().n == 0


def test_migrations_ship_in_the_wheel_and_are_found_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("ckptstore", "migrations"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_text((ROOT / name).read_text() if (ROOT / name).exists() else name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    code = (
        "from pathlib import Path; from ckptstore.index import catalog as f, tables as t; from "
        "ckptstore.index.catalog import Catalog;"
        "p = Path('old.sqlite'); assert t.migrate_file(lambda: f._connect(p)); "
        "print(t.migrations(), len(f._connect(p).execute('SELECT * FROM schemas').fetchall()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "installed" / "ckptstore" / "migrations"), "0"]
