"""A word or an option that is not known: what is suggested means the same, and harms nothing."""

from pathlib import Path

import pytest

from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import _BY_MEANING, _DESTRUCTIVE
from tests.cli.running import call

MEANT = {
    "rm": "forget",
    "delete": "forget",
    "prune": "gc",
    "list": "log",
    "du": "stats",
    "size": "stats",
    "mv": "tag",
    "cp": "push",
    "create": "init",
    "info": "show",
    "version": "--version",
    "DU": "stats",
    "shrink": "compact",
    "compressed": "compact",
    "validat": "fsck",
    "lgo": "log",
    "stat": "stats",
    "forgt": "forget",
    "undelet": "undelete",
}


@pytest.mark.parametrize(("word", "command"), MEANT.items())
def test_a_command_is_suggested_by_what_the_word_means(word: str, command: str) -> None:
    assert f"no command {word!r} (did you mean {command}?)" in call(word).err


@pytest.mark.parametrize("word", ["restore", "restor", "load", "commit", "save"])
def test_what_only_python_does_is_said_so(word: str) -> None:
    assert "in Python?)" in call(word).err


@pytest.mark.parametrize("word", ["cc", "cp", "create", "get", "gs", "got", "rate"])
def test_nothing_destructive_is_suggested_for_a_word_that_is_spelled_otherwise(word: str) -> None:
    said = call(word).err.partition("wanted one of")[0]
    assert not any(f" {command}" in said for command in _DESTRUCTIVE), said


def test_the_words_of_other_programs_are_no_commands_here_and_lead_to_some() -> None:
    commands = {command.name for command in COMMANDS}
    words = [word for words in _BY_MEANING for word in words.split()]
    assert len(words) == len(set(words)) and not commands & set(words)
    found = {meant.split(",")[0].split(" or ")[0] for meant in _BY_MEANING.values()}
    assert found - {"--version"} <= commands


def test_help_is_a_command_too() -> None:
    assert call("help") == call("--help")
    assert call("help", "log") == call("log", "--help")
    assert call("help").code == 0
    assert "did you mean stats?" in call("help", "du").err


def test_an_option_of_the_command_before_it_is_not_suggested_as_itself(made_store: Path) -> None:
    result = call("-s", str(made_store), "--names", "tag")
    assert "--names goes behind tag" in result.err
    assert result.code == 2


def test_no_writer_is_an_answer_in_a_pipe_too(made_store: Path) -> None:
    assert call("sessions", "-s", str(made_store)).out == "no process writes\n"


def test_a_check_that_read_no_data_says_so(made_store: Path) -> None:
    for words in (["fsck"], ["fsck", "--level", "packs"], ["fsck", "--level", "refs"]):
        said = call(*words, "-s", str(made_store)).out
        assert said.startswith("no damage found: ")
        assert "no data read (`ckptstore fsck --read-data` reads " in said
    said = call("fsck", "--read-data", "-s", str(made_store)).out
    assert said.startswith("no damage: ") and "no data read" not in said
    assert call("fsck", "--read-data", "1K", "-s", str(made_store)).out.startswith("no damage")
