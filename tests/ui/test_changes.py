"""What `--allow-changes` allows: tag, untag, forget as previewed, undelete; each is one log entry,
and what is refused changes nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.plugins.ui.changes import CHANGES
from ckptstore.plugins.ui.values import run_key
from tests.ui.asking import Browser, browsing


@pytest.fixture
def own(place: Path, tmp_path: Path) -> Path:
    return shutil.copytree(place, tmp_path / "own")


@pytest.fixture
def writer(own: Path) -> Iterator[Browser]:
    with browsing(own, allow_changes=True) as browser:
        yield browser


def _body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_tags_are_set_and_removed(writer: Browser, own: Path) -> None:
    id_ = writer.view("store.json")["recent"][3]["id"]
    assert writer.change("tag", _body(name="chosen", commit=id_)).status_code == 200
    with ckptstore.open(own) as store:
        assert store.tags()["chosen"] == id_
    assert "chosen" in str(writer.view("store.json")["tags"])
    assert writer.change("untag", _body(name="chosen")).status_code == 200
    assert "chosen" not in str(writer.view("store.json")["tags"])


def test_what_a_preview_shows_is_forgotten_and_comes_back(writer: Browser, own: Path) -> None:
    plan = writer.view(f"retention/{run_key('baseline')}.json?last=3")
    gone = [id_ for id_, reasons in plan["commits"] if not reasons]
    answer = writer.change("forget", _body(commits=gone))
    assert answer.status_code == 200 and f"forgot {len(gone)}" in answer.json()["done"]
    with ckptstore.open(own) as store:
        assert not set(gone) & {info.id for info in store.log()}
    shown = writer.view("forgotten.json")
    assert {commit["id"] for commit in shown["commits"]} == set(gone)
    assert writer.change("undelete", _body(commits=gone)).status_code == 200
    with ckptstore.open(own) as store:
        assert set(gone) <= {info.id for info in store.log()}


def test_a_tagged_commit_is_not_forgotten(writer: Browser) -> None:
    tag = writer.view("store.json")["tags"][0]
    answer = writer.change("forget", _body(commits=[tag["id"]]))
    assert answer.status_code == 409 and "has a tag" in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("tag", b"", 400),
        ("tag", b"{}", 400),
        ("tag", b'{"name":"../x","commit":"zz"}', 400),
        ("tag", b'{"name":"a b\\u0000","commit":"COMMIT"}', 400),
        ("tag", b'{"name":"x","commit":"000000000000"}', 404),
        ("tag", b'{"name":"x","commit":"COMMIT","more":1}', 400),
        ("untag", b'{"name":"nothing"}', 404),
        ("forget", b'{"commits":[]}', 400),
        ("forget", b'{"commits":["latest"]}', 404),
        ("undelete", b'{"commits":["COMMIT"]}', 409),
        ("gc", b"{}", 400),
        ("tag", b"x" * 5_000_000, 400),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    writer: Browser, name: str, body: bytes, status: int
) -> None:
    before = writer.view("position.json")
    commit = writer.view("store.json")["recent"][0]["id"].encode()
    answer = writer.change(name, body.replace(b"COMMIT", commit))
    assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text
    assert writer.view("position.json") == before


def test_a_change_has_the_name_of_the_method_that_does_the_same() -> None:
    assert set(CHANGES) <= set(dir(ckptstore.Store))
