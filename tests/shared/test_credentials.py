"""Credentials appear nowhere: not in objects, rows, caches, logs, output, errors or their
causes."""

import json
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore import Mirror
from ckptstore.cli.call import Exit
from ckptstore.errors import CkptStoreError
from ckptstore.interop.dcp import StoreReader
from ckptstore.interop.torchsnapshot import Snapshot
from tests.cli.running import call
from tests.maintenance.collecting import state_of
from tests.shared.sites import Site
from tests.support.servers.postgres import PASSWORD, PostgresServer
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, environment_of, new_url

SECRET = "the-buckets-own-secret"
"""The server must take any; Ceph's does not."""

COMMANDS = (
    "log",
    "fsck",
    "doctor",
    "stats",
    "gc -n",
    "tag prod latest",
    "reindex",
    "sessions",
    "gc",
)


@pytest.fixture
def server(s3: S3Server) -> S3Server:
    secret = s3.secret if "CKPTSTORE_TEST_S3" in os.environ else SECRET
    return S3Server(s3.endpoint, s3.key, secret)


@pytest.fixture
def site(server: S3Server, postgres: PostgresServer) -> Site:
    return Site(new_url(), server.options(), {"index": postgres.new_url()})


def assert_untold(text: str | bytes, where: str, server: S3Server) -> None:
    data = text.encode() if isinstance(text, str) else text
    for secret in (server.secret, PASSWORD):
        at = data.find(secret.encode())
        assert at < 0, f"{where}: …{data[max(at - 80, 0) : at + 40]!r}…"


def everything_written(site: Site, folder: Path, postgres: PostgresServer) -> dict[str, bytes]:
    storage = site.storage()
    written = {key: storage.read(key) for key, _ in storage.list("")}
    written |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with postgres.admin(str(site.more["index"]).rpartition("/")[2]) as connection:
        tables = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname LIKE 'ckptstore%'"
        for schema, table in connection.execute(
            tables
        ).fetchall():  # as text, so that what lies in columns of bytes is not looked for
            rows = connection.execute(
                f'SELECT row_to_json(t)::text FROM "{schema}"."{table}" t'
            ).fetchall()  # type: ignore[arg-type]
            written[f"{schema}.{table}"] = "\n".join(row for (row,) in rows).encode()
    return written


