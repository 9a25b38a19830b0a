"""A PostgreSQL server that dies or is away: what was acknowledged survives, and errors name it."""

import os
import select
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import log_key
from ckptstore.errors import InvalidInput, NotFound, Unavailable
from ckptstore.log.entries import Settings
from ckptstore.plugins.postgres.database import DEADLINE_S
from ckptstore.repository.store_handle import StoreHandle
from tests.maintenance.collecting import state_of
from tests.shared.sites import Site
from tests.shared.test_faults import patiently
from tests.support.servers.postgres import PASSWORD, PostgresServer, postgres_server


def kill_under_writers(tmp_path: Path, writers: int, kills: int) -> None:
    """SIGKILL the server while `writers` append; every entry that was acknowledged must be
    there."""
    acknowledged: list[tuple[str, str]] = []
    failures: list[BaseException] = []
    stop, ready = threading.Event(), threading.Barrier(writers + 1)
    with postgres_server() as server:
        site = Site(str(tmp_path / "store"), None, {"index": server.new_url()})
        site.open(tmp_path / "host").close()

        def write(me: int) -> None:
            try:
                with site.opened(tmp_path / f"host-{me}") as handle:
                    i = 0
                    ready.wait()
                    while not stop.is_set():
                        name = f"best-{me}-{i}"
                        handle.log.append(Settings(((name, "x"),)))
                        acknowledged.append((name, "x"))
                        i += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(me,)) for me in range(writers)]
        for thread in threads:
            thread.start()
        ready.wait()
        for _ in range(kills):
            before = len(acknowledged)
            while len(acknowledged) < before + 3 * writers and not failures:
                stop.wait(0.01)
            server.kill()
            server.start()
        before = len(acknowledged)
        while len(acknowledged) < before + writers and not failures:
            stop.wait(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        with site.opened(tmp_path / "host") as handle:
            state = handle.log.replay()
            names = [name for name, _ in acknowledged]
            assert len(set(names)) == len(names)
            assert set(names) <= set(state.settings)
            assert state.n >= len(names)
            assert handle.database is not None
            handle.database.copy_rest()
            copies = [key for key, _ in handle.storage.list("log/0")]
        assert copies == [log_key(n) for n in range(1, state.n + 1)]


def test_what_was_acknowledged_survives_the_death_of_the_server(tmp_path: Path) -> None:
    kill_under_writers(tmp_path, writers=8, kills=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_what_was_acknowledged_survives_many_deaths_of_the_server(tmp_path: Path) -> None:
    kill_under_writers(tmp_path, writers=8, kills=20)


def test_a_database_that_is_away_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.plugins.postgres.database.DEADLINE_S", 1.0)
    with postgres_server() as server:
        site = Site(str(tmp_path / "store"), None, {"index": server.new_url()})
        with patiently(lambda: site.open(tmp_path / "host")) as store:
            server.kill()
            with pytest.raises(Unavailable, match=r"postgresql://127\.0\.0\.1"):
                store.log()
            server.start()
            patiently(lambda: store.commit(state_of(1), step=1))
            assert {info.step for info in patiently(store.log)} == {1}
    with pytest.raises((NotFound, Unavailable)):
        StoreHandle(site.place, **site.more)


def test_a_killed_server_has_no_backend_left_that_answers() -> None:
    """One that is busy would not notice by itself."""
    with postgres_server() as server, closing(server.admin()) as connection:
        pid = connection.execute("SELECT pg_backend_pid()").fetchall()[0][0]
        connection.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000)")
        storage = os.pidfd_open(pid)
        server.kill()
        assert select.select([storage], [], [], 0)[0]
        os.close(storage)
        server.start()


def test_a_server_that_refuses_for_good_is_not_asked_until_the_deadline(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    nobody = postgres.url("none").replace(f"trainer:{PASSWORD}@", f"nobody:{PASSWORD}@")
    for index, says in (
        (postgres.url("none"), "create the database first"),
        (nobody, "check user, password"),
    ):
        started = time.monotonic()
        with pytest.raises(InvalidInput, match=says):
            ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(index=index))
        assert time.monotonic() - started < DEADLINE_S / 2
