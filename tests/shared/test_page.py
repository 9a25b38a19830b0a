"""The page of stores in buckets and databases: every view, new commits while it is open, two
stores of different kinds, and a server that is away."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ckptstore.plugins.ui import opened
from ckptstore.plugins.ui.views import JOBS, VIEWS
from tests.cli.running import call
from tests.maintenance.collecting import state_of
from tests.shared.sites import Site, Sites, kinds, on, sites_of
from tests.shared.test_faults import patiently
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.proxy import proxy_to
from tests.support.servers.s3 import S3Server, environment_of, new_url
from tests.ui.asking import Browser, browsing


@pytest.fixture(params=kinds("bucket and database"))
def sites(request: pytest.FixtureRequest, tmp_path: Path) -> Sites:
    return sites_of(request, tmp_path)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


def commit(site: Site, host: Path, *steps: int) -> None:
    with site.open(host) as store:
        for step in steps:
            store.commit(state_of(step), step=step, metrics={"loss": 1 / step}, tag=f"at-{step}")


def parts_of(browser: Browser) -> dict[str, tuple[Any, ...]]:
    """An address for each view: of the newest commit, the one before it, and a tensor."""
    found = browser.view("store.json")
    newest, before = (each["id"] for each in found["recent"][:2])
    leaf = browser.view(f"leaves/{newest}/0.json")["path"].index("model/own")
    of_two = {"diff": (before, newest), "distances": (before, newest), "leaves": (newest, 0)}
    of_leaf = dict.fromkeys(("leaf", "tensor", "moves"), (newest, leaf))
    of_one = {"run": (found["runs"][0]["key"],), "commit": (newest,), "sharing": (newest,)}
    return {**dict.fromkeys((*VIEWS, *JOBS), ()), **of_two, **of_leaf, **of_one}


def test_every_view_says_what_it_says_of_a_store_on_the_disk(
    sites: Sites, host: Path, tmp_path: Path
) -> None:
    site, local = sites.new(), Site(str(tmp_path / "store"))
    for place in (site, local):
        commit(place, host, 1, 2, 3)
    with on(host), browsing(site.handle(), local.handle()) as browser:
        started = time.perf_counter()
        browser.view("store.json")
        print(f"first page of a {sites.kind}: {(time.perf_counter() - started) * 1e3:.0f} ms")
        assert [each["name"] for each in browser.ask("/data/site.json").json()["stores"]][1]
        for name, parts in parts_of(browser).items():
            found = browser.view(f"{'/'.join(map(str, (name, *parts)))}.json")
            assert "error" not in found, name
        run = parts_of(browser)["run"][0]
        plan = browser.view(f"retention/{run}.json?keep-last=1")
        assert len([each for each in plan["commits"] if each[1]]) == 3
        here = browser.view("store.json", 1)
        there = browser.view("store.json")
        for name in ("commits", "logical_bytes", "stored_bytes", "tags"):
            if name == "tags":
                assert [tag["name"] for tag in there[name]] == ["at-1", "at-2", "at-3"]
            else:
                assert there[name] == here[name], name


def test_what_another_host_commits_appears(sites: Sites, host: Path, tmp_path: Path) -> None:
    site = sites.new()
    commit(site, tmp_path / "other", 1)
    with on(host), browsing(site.handle()) as browser:
        before = browser.view("position.json")["n"]
        assert browser.view("store.json")["commits"] == 1
        commit(site, tmp_path / "other", 2)
        assert browser.view("position.json")["n"] > before
        assert browser.view("store.json")["recent"][0]["step"] == 2
        assert browser.view("space.json")["chunks"]


def test_a_server_that_is_away_is_named_and_comes_back(
    s3: S3Server, seed: int, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "PATIENCE_S", 2)
    with proxy_to(s3.address, seed) as proxy:
        bucket = Site(new_url(), s3.behind(proxy.endpoint).options())
        local = Site(str(tmp_path / "store"))
        for site in (bucket, local):
            commit(site, host, 1)
        with on(host), browsing(bucket.handle(), local.handle()) as browser:
            assert browser.view("store.json")["commits"] == 1
            proxy.break_by("refusal")
            started = time.monotonic()
            answer = browser.ask("/data/0/store.json")
            assert time.monotonic() - started < 20  # a trainer would try for a minute
            assert answer.status_code == 503
            said = answer.json()["error"]
            assert bucket.place in said and "see to the storage, then repeat" in said
            assert browser.view("store.json", 1)["commits"] == 1
            proxy.heal()
            commit(bucket, tmp_path / "other", 2)
            assert browser.view("store.json")["commits"] == 2


def test_a_database_that_is_away_is_named_and_comes_back(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "PATIENCE_S", 1)
    with postgres_server() as server:
        site = Site(str(tmp_path / "store"), None, {"index": server.new_url()})
        commit(site, host, 1)
        with on(host), browsing(site.handle()) as browser:
            assert browser.view("store.json")["commits"] == 1
            server.kill()
            try:
                answer = browser.ask("/data/0/store.json")
            finally:
                server.start()
            assert answer.status_code == 503
            assert "postgresql://127.0.0.1" in answer.json()["error"]
            assert patiently(lambda: browser.view("store.json"))["commits"] == 1


def test_the_command_takes_stores_of_different_kinds(
    s3: S3Server,
    postgres: PostgresServer,
    host: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Site(new_url(), s3.options(), {"index": postgres.new_url()})
    local = Site(str(tmp_path / "store"))
    for site in (bucket, local):
        commit(site, host, 1, 2)
    monkeypatch.setenv("CKPTSTORE_CACHE", str(host))
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    words = ("--index", str(bucket.more["index"]), "ui", "-s", local.place, "-s", bucket.place)
    done = call(*words, "--export", str(tmp_path / "page"))
    assert done.code == 0, done.err
    site = json.loads((tmp_path / "page/data/site.json").read_bytes())
    assert [store["name"] for store in site["stores"]] == [local.place, bucket.place]
    for number in range(2):
        found = json.loads((tmp_path / f"page/data/{number}/store.json").read_bytes())
        assert found["commits"] == 2
    refused = call("--index", str(bucket.more["index"]), "-s", local.place, "log")
    assert "is in the store itself" in refused.err
