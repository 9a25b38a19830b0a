"""forget, undelete, gc and sessions on the command line."""

import json
import os
import time
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import build, parse
from ckptstore.log.sessions import open_session
from ckptstore.maintenance.gc import GRACE_S, MAX_UNUSED
from ckptstore.maintenance.retention import Period
from ckptstore.maintenance_api import Maintenance
from ckptstore.repository.store_handle import StoreHandle
from tests.cli.running import call, run, run_on_terminal
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
    planned = call("gc", "-n", "--now", "--json").document["plan"]
    done = call("gc", "--now", "--json").document
    assert done["plan"] == planned
    assert done["done"]["freed_bytes"] == planned["freed_now_bytes"] > 0
    assert size_of(place) == before - planned["freed_now_bytes"] + planned["copied_bytes"]
    verify(place, [1, 3, 4, 5, 6, 7])


@pytest.mark.parametrize(
    ("words", "left"), [(("--keep-last", "3"), 3), (("--run", "main", "--all"), 0)]
)
def test_a_terminal_shows_what_would_go_and_asks(
    place: Path, words: tuple[str, ...], left: int
) -> None:
    at = ("-s", str(place), "forget", *words)
    for typed in ("\n", "\x04", None) if left else ("no\n",):
        refused = run_on_terminal(*at, typed=typed)
        assert refused.code == Exit.FAILED
        assert f"{8 - left} commits to forget, {left} to keep" in refused.out
        assert (f"forget {8 - left} commits? [y/N]" in refused.out) == (typed is not None)
        assert "nothing was forgotten; --yes forgets without asking" in refused.out
    assert run_on_terminal(*at, "-n", typed="").code == Exit.OK
    assert call("log", "--json").document["total"] == 8
    done = run_on_terminal(*at, typed="y\n")
    assert (done.code, f"forgot {8 - left} commits" in done.out) == (Exit.OK, True)
    assert call("log", "--json").document["total"] == left
    assert call("undelete", "--all").code == Exit.OK
    assert "[y/N]" not in run_on_terminal(*at, "--yes", typed="").out
    assert call("log", "--json").document["total"] == left


def test_nothing_is_asked_where_nothing_would_go_or_commits_are_named(place: Path) -> None:
    for words in (("--keep-last", "9"), ("3",)):
        done = run_on_terminal("-s", str(place), "forget", *words, typed="")
        assert done.code == Exit.OK
        assert "[y/N]" not in done.out
    assert call("log", "--json").document["total"] == 7


@pytest.mark.parametrize(
    "words", [("--all",), ("--all", "--run", "main", "--keep-last", "1"), ("--run", "main")]
)
def test_all_of_a_run_is_forgotten_only_where_both_are_said(
    place: Path, words: tuple[str, ...]
) -> None:
    done = call("forget", *words)
    assert done.code == Exit.USAGE
    assert "--all" in done.err
    assert call("log", "--json").document["total"] == 8


def test_a_script_forgets_a_whole_run_and_undeletes_it(place: Path) -> None:
    assert "forgot 8 commits" in call("forget", "--run", "main", "--all").out
    assert call("log", "--json").document["total"] == 0
    assert call("undelete", "--run", "main", "--all").code == Exit.OK
    assert call("undelete", "--all").out == "no commit is forgotten\n"
    mistyped = call("forget", "--run", "mian", "--all")
    assert (mistyped.code, "did you mean 'main'" in mistyped.err) == (Exit.FAILED, True)
    named = call("forget", "main")
    assert "it is a run, and 'main@latest' names its newest commit" in named.err


def test_a_script_needs_no_yes(place: Path) -> None:
    assert call("forget", "--keep-last", "2").code == Exit.OK
    assert call("log", "--json").document["total"] == 2


def test_a_policy_that_keeps_fewer_than_it_says_is_said_on_standard_error(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"a": 1}, step=8, metrics={"loss": 1.0})
    words = ("-s", str(place), "forget", "--keep-last", "4", "--keep-best", "loss", "3", "--json")
    planned, done = call(*words, "-n"), run(*words)
    (note,) = planned.document["notes"]
    assert "'best 3 by loss' keeps 1 commit of run 'main'" in note
    assert planned.err == done.err == f"ckptstore: {note}\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["forget"], Exit.USAGE, "no policy"),
        (["forget", "--keep-last", "0"], Exit.USAGE, "at least 1"),
        (["forget", "--keep-last", "2", "1"], Exit.USAGE, "one or the other"),
        (["forget", "--keep-best", "loss", "many"], Exit.USAGE, "a count"),
        (["forget", "--keep-best", "loss", "9" * 5_000], Exit.USAGE, "a count"),
        (["forget", "--keep-within", "2026-01-01"], Exit.USAGE, "a span"),
        (["forget", "--keep-best", "val_los", "3"], Exit.USAGE, "no commit has the metric"),
        (["forget", *"01234567"], Exit.FAILED, "forget --run main --all"),
        (["undelete", "latest"], Exit.FAILED, "not forgotten"),
        (["undelete", "99"], Exit.FAILED, "no commit is forgotten"),
        (["undelete"], Exit.USAGE, "--all"),
        (["undelete", "1", "--all"], Exit.USAGE, "--all"),
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
        later = call("gc", "--now", "--json").document["plan"]["freed_later"]
        assert later[0]["sessions"] == [session.id]
        (row,) = call("sessions", "--json").document["sessions"]
        assert (row["session"], row["status"], row["pid"]) == (session.id, "active", os.getpid())
        assert row["waiting_bytes"] > 0
        assert session.id in call("sessions").out
    handle.close()
    assert call("sessions").out == "no process writes\n"


