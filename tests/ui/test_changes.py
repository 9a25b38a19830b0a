"""What `--allow-changes` allows: tag, untag, forget as previewed, undelete; each is one log entry,
and what is refused changes nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptstore
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import Operation
from ckptstore.plugins.ui.changes import CHANGES
from ckptstore.plugins.ui.form import ABSENT, FIELDS, FORM
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
    plan = writer.view(f"retention/{run_key('baseline')}.json?keep-last=3")
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


def test_a_forget_is_planned_before_it_asks(writer: Browser) -> None:
    before = writer.view("position.json")
    ids = [commit["id"] for commit in writer.view("store.json")["recent"]]
    tagged = writer.view("store.json")["tags"][0]["id"]
    plain = next(id_ for id_ in ids if id_ != tagged)
    answer = writer.change("forget", _body(commits=[plain], dry_run=True))
    assert answer.json() == {"question": "forget 1 commit?"}
    answer = writer.change("forget", _body(commits=[tagged], dry_run=True))
    assert answer.status_code == 409 and "has a tag" in answer.json()["error"]
    assert writer.view("position.json") == before


LACKS = " ".join(ABSENT).split()
UPKEEP = [
    each
    for each in COMMANDS
    if each.run.startswith(("cli.maintain.", "cli.checks.", "cli.mirrors.", "cli.files."))
    or each.name in ("tag", "doctor")
]


@pytest.mark.parametrize("operation", UPKEEP, ids=lambda each: each.name)
def test_each_option_of_upkeep_is_on_the_page_or_says_why_not(operation: Operation) -> None:
    if operation.name in LACKS:
        return
    there = {f"{operation.name}.{name}" for name in operation.each()}
    listed = [*FIELDS, *LACKS, *(f"forget.{name}" for name in FORM)]
    assert len(listed) == len(set(listed)), "both on the page and not"
    assert there == {each for each in listed if each.startswith(f"{operation.name}.")}


def test_what_the_page_lacks_is_an_operation_or_an_option_of_one() -> None:
    options = {f"{each.name}.{name}" for each in UPKEEP for name in each.each()}
    assert set(LACKS) <= options | {each.name for each in UPKEEP}


def test_each_field_of_a_change_is_an_option() -> None:
    fields = {f"{name}.{field}" for name, kind in CHANGES.items() for field in kind.model_fields}
    assert fields == set(FIELDS.values())


def test_the_form_of_a_run_has_the_options_of_the_command_line(writer: Browser) -> None:
    assert writer.ask("/data/site.json").json()["policies"] == json.loads(json.dumps(FORM))
    fields = {name: (field["values"], field["pattern"]) for name, field in FORM.items()}
    assert fields["keep-last"] == ("N", "([0-9]+)")
    assert fields["keep-best"] == (("METRIC[:max]", "N"), None)
    assert fields["keep-within"][0] == "SPAN"
    assert all(field["help"].startswith("keep ") for field in FORM.values())


def test_a_change_has_the_name_of_the_method_that_does_the_same() -> None:
    assert set(CHANGES) <= set(dir(ckptstore.Store))
