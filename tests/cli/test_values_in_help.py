"""Every value that a help text shows is one that the option takes."""

import re
from argparse import Action
from collections.abc import Callable, Iterator, Mapping

import pytest

from ckptstore.cli.call import UsageError
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import build, parse, parse_moment
from ckptstore.errors import InvalidInput
from ckptstore.maintenance.check import parse_share

_VALUE = re.compile(r"(?<![\w.$-])-?[0-9][\w.,-]*%?|(?<=: )(?<!default: )all\b")
"""What looks like a value: a number, with its unit, or `all`, but not where it stands for nothing
given."""

_DEFAULT = re.compile(r"\(default: (\w+)\)")
"""Of an option with choices, this is one of them."""


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


READERS: Mapping[str, Callable[[str], object]] = {
    "factors": _numbers,
    "read_data": parse_share,
    "since": lambda text: parse_moment(text, 0),
    "until": lambda text: parse_moment(text, 0),
    **dict.fromkeys(("keep_best", "newest"), int),
}
"""What reads the values of options that argparse keeps as texts."""

PROSE = {"host", "command_line", "runs", "weights"}
"""Options of any text, and those whose help tells of numbers and of `all` as no values."""


def _options() -> Iterator[tuple[str, Action]]:
    for command, parser in build(COMMANDS).commands.items():
        for option in parser._actions:
            if option.nargs != 0 and option.help and option.dest not in PROSE:
                yield command, option


def _shown() -> list[tuple[str, str, str]]:
    return [
        (command, option.dest, value.rstrip(".,"))
        for command, option in _options()
        for value in (_DEFAULT if option.choices else _VALUE).findall(
            (option.help or "").replace("%%", "%")
        )
    ]


def test_values_of_every_kind_are_found() -> None:
    assert {
        ("fsck", "read_data", "all"),
        ("fsck", "read_data", "5%"),
        ("fsck", "read_data", "10G"),
        ("fsck", "level", "connectivity"),
        ("gc", "grace_s", "1h"),
        ("init", "chunk_size", "64KiB"),
        ("log", "since", "90min"),
        ("average", "factors", "1,0.5,-0.5"),
    } <= set(_shown())


@pytest.mark.parametrize(("command", "dest", "value"), _shown())
def test_each_is_taken(command: str, dest: str, value: str) -> None:
    parser = build(COMMANDS).commands[command]
    option = next(each for each in parser._actions if each.dest == dest)
    if option.choices is not None:
        assert value in option.choices
    else:
        READERS.get(dest, option.type)(value)  # type: ignore[operator, misc]  # or it is missing here


@pytest.mark.parametrize("text", ["", "none", "al", "101%", "0", "-5%", "5 %"])
def test_what_is_no_amount_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(InvalidInput, match="'5%', a size such as '10G', or 'all'"):
        parse_share(text)


def test_all_is_one_hundred_percent() -> None:
    assert parse_share("all") == parse_share("100%")


@pytest.mark.parametrize("text", ["65536", "655350000", "0655350000", "8765x", ""])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a port: wanted a number from 0 to 65535"):
        parse(COMMANDS, ["ui", f"--port={text}"])
