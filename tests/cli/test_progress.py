"""Each command shows on a terminal that it works, and Ctrl-C ends it at once, whatever its threads
wait for."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.cli import main as command_line
from ckptstore.cli import screen
from ckptstore.cli.call import Answer, Call, Exit
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import Operation, Option
from ckptstore.cli.screen import ERASE, Screen
from tests.cli.running import environment, run, run_on_terminal

PATIENCE_S = 20.0


class Terminal(io.StringIO):
    """A terminal, as far as a stream shows it."""

    def isatty(self) -> bool:
        return True

    def reconfigure(self, **options: str) -> None:
        """Does nothing."""

    def wait_for(self, text: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while text not in self.getvalue():
            assert time.monotonic() < end_s, self.getvalue()
            time.sleep(0.005)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To become standard error, of a command for which moments are long."""
    monkeypatch.setattr(screen, "QUIET_S", 0.02)
    monkeypatch.setattr(screen, "TICK_S", 0.01)
    return Terminal()


def _operands(command: Operation) -> list[str]:
    """The operands that a command does not do without."""
    options = [option for option in command.options if isinstance(option, Option)]
    needed = [each for each in options if each.names[0] != "-" and each.names[-1] not in "?*"]
    return [option.choices[0] if option.choices else "x" for option in needed]


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if not each.draws], ids=attrgetter("name")
)
def test_a_command_that_takes_long_says_that_it_works(
    command: Operation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(call: Call) -> Answer:
        terminal.wait_for(f"{ERASE}ckptstore {command.name}")
        return Answer({})

    module, _, name = command.run.rpartition(".")
    monkeypatch.setattr(import_module(f"ckptstore.{module}"), name, wait)
    with redirect_stderr(terminal):
        assert command_line.main([command.name, *_operands(command)]) == 0
    assert terminal.getvalue().endswith(ERASE)


def test_the_line_changes_while_a_phase_lasts_and_has_its_share(terminal: Terminal) -> None:
    shown = Screen(json=False)
    with (
        redirect_stderr(terminal),
        shown.working("ckptstore test"),
        shown.progress() as told,
    ):
        told("copy", 1, 4)
        terminal.wait_for("copy 25%")
        told("copy", 4, 4)
        terminal.wait_for("copy 100%")
    assert terminal.getvalue().endswith(ERASE)


def test_nothing_is_shown_while_others_have_the_terminal(terminal: Terminal) -> None:
    shown = Screen(json=False)
    with redirect_stderr(terminal), shown.working("ckptstore test"):
        terminal.wait_for("ckptstore test")
        with shown.left_to_others():
            before = terminal.getvalue()
            time.sleep(0.1)
            assert terminal.getvalue() == before and before.endswith(ERASE)


def test_a_line_is_no_wider_than_the_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = Screen(json=False)
    with (
        redirect_stderr(terminal),
        shown.working("ckptstore test"),
        shown.progress("x" * 100),
    ):
        terminal.wait_for("xxx")
    assert max(map(len, terminal.getvalue().split(ERASE))) < 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """In which nothing was measured."""
    place = tmp_path / "s"
    with ckptstore.open(place) as store:
        for step in range(3):
            state = {f"w{i}": torch.full((300, 1_000), step + i / 10) for i in range(12)}
            store.commit({"model": state}, step=step)
    return place


def test_history_tells_how_far_it_is(store: Path) -> None:
    told = [
        json.loads(line) for line in run("history", "-s", str(store), "--json").err.splitlines()
    ]
    assert {each["phase"] for each in told} == {"read commits", "measure tensors"}
    assert all(told[-1][name] > 30 for name in ("done", "total"))
    again = run("history", "-s", str(store), "--json").err
    assert "measure" not in again
    assert "norm" in run_on_terminal("history", "-s", str(store)).out.lower()


HANG = """
import os, sys, time
import {module}
from ckptstore.cli.main import main
def hang(*args, **options):
    os.write(1, b"hangs\\n")
    time.sleep(600)
{module}.{function} = hang
sys.argv = ["ckptstore", *{words!r}]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "module", "function"),
    [
        ("history --run main", "ckptstore.plugins.analysis.measurements", "_measure"),
        ("fsck --read-data 100%", "ckptstore.maintenance.check.data", "read_run"),
    ],
)
def test_ctrl_c_ends_a_command_whose_threads_hang(
    words: str, module: str, function: str, store: Path
) -> None:
    given = [*words.split(), "-s", str(store)]
    script = HANG.format(module=module, function=function, words=given)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == b"hangs\n"
            process.send_signal(signal.SIGINT)
            began_s = time.monotonic()
            assert process.wait(PATIENCE_S) == Exit.INTERRUPTED
        finally:
            process.kill()
        assert time.monotonic() - began_s < 10
        assert process.stderr.read() == b"ckptstore: interrupted\n"
