"""A store whose every text says something to a terminal: no command passes it on, on a terminal, in
a pipe or as JSON."""

import json
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.core.ids import new_session_id, session_key
from ckptstore.log import sessions
from ckptstore.storage import open_storage
from tests.cli.running import Result, call, run, run_on_terminal

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31mEVIL\r\x08\x7f\u202e\u2028\n[red]"
"""The clipboard, the screen, a colour in eight bits, the start of the line, another direction of
writing, a line's end, rich's markup."""

COMMANDS: dict[str, list[str]] = {
    "log": ["log", "--all"],
    "log by metric": ["log", "--metric", f"loss{EVIL}", "--sort", f"loss{EVIL}:max"],
    "log of none": ["log", "--run", f"r{EVIL}"],
    "show": ["show", "1"],
    "show what is not there": ["show", f"x{EVIL}"],
    "ls": ["ls", "1"],
    "ls long": ["ls", "1", "-l", "--all"],
    "ls of none": ["ls", "1", EVIL],
    "ls as json": ["--json", "ls", "-l", "1"],
    "diff": ["diff", "1", "2"],
    "diff by key": ["diff", "1", "2", "--stat"],
    "tag": ["tag"],
    "tag names": ["tag", "--names"],
    "set a tag": ["tag", f"t{EVIL}", "1"],
    "stats": ["stats"],
    "forget": ["forget", "-n", "--keep-last", "1"],
    "forget by metric": ["forget", "-n", "--keep-best", f"loss{EVIL}"],
    "undelete": ["undelete", f"a{EVIL}"],
    "gc": ["gc", "-n"],
    "sessions": ["sessions"],
    "sessions as json": ["--json", "sessions"],
    "fsck": ["fsck", "--read-data"],
    "repair": ["repair"],
    "reindex": ["reindex"],
    "push": ["push", "{out}/other", "--create"],
    "pull": ["pull", "{store}"],
    "clone": ["clone", "{store}", "{out}/clone"],
    "export": ["export", "1", "{out}/x.safetensors"],
    "import": ["import", "{out}/" + EVIL.replace("\n", "") + ".safetensors"],
    "adopt": ["adopt", "{out}/" + EVIL.replace("\n", "")],
    "materialize": ["materialize", "1", "{out}/tree", "--select", EVIL],
    "migrate": ["migrate"],
    "log as json": ["--json", "log", "--all"],
    "show as json": ["--json", "show", "1"],
    "diff as json": ["--json", "diff", "1", "2"],
    "an error as json": ["--json", "show", f"x{EVIL}"],
    "an error in full": ["--debug", "show", f"x{EVIL}"],
    "no command": [f"x{EVIL}"],
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, and a session in it that was left open on a host with such a name."""
    place = tmp_path_factory.mktemp("hostile") / "store"
    with ckptstore.open(place) as store:
        for step in (1, 2):
            state = {
                f"model{EVIL}": {
                    f"w{EVIL}": torch.full((4,), float(step)),
                    f"note{EVIL}": f"value{EVIL}{step}",
                }
            }
            store.commit(
                state,
                step=step,
                message=f"message{EVIL}",
                metrics={f"loss{EVIL}": 1.0 / step},
                tag=f"t{step}",
            )
    session = sessions.SessionInfo(
        new_session_id(),
        f"what{EVIL}",
        f"host{EVIL}",
        f"boot{EVIL}",
        f"space{EVIL}",
        1,
        1,
        time.time_ns(),
    )
    with closing(open_storage(str(place))) as storage:
        storage.put(session_key(session.id), sessions.encode_session(session))
    return place


def assert_harmless(text: str, what: str, allowed: str = "") -> None:
    """Nothing but printable characters and the ends of lines, and what our own colours and progress
    are made of."""
    rest = re.sub(allowed, "", text) if allowed else text
    found = [
        f"{rest[max(i - 30, 0) : i + 10]!r}"
        for i, c in enumerate(rest)
        if not c.isprintable() and c != "\n"
    ]
    assert found == [], f"{what}: {found[0]}"


def words_of(name: str, store: Path, out: Path) -> list[str]:
    return [
        "-s",
        str(store),
        *(
            word.replace("{out}", str(out)).replace("{store}", str(store))
            for word in COMMANDS[name]
        ),
    ]


def check(result: Result, name: str, allowed: str = "") -> None:
    assert "this should not have happened" not in result.out + result.err
    assert_harmless(result.out + result.err, name, allowed)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_passes_on_what_a_terminal_would_obey(
    name: str, hostile: Path, tmp_path: Path
) -> None:
    result = call(*words_of(name, hostile, tmp_path))
    check(result, name)
    if "--json" in COMMANDS[name]:
        assert json.loads(result.out)


@pytest.mark.parametrize(
    "name",
    [
        "log",
        "log by metric",
        "show",
        "ls long",
        "diff",
        "tag",
        "stats",
        "sessions",
        "forget",
        "an error in full",
    ],
)
def test_a_real_terminal_and_a_real_pipe_see_only_our_own_colours(
    name: str, hostile: Path, tmp_path: Path
) -> None:
    words = words_of(name, hostile, tmp_path)
    shown = run_on_terminal(*words, columns=200)
    check(shown, name, r"\x1b\[[0-9;]*m|\r\x1b\[K")
    check(run(*words), name)


def test_the_text_is_there_in_escapes_and_whole_in_json(hostile: Path) -> None:
    assert r"\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31mEVIL" in call("-s", str(hostile), "log").out
    assert r"\x1b]52" in call("-s", str(hostile), "sessions").out
    assert any(
        commit["message"] == f"message{EVIL}"
        for commit in call("-s", str(hostile), "--json", "log").document["commits"]
    )
    paths = {
        leaf["path"] for leaf in call("-s", str(hostile), "--json", "ls", "1").document["leaves"]
    }
    assert any(path.startswith("model%1B]52") and "\x9b31mEVIL" in path for path in paths)