def test_nothing_written_or_logged_holds_credentials(
    site: Site,
    server: S3Server,
    postgres: PostgresServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mirror = Site(new_url(), server.options(), {"index": postgres.new_url()})
    there = Mirror(mirror.place, storage=mirror.as_storage())
    with (
        caplog.at_level(logging.DEBUG, "ckptstore"),
        site.open(tmp_path / "host", read_cache_bytes=1 << 20, mirror=there) as store,
    ):
        for step in range(3):
            store.commit(
                state_of(step),
                step=step,
                tag=f"t{step}",
                message="a message",
                metrics={"loss": 1.0},
            )
        store.commit_async(state_of(3), step=3).wait()
        assert store.flush_mirror()
        store.checkout(1).state_dict()
        store.untag("t0")
        store.forget([0])
        store.gc(max_unused=0.0, grace_s=0)
        assert not store.fsck(read_data="100%").findings
        said = [repr(store), repr(store.log()), repr(store.checkout())]
    for where, text in {"the log": caplog.text, "repr": "\n".join(said)}.items():
        assert_untold(text, where, server)
    for end in (site, mirror):
        written = everything_written(end, tmp_path, postgres)
        assert any("log/" in key for key in written) and any(".commits" in key for key in written)
        for key, data in written.items():
            assert_untold(data, key, server)


def test_no_command_shows_credentials(site: Site, server: S3Server, tmp_path: Path) -> None:
    with site.open(tmp_path / "host") as store:
        store.commit(state_of(1), step=1)
    environment = {
        **os.environ,
        "CKPTSTORE_CACHE": str(tmp_path / "host"),
        "CKPTSTORE_INDEX": str(site.more["index"]),
        **environment_of(server),
    }
    script = (
        "import sys, json; from ckptstore.cli.main import main\nfor words in "
        "json.loads(sys.argv[1]):\n"
    )
    script += "    print(words, 'left with', main(words))"
    words = [["-s", site.place, *command.split()] for command in COMMANDS]
    wrong = ["-s", site.place, "--index", str(site.more["index"]).replace("/db_", "/none_"), "log"]
    command = [sys.executable, "-c", script, json.dumps([*words, wrong])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shown = done.stdout.replace(repr(wrong), "")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"left with (\d+)", done.stdout) == ["0"] * len(words) + [
        str(int(Exit.FAILED))
    ], done.stdout + done.stderr
    assert_untold(shown + done.stderr, "the commands", server)


def failing(
    site: Site, server: S3Server, proxy: Proxy, postgres: PostgresServer, host: Path
) -> dict[str, Callable[[], object]]:
    """What does not work, each in its own way."""
    index = str(site.more["index"])
    elsewhere = {"endpoint_url": "http://127.0.0.1:1", "deadline_s": 1}
    return {
        "no bucket": lambda: Site(new_url("no-such-bucket"), site.options, site.more).open(host),
        "no server": lambda: Site(
            site.place, {**(site.options or {}), **elsewhere}, site.more
        ).open(host),
        "an option that is unknown": lambda: Site(
            site.place, {**(site.options or {}), "nonsense": server.secret}, site.more
        ).open(host),
        "a server that is away": lambda: Site(
            site.place, server.behind(proxy.endpoint).options(deadline_s=1), site.more
        ).open(host),
        "no database": lambda: Site(site.place, site.options, {"index": postgres.url("none")}).open(
            host
        ),
        "no database server": lambda: Site(
            site.place, site.options, {"index": postgres.url("x", port=1)}
        ).open(host),
        "another kind of database": lambda: Site(
            new_url(), site.options, {"index": index.replace("postgresql+", "mysql+")}
        ).open(host),
        "a password with a slash": lambda: Site(
            new_url(), site.options, {"index": f"mysql://trainer:a/{PASSWORD}@host/x"}
        ).open(host),
        "a password with an at": lambda: Site(
            new_url(), site.options, {"index": f"mysql://trainer:a@{PASSWORD}@host/x"}
        ).open(host),
        "no port": lambda: Site(
            new_url(), site.options, {"index": f"postgresql://trainer:{PASSWORD}@host:port/x"}
        ).open(host),
        "a bucket with a password": lambda: Site(
            f"s3://key:{server.secret}@bucket/x", site.options
        ).open(host),
        "a bucket with a slash in its password": lambda: Site(
            f"s3://key:a/{server.secret}@bucket/x", site.options
        ).open(host),
        "a secret as a bucket's option": lambda: Site(
            f"{new_url()}?aws_secret_access_key={server.secret}", site.options
        ).open(host),
        "a secret behind another option": lambda: Site(
            f"{new_url()}?client=obstore&secret={server.secret}", site.options
        ).open(host),
        "a snapshot in such a bucket": lambda: Snapshot(
            f"s3://key:a/{server.secret}@bucket/x/1", storage_options=site.options
        ).get_manifest(),
        "a short path in such a bucket": lambda: Snapshot(
            f"s3://key:{server.secret}@bucket", storage_options=site.options
        ).get_manifest(),
        "a DCP load from such a bucket": lambda: StoreReader(
            f"s3://key:a/{server.secret}@bucket/x", storage_options=site.options
        ).read_metadata(),
        "a database without a scheme": lambda: Site(
            new_url(), site.options, {"index": f"trainer:{PASSWORD}@host/x"}
        ).open(host),
        "a database in words": lambda: Site(
            new_url(), site.options, {"index": f"host=h user=u password={PASSWORD}"}
        ).open(host),
        "a scheme that is unknown": lambda: Site(
            f"nonsense://key:{server.secret}@bucket/x", site.options
        ).open(host),
        "another log": lambda: Site(site.place, site.options, {"index": postgres.new_url()}).open(
            host
        ),
    }


def test_no_error_and_no_cause_holds_credentials(
    site: Site,
    server: S3Server,
    postgres: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.open(tmp_path / "host").close()
    monkeypatch.setattr("ckptstore.plugins.postgres.database.DEADLINE_S", 1.0)
    with caplog.at_level(logging.DEBUG, "ckptstore"), proxy_to(server.address) as proxy:
        proxy.faults.busy = 1.0
        for name, attempt in failing(site, server, proxy, postgres, tmp_path / "host").items():
            with pytest.raises((CkptStoreError, TypeError)) as caught:
                attempt()
            assert_untold(str(caught.value), name, server)
            told = [
                f"{each} {each!r}" for each in _chain(caught.value)
            ] + traceback.format_exception(caught.value)[-1:]
            assert_untold("\n".join(told), f"what caused {name}", server)
    assert_untold(caplog.text, "the log", server)


def test_the_command_line_shows_no_secret_in_a_place(server: S3Server, tmp_path: Path) -> None:
    """Each command that takes a place, with secrets where they do not belong; `--debug` shows what
    caused an error too."""
    store = str(tmp_path / "store")
    assert call("init", store).code == Exit.OK
    places = [
        f"s3://key:a/{server.secret}@bucket/x",
        f"s3://bucket/x?aws_secret_access_key={server.secret}",
        f"nonsense://key:a/{server.secret}@bucket/x",
        f"az://bucket/x?sig={server.secret}",
    ]
    for place in places:
        for words in (
            ["-s", place, "log"],
            ["-s", place, "--json", "log"],
            ["-s", place, "--debug", "fsck"],
            ["-s", place, "migrate"],
            ["-s", store, "push", place],
            ["-s", store, "pull", place],
            ["clone", place, str(tmp_path / "clone")],
            ["clone", store, place],
            ["init", place],
            ["-s", store, "import", place],
            ["log", "-s", place, "--nonsense"],
            ["log", place],
        ):
            result = call(*words)
            assert result.code not in (Exit.OK, Exit.INTERRUPTED), words
            told = re.sub(
                r"(?m)^    .*$", "", result.out + result.err
            )  # source lines of a traceback name variables, not values
            assert_untold(told, " ".join(words[2:]), server)
    for index in (
        f"trainer:{PASSWORD}@host/x",
        f"mysql://trainer:a/{PASSWORD}@host/x",
        f"host=h password={PASSWORD}",
    ):
        for words in (
            ["--index", index, "--debug", "log"],
            ["migrate", "--log-to", index],
            ["push", str(tmp_path / "o"), "--create", "--to-index", index],
        ):
            result = call("-s", store, *words)
            assert_untold(result.out + result.err, " ".join(words), server)


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
