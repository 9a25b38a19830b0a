"""What goes wrong ends with one line on standard error, the right exit code, and with `--json` one
document on standard output."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from tests.cli.running import call, environment, run


def _foreign(place: Path) -> None:
    place.mkdir()
    (place / "ckptstore.json").write_text('{"name": "something else"}')


def _truncated(place: Path) -> None:
    data = (place / "ckptstore.json").read_bytes()
    (place / "ckptstore.json").write_bytes(data[: len(data) // 2])


def _newer(place: Path) -> None:
    fields = json.loads((place / "ckptstore.json").read_text())
    (place / "ckptstore.json").write_text(json.dumps({**fields, "ckptstore": 99}))


USAGE = [
    ("lgo", "no command 'lgo' (did you mean log?)"),
    ("frobnicate", "no command 'frobnicate'; wanted one of init, log, show"),
    ("log --grap", "did not understand '--grap' (did you mean --graph"),
    ("log -n x", "'x' is not a count"),
    ("log -n -1", "'-1' is not a count"),
    ("log --since yesterday", "'yesterday' is not a time: wanted a span such as"),
    ("log --graph --sort loss", "--graph draws commits in the order of the log"),
    ("diff 100", "the following arguments are required: B"),
    ("show a@b@c", "'a@b@c' is no ref: wanted a step"),
    ("show best:", "names no metric"),
    ("tag a..b 100", "'a..b' cannot be a tag"),
    ("tag größe 100", "'größe' cannot be a tag: wanted 1 to 200 of A-Z a-z 0-9 _ . + - /"),
    ("tag best -d prod", "-d removes tags and takes no other arguments"),
    ("init /dev/null/x --codec zst", "no --codec 'zst' (did you mean zstd?)"),
    ("init /dev/null/x --chunk-size 3MiB", "wanted a power of two"),
    ("init /dev/null/x --chunk-size big", "'big' is not a size"),
    ("completion tcsh", "no shell 'tcsh'"),
    ("ls model/*", "to list leaves of the newest commit, say `ckptstore ls latest 'model/*'`"),
]
FAILED = [
    ("show 101", "the nearest steps are 100, 200, 210, 220"),
    ("show bets", "there are the tags best"),
    ("show abcdef012345", "no tag or commit 'abcdef012345'"),
    ("show latest~99", "generations of first parents"),
    ("show best:los", "has a metric 'los'"),
    ("show main@210", "in run 'main'"),
    ("log --run mian", "did you mean 'main'?"),
    ("log --metric los", "did you mean 'loss'?"),
    ("log --sort nothing", "there are accuracy, loss, val_loss"),
    ("ls latest modle", "did you mean 'model'?"),
    ("ls model", "to list leaves of the newest commit"),
    ("diff best bets", "there are the tags best"),
    ("tag new bets", "there are the tags best"),
    ("tag -d bets", "did you mean 'best'?"),
]


@pytest.mark.parametrize(
    ("words", "message", "code"), [*((w, m, 2) for w, m in USAGE), *((w, m, 1) for w, m in FAILED)]
)
def test_bad_input_is_refused_in_one_line_that_helps(
    made_store: Path, words: str, message: str, code: int
) -> None:
    result = call("-s", str(made_store), *words.split())
    assert message in result.err
    assert result.err.startswith("ckptstore: ")
    assert result.err.count("\n") == 1
    assert (result.code, result.out) == (code, "")


def test_an_ambiguous_beginning_of_an_id_lists_what_it_may_mean(made_store: Path) -> None:
    ids = [
        commit["id"] for commit in call("log", "--json", "-s", str(made_store)).document["commits"]
    ]
    assert call("show", ids[0][:12], "-s", str(made_store)).out.split()[1] == ids[0]


@pytest.mark.parametrize(
    ("prepare", "code", "message"),
    [
        (lambda place: None, 10, "no store at"),
        (Path.mkdir, 10, "make one with `ckptstore init"),
        (_foreign, 1, "is this the right directory?"),
    ],
)
def test_a_place_without_a_store_says_what_is_there(
    tmp_path: Path, prepare: Callable[[Path], None], code: int, message: str
) -> None:
    place = tmp_path / "place"
    prepare(place)
    result = call("log", "-s", str(place))
    assert (result.code, result.out) == (code, "")
    assert message in result.err


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [(_truncated, 3, "is not JSON"), (_newer, 1, "install a newer ckptstore")],
)
def test_a_store_that_cannot_be_read_says_why(
    store: Path, damage: Callable[[Path], None], code: int, message: str
) -> None:
    damage(store)
    result = call("log", "-s", str(store))
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_init_refuses_a_directory_with_something_else_in_it(made_store: Path) -> None:
    assert "is a store already" in call("init", str(made_store)).err
    result = call("init", str(made_store.parent))
    assert result.code == 2
    assert "holds 1 other entries" in result.err


def test_damage_elsewhere_leaves_what_is_known_of_a_commit(store: Path) -> None:
    (victim,) = {
        path for path in (store / "commits").iterdir() if path.name.endswith(_id(store, "100"))
    }
    victim.write_bytes(b"rubbish")
    shown = call("show", "best", "--usage", "-s", str(store))
    assert shown.code == 3
    assert "logical" in shown.out
    assert "exclusive" not in shown.out
    assert shown.err.startswith("ckptstore: exclusive and shared bytes cannot be told: ")
    document = call("show", "best", "--usage", "--json", "-s", str(store))
    assert document.code == 3
    assert document.document["commit"]["exclusive_bytes"] is None
    assert document.document["problem"]
    assert call("stats", "-s", str(store)).code == 3


def _id(store: Path, ref: str) -> str:
    return str(call("show", ref, "--json", "-s", str(store)).document["commit"]["id"])


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        ("show 101", "NotFound", 1),
        ("show a@b@c", "InvalidInput", 2),
        ("lgo", "UsageError", 2),
        ("log -s /nowhere", "NoStore", 10),
    ],
)
def test_with_json_an_error_is_a_document_too(
    made_store: Path, words: str, kind: str, code: int
) -> None:
    store = () if " -s " in words else ("-s", str(made_store))
    result = call("--json", *store, *words.split())
    error = result.document["error"]
    assert (error["kind"], error["exit_code"], result.code) == (kind, code, code)
    assert result.err == f"ckptstore: {error['message']}\n"


def test_debug_shows_the_traceback(made_store: Path) -> None:
    result = run("show", "101", "--debug", "-s", str(made_store))
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("ckptstore: no commit of step 101")


def test_a_reader_that_has_seen_enough_is_no_failure(made_store: Path) -> None:
    command = [sys.executable, "-m", "ckptstore", "ls", "-s", str(made_store)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, b"")


def test_an_interrupt_ends_with_130_and_without_a_traceback(made_store: Path) -> None:
    command = [sys.executable, "-m", "ckptstore", "ls", "-l", "--json", "-s", str(made_store)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)  # it has begun to print, and its pipe is full soon: it waits for us
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (130, b"ckptstore: interrupted\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [["log"], ["log", "--json"], ["show", "101", "--json"]])
def test_output_that_cannot_be_written_is_a_failure(made_store: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "ckptstore", *words, "-s", str(made_store)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"ckptstore: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_that_is_started_without_output_does_its_work(store: Path, closed: str) -> None:
    command = shlex.join(
        [sys.executable, "-m", "ckptstore", "-s", str(store), "tag", "good", "latest"]
    )
    assert subprocess.run(f"{command} {closed}", shell=True, timeout=60).returncode == 0
    assert "good" in call("-s", str(store), "tag", "--names").out.split()


def test_without_a_command_the_help_is_shown_and_the_usage_is_wrong(tmp_path: Path) -> None:
    result = run(cwd=tmp_path)
    assert result.code == 2
    assert "commands:" in result.out


def test_an_interrupt_that_comes_after_the_commit_says_that_it_was_made(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    ckptstore.open(tmp_path / "store").close()
    code = """
from ckptstore.cli.main import main
from ckptstore.repository.store_handle import StoreHandle
def interrupted(handle): raise KeyboardInterrupt
StoreHandle.follow = interrupted
raise SystemExit(main())
"""
    words = ["adopt", str(tmp_path / "files"), "-s", str(tmp_path / "store")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    with ckptstore.open(tmp_path / "store") as store:
        (made,) = store.log()
    assert done.stderr == f"ckptstore: interrupted; commit {made.id} was made before\n"