def test_forgotten_commits_are_listed_with_their_time_and_restored_by_step(place: Path) -> None:
    assert call("log", "--forgotten").out == ""
    assert call("log", "--forgotten", "--run", "main").code == Exit.OK
    ids = {row["step"]: row["id"] for row in call("log", "--json").document["commits"]}
    before_ns = time.time_ns()
    call("forget", "0", "1", "2")
    listed = call("log", "--forgotten", "--json").document
    assert [row["id"] for row in listed["commits"]] == [ids[2], ids[1], ids[0]]
    assert listed["total"] == 3
    for row in listed["commits"]:
        assert row["forgotten"]
        assert before_ns < row["forgotten_time_ns"] < time.time_ns()
        assert row["forgotten_time"].startswith("20")
    header, *lines = call("log", "--forgotten").out.splitlines()
    assert "FORGOTTEN" in header
    assert [line.split()[0] for line in lines] == [ids[n][:12] for n in (2, 1, 0)]
    assert "undelete" in run_on_terminal("-s", str(place), "log", "--forgotten").out
    assert call("log", "--forgotten", "--run", "other").code == Exit.FAILED
    assert f"{ids[1][:12]} (step 1) of run main is restored" in call("undelete", "1").out
    assert call("log", "--forgotten", "--json").document["total"] == 2
    assert call("undelete", "--all", "--json").document["undeleted"] == [ids[2], ids[0]]
    assert call("undelete", "--all").code == Exit.OK
    assert call("log", "--json").document["total"] == 8


def test_gc_keeps_what_was_just_forgotten_and_says_how_to_delete_it(place: Path) -> None:
    commits = [row["id"] for row in call("log", "--json").document["commits"]]
    assert call("forget", "0", "1").code == Exit.OK
    for words in (["gc"], ["gc", "--grace", "1d"]):
        assert "keep 2 commits: just forgotten; `ckptstore gc --now`" in call(*words).out
        plan = call(*words, "--json").document["plan"]
        assert (plan["recent"], plan["purge"]) == (sorted(commits[-2:]), [])
    assert call("gc", "--grace", "0s", "-n", "--json").document["plan"]["recent"] == []
    assert call("gc", "--now", "--grace", "1h").code == Exit.USAGE
    assert "purge 2 commits" in call("gc", "--now").out
    assert call("undelete", commits[-1]).code == Exit.FAILED


def test_the_grace_of_the_command_is_that_of_the_library() -> None:
    given = parse(COMMANDS, ["gc"])
    assert (given.grace_s, given.max_unused) == (None, None)  # so those of the method hold
    said = parse(COMMANDS, ["gc", "--grace", "1h", "--max-unused", "5%"])  # as --help says
    assert (said.grace_s, said.max_unused) == (GRACE_S, MAX_UNUSED)


def test_progress_is_json_lines_on_standard_error_with_json(place: Path) -> None:
    result = run("gc", "--json", "-s", str(place))
    phases = [json.loads(line)["phase"] for line in result.err.splitlines()]
    assert phases[0] == "list objects"
    assert {"read footers", "read commits", "read pages", "copy"} <= set(phases)
    assert run("gc", "-n", "-s", str(place)).err == ""


BESIDE = {
    "gc": {"on"},
    "release": set[str](),
    "reindex": set[str](),
    "doctor": set[str](),
    "sessions": set[str](),
    "undelete": {"all", "run"},
    "history": {"limit", "nan"},
    "compact": {"newest", "every", "on"},
    "forget": {"refs", "keep_last", "keep_every_steps", "keep_best", "keep_within", "thin", "yes"}
    | {f"keep_{period}" for period in get_args(Period)},
}
"""Operations that call the method of their name, with the values that they use otherwise."""


@pytest.mark.parametrize("name", BESIDE)
def test_each_value_of_an_operation_is_one_of_its_method(name: str) -> None:
    common = {"help", "store", "index", "json", "debug"}
    values = {action.dest for action in build(COMMANDS).commands[name]._actions} - common
    assert BESIDE[name] <= values
    assert values - BESIDE[name] <= set(signature(getattr(Maintenance, name)).parameters)
