"""A store whose log is in PostgreSQL: one transaction per entry, copies beside it, and no way to
fork it."""

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import ckptstore
from ckptstore.core.ids import StoreId, log_key
from ckptstore.errors import Conflict, Corrupt, InvalidInput, Unavailable
from ckptstore.log.entries import Settings
from ckptstore.log.log import Refused
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.maintenance.repair import repair
from ckptstore.maintenance.retention import KeepLast
from ckptstore.plugins.postgres import database
from ckptstore.plugins.postgres.moving import migrate_tables, move_log, restore_log
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site
from tests.support.servers.postgres import PASSWORD, PostgresServer
from tests.support.servers.s3 import S3Server, new_url


@pytest.fixture(params=["local", "s3"])
def site(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Site:
    index = {"index": postgres.new_url()}
    if request.param == "local":
        return Site(str(tmp_path / "store"), None, index)
    s3: S3Server = request.getfixturevalue("s3")
    return Site(new_url(), s3.options(), index)


@pytest.fixture
def local(tmp_path: Path, postgres: PostgresServer) -> Site:
    return Site(str(tmp_path / "store"), None, {"index": postgres.new_url()})


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


def bare(site: Site) -> Site:
    """The same place by somebody who names no database."""
    return Site(site.place, site.options)


def test_threads_that_connect_at_once_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody knows of would keep its connections open, whatever is closed."""
    made, make = [], database.create_engine

    def slowly(*args: Any, **kwargs: Any) -> Engine:
        time.sleep(0.05)
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(database, "create_engine", slowly)
    shared = database.Database("postgresql+psycopg://me@localhost/none", StoreId("0" * 32))
    threads = [threading.Thread(target=lambda: shared._engine) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close()
    assert len(made) == 1


def test_a_store_with_a_database_does_what_any_store_does(
    site: Site, host: Path, tmp_path: Path
) -> None:
    with site.open(host) as mine, site.open(tmp_path / "other") as theirs:
        first = mine.commit(
            state_of(1),
            step=1,
            tag="best",
            metrics={"loss": 1.0, "acc": float("nan")},
            message="the first",
        )
        assert_equal(theirs.checkout("best").state_dict(), state_of(1))
        second = theirs.commit(state_of(2), step=2, metrics={"loss": 0.5})
        assert second.parents == (first.id,)
        assert [(info.step, info.message) for info in mine.log()] == [(2, ""), (1, "the first")]
        assert mine.checkout("best:loss").id == second.id
        assert mine.checkout("latest~1").id == first.id
        assert mine.tags() == {"best": first.id}
        for step in range(3, 8):
            mine.commit(state_of(step), step=step)
        mine.forget(KeepLast(2))
        assert mine.gc(max_unused=0.0, grace_s=0).freed_bytes > 0
        assert [info.step for info in theirs.log()] == [7, 6, 1]
        assert theirs.usage().commits
        assert mine.fsck().findings == ()
    with site.open(host) as again:
        assert_equal(again.checkout(7).state_dict(), state_of(7))
        assert again.reindex().commits == 3


def test_every_entry_has_its_copy_in_the_store(local: Site, host: Path) -> None:
    with local.open(host) as store:
        for step in range(3):
            store.commit(state_of(step), step=step)
    with local.opened(host) as handle:
        assert handle.database is not None
        entries = [handle.database.read(n) for n in range(1, 4)]
    assert entries == [(Path(local.place) / log_key(n)).read_bytes() for n in range(1, 4)]


def test_many_stores_share_a_database(postgres: PostgresServer, tmp_path: Path) -> None:
    index = {"index": postgres.new_url()}
    sites = [Site(str(tmp_path / name), None, index) for name in ("a", "b")]
    for step, site in enumerate(sites):
        with site.open(tmp_path / "host") as store:
            store.commit(state_of(step), step=step)
    for step, site in enumerate(sites):
        with site.open(tmp_path / "host") as store:
            assert [info.step for info in store.log()] == [step]


def test_two_who_name_different_places_cannot_fork_a_store(
    local: Site, host: Path, postgres: PostgresServer, tmp_path: Path
) -> None:
    with local.open(host) as store:
        store.commit(state_of(1), step=1)
    with pytest.raises(InvalidInput, match="name that database"):
        bare(local).open(host)
    with pytest.raises(InvalidInput, match="holds none of it"):
        Site(local.place, None, {"index": postgres.new_url()}).open(host)
    plain = Site(str(tmp_path / "plain"))
    plain.open(host).close()
    with pytest.raises(InvalidInput, match="in the store itself"):
        Site(plain.place, None, local.more).open(host)


def test_the_way_to_the_database_may_be_in_the_environment(
    local: Site, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.open(host).close()
    monkeypatch.setenv("CKPTSTORE_INDEX", str(local.more["index"]))
    with bare(local).open(host) as store:
        store.commit(state_of(1), step=1)


def test_no_password_is_in_files_or_messages(
    local: Site,
    host: Path,
    postgres: PostgresServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local.open(host) as store:
        store.commit(state_of(1), step=1)
    monkeypatch.setattr("ckptstore.plugins.postgres.database.DEADLINE_S", 0.5)
    for path in Path(local.place).rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()
    for index in (
        postgres.url("no_such_database"),
        postgres.url("x", port=1),
        "mysql://trainer:trainers-own-secret@host/x",
        "://trainers-own-secret@",
    ):
        with pytest.raises(ckptstore.CkptStoreError) as caught:
            ckptstore.repository.init_store.init_store(
                f"{local.place}-{secrets.token_hex(4)}", index=index
            )
        error: BaseException | None = caught.value
        assert PASSWORD not in str(error)
    assert PASSWORD not in caplog.text


def test_of_two_that_make_a_store_at_once_one_makes_it(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    ids: list[str] = []

    def make() -> None:
        with ckptstore.open(local.place, storage=local.as_storage()) as store:
            ids.append(store.id)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 4 and len(set(ids)) == 1
    with postgres.admin(str(local.more["index"]).rpartition("/")[2]) as connection:
        schemas = [
            row[0]
            for row in connection.execute(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'ckptstore%'"
            )
        ]
    assert schemas == [f"ckptstore_{ids[0]}"]


def test_writers_who_append_at_once_wait_for_their_turn(local: Site, host: Path) -> None:
    local.open(host).close()
    failures: list[BaseException] = []

    def append(me: int) -> None:
        try:
            with local.opened(host / str(me)) as handle:
                for i in range(5):
                    handle.log.append(Settings(((f"best-{me}", f"{i}"),)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=append, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with local.opened(host) as handle:
        state = handle.log.replay()
    assert state.n == 1 + 8 * 5
    assert {state.settings[f"best-{me}"] for me in range(8)} == {"4"}


def test_a_refused_entry_leaves_nothing_and_holds_nothing(local: Site, host: Path) -> None:
    with local.open(host) as store, local.open(host) as other:
        commit = store.commit(state_of(1), step=1)
        with pytest.raises(Conflict):
            store.forget(commit.id)
        other.commit(state_of(2), step=2)


def test_what_postgresql_cannot_store_is_refused_by_name(local: Site, host: Path) -> None:
    with local.open(host) as store:
        with pytest.raises(InvalidInput, match="PostgreSQL cannot store"):
            store.commit(state_of(1), step=1, message="a\0b")
        store.commit(state_of(1), step=1, message="ab")


# -- moving, losing and finding again


def test_a_log_moves_into_a_database_and_back(
    tmp_path: Path, host: Path, postgres: PostgresServer
) -> None:
    plain = Site(str(tmp_path / "store"))
    index = postgres.new_url()
    database = Site(plain.place, None, {"index": index})
    with plain.open(host) as late:
        late.commit(state_of(1), step=1)
        moved = move_log(plain.place, index)
        assert (moved.generation, moved.entries) == (2, 2)
        with pytest.raises(Refused, match="open the store again"):
            late.commit(state_of(2), step=2)
    with database.open(host) as store:
        store.commit(state_of(3), step=3)
        assert [info.step for info in store.log()] == [3, 1]
        with pytest.raises(InvalidInput, match="already"):
            move_log(plain.place, index, index=index)
        back = move_log(plain.place, None, index=index)
        assert (back.place, back.generation, back.entries) == ("log/", 3, 4)
        with pytest.raises(Refused):
            store.commit(state_of(4), step=4)
    with plain.open(host) as store:
        store.commit(state_of(5), step=5)
        assert [info.step for info in store.log()] == [5, 3, 1]
        assert store.fsck().findings == ()
    assert move_log(plain.place, index).generation == 4
    with database.open(host) as store:
        assert [info.step for info in store.log()] == [5, 3, 1]
        assert_equal(store.checkout(3).state_dict(), state_of(3))


def test_a_move_that_was_interrupted_is_finished_by_the_same_command(
    tmp_path: Path, host: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Site(str(tmp_path / "store"))
    index = postgres.new_url()
    with plain.open(host) as store:
        store.commit(state_of(1), step=1)

    def stop(*_: object) -> None:
        raise Unavailable("the power went")

    with monkeypatch.context() as broken:
        broken.setattr("ckptstore.plugins.postgres.moving._arrive", stop)
        with pytest.raises(Unavailable):
            move_log(plain.place, index)
    with plain.open(host) as store:
        assert_equal(store.checkout(1).state_dict(), state_of(1))
        with pytest.raises(Refused):
            store.commit(state_of(2), step=2)
    with pytest.raises(InvalidInput, match="finish that move first"):
        move_log(plain.place, postgres.new_url())
    assert move_log(plain.place, index).entries == 2
    with Site(plain.place, None, {"index": index}).open(host) as store:
        store.commit(state_of(2), step=2)


def test_a_lost_database_is_made_again_from_the_copies(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    with local.open(host) as store:
        for step in range(3):
            store.commit(state_of(step), step=step)
    index = postgres.new_url()
    with pytest.raises(InvalidInput, match="restore-log"):
        Site(local.place, None, {"index": index}).open(host)
    assert restore_log(local.place, index=index) == 4  # the first says where the log is
    with Site(local.place, None, {"index": index}).open(host) as store:
        assert [info.step for info in store.log()] == [2, 1, 0]
        store.commit(state_of(3), step=3)
    assert restore_log(local.place, index=index) == 0


def test_a_database_behind_its_copies_takes_no_appends(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    """As one does that was restored from a backup of the day before."""
    with local.open(host) as store:
        store.commit(state_of(1), step=1)
        schema = f"ckptstore_{store.id}"
        with postgres.admin(str(local.more["index"]).rpartition("/")[2]) as connection:
            connection.execute(f"CREATE TABLE backup AS SELECT * FROM {schema}.position")
            store.commit(state_of(2), step=2)
            connection.execute(
                f"UPDATE {schema}.position SET (n, hash, bytes) = (SELECT n, hash, bytes FROM "
                "backup)"
            )
            for table in ("entries", "commits", "parents", "metrics", "commit_trees"):
                connection.execute(f"DELETE FROM {schema}.{table} WHERE n > 2")
            connection.execute(f"DELETE FROM {schema}.packs WHERE number > 2")
    (host / store.id / "state").unlink(missing_ok=True)
    Path(local.place, "index", "state").unlink(missing_ok=True)
    with local.open(host) as store, pytest.raises(Corrupt, match="restore-log"):
        store.commit(state_of(3), step=3)
    assert restore_log(local.place, index=str(local.more["index"])) == 1
    with local.open(host) as store:
        assert [info.step for info in store.log()] == [2, 1]
        store.commit(state_of(3), step=3)


def test_a_writer_that_knows_no_later_entry_compares_after_each_lost_connection(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    """A replica without the last entry takes over while the writer is connected."""
    local.open(host).close()
    with local.opened(host) as behind, local.opened(host) as other:
        last = behind.log.append(Settings((("best-a", "x"),)))
        other.log.append(Settings((("best-b", "x"),)))
        schema = f"ckptstore_{behind.config.store}"
        with postgres.admin(str(local.more["index"]).rpartition("/")[2]) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                "current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute(f"DELETE FROM {schema}.entries WHERE n > {last.n}")
            connection.execute(
                f"UPDATE {schema}.position SET (n, hash, bytes) = ({last.n}, '{last.hash}', "
                f"{last.bytes})"
            )
            with pytest.raises(Corrupt, match="restore-log"):
                behind.log.append(Settings((("best-c", "x"),)))
            found = connection.execute(f"SELECT max(n) FROM {schema}.entries").fetchall()
    assert found == [(last.n,)], "nothing was appended beside the lost entry"


def test_tables_of_another_revision_are_refused_until_they_are_migrated(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    with local.open(host) as store:
        store.commit(state_of(1), step=1)
    assert (
        migrate_tables(local.place, index=str(local.more["index"]))[0]
        == migrate_tables(local.place, index=str(local.more["index"]))[1]
    )
    with postgres.admin(str(local.more["index"]).rpartition("/")[2]) as connection:
        connection.execute(f"UPDATE ckptstore_{store.id}.alembic_version SET version_num = '9999'")
    with pytest.raises(InvalidInput, match="ckptstore migrate"):
        local.open(host)


def test_a_turn_that_is_lost_before_the_append_is_done_without(
    local: Site, host: Path, postgres: PostgresServer
) -> None:
    local.open(host).close()
    with local.opened(host) as handle:
        handle.log.append(Settings((("best-a", "x"),)))
        assert handle.database is not None
        with handle.database.turn():
            with postgres.admin(str(local.more["index"]).rpartition("/")[2]) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                    "current_database() AND pid <> pg_backend_pid()"
                )
            assert handle.database.read(1) is not None
        handle.log.append(Settings((("best-b", "x"),)))
        assert {"best-a", "best-b"} <= set(handle.log.replay().settings)


@pytest.mark.parametrize("how", ["made there", "moved there"])
def test_a_lost_configuration_is_written_again_with_the_place_of_the_log(
    local: Site, host: Path, how: str
) -> None:
    """A log in the store itself would be a second history beside that of the trainer which has the
    store open."""
    index, config = str(local.more["index"]), Path(local.place, "ckptstore.json")
    if how == "moved there":
        bare(local).open(host).close()
        move_log(local.place, index)
    with local.open(host) as store:
        first = store.commit(state_of(1), step=1)
        before = config.read_bytes()
        config.unlink()
        with (
            pytest.raises(InvalidInput, match="name that database"),
            open_offline_store(local.place),
        ):
            pass
        with open_offline_store(local.place, index=index) as offline:
            repaired = repair(offline, apply=True)
        assert not repaired.after.damaged and config.read_bytes() == before
        second = store.commit(state_of(2), step=2)
    with local.open(host) as again:
        assert [info.id for info in again.log()] == [second.id, first.id]


def test_a_copy_of_an_entry_that_was_lost_is_made_again_from_the_database(
    local: Site, host: Path
) -> None:
    with local.open(host) as store:
        for step in range(3):
            store.commit(state_of(step), step=step)
        copy = Path(local.place, log_key(2))
        before = copy.read_bytes()
        copy.unlink()
        assert store.fsck().damaged
        assert store.repair(apply=True).applied
        assert copy.read_bytes() == before and not store.fsck().findings
