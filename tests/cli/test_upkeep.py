"""forget, undelete, gc and sessions on the command line."""

import json
import os
from pathlib import Path

import pytest

from ckptstore.cli.call import Exit
from ckptstore.log.sessions import open_session
from ckptstore.repository.store_handle import StoreHandle
from tests.cli.running import call, run
from tests.maintenance.collecting import make, size_of, verify


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make(tmp_path / "store", 8)
    monkeypatch.setenv("CKPTSTORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_forget_says_why_each_commit_stays_and_a_dry_run_says_the_same(place: Path) -> None:
    words = ["forget", "--keep-last", "2", "--keep-every-steps", "3", "--keep-within", "1s"]
    planned = call(*words, "-n", "--json").document
    done = call(*words, "--json").document
    assert planned["commits"] == done["commits"]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    reasons = {row["step"]: row["reasons"] for row in done["commits"]}
    assert "every 3 steps" in reasons[0]
    assert reasons[7][0] == "one of the 2 newest of its run"


def test_forget_gc_undelete_together(place: Path) -> None:
    commits = {row["step"]: row["id"] for row in call("log", "--json").document["commits"]}
    forgotten = call("forget", "0", "1", "2")
    assert forgotten.code == Exit.OK
    assert "forgot 3 commits" in forgotten.out
    assert [row["step"] for row in call("log", "--json").document["commits"]] == [7, 6, 5, 4, 3]
    assert call("undelete", commits[1][:12]).code == Exit.OK
    before = size_of(place)
    planned = call("gc", "-n", "--json").document["plan"]
    done = call("gc", "--json").document
    assert done["plan"] == planned
    assert done["done"]["freed_bytes"] == planned["freed_now_bytes"] > 0
    assert size_of(place) == before - planned["freed_now_bytes"] + planned["copied_bytes"]
    verify(place, [1, 3, 4, 5, 6, 7])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["forget"], Exit.USAGE, "no policy"),
        (["forget", "--keep-last", "0"], Exit.USAGE, "at least 1"),
        (["forget", "--keep-last", "2", "1"], Exit.USAGE, "one or the other"),
        (["forget", "--keep-best", "loss", "many"], Exit.USAGE, "a count"),
        (["forget", "--keep-within", "2026-01-01"], Exit.USAGE, "a span"),
        (["forget", "7"], Exit.FAILED, "newest"),
        (["undelete", "latest"], Exit.FAILED, "not forgotten"),
        (["gc", "--max-unused", "200%"], Exit.USAGE, "not a share"),
    ],
)
def test_what_cannot_be_done_says_why(place: Path, words: list[str], code: Exit, says: str) -> None:
    result = call(*words)
    assert (result.code, says in result.err) == (code, True), result.err


def test_sessions_shows_who_is_writing_and_what_waits(place: Path) -> None:
    call("forget", "0", "1")
    handle = StoreHandle(place)
    with open_session(handle.storage, "commit") as session:
        later = call("gc", "--json").document["plan"]["freed_later"]
        assert later[0]["sessions"] == [session.id]
        (row,) = call("sessions", "--json").document["sessions"]
        assert (row["session"], row["status"], row["pid"]) == (session.id, "active", os.getpid())
        assert row["waiting_bytes"] > 0
        assert session.id in call("sessions").out
    handle.close()
    assert call("sessions").out == "no process writes\n"


def test_progress_is_json_lines_on_standard_error_with_json(place: Path) -> None:
    result = run("gc", "--json", "-s", str(place))
    phases = [json.loads(line)["phase"] for line in result.err.splitlines()]
    assert phases[0] == "list objects"
    assert {"read footers", "read commits", "read pages", "copy"} <= set(phases)
    assert run("gc", "-n", "-s", str(place)).err == ""
