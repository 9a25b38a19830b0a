"""Parsers and values of the command line: an option is given once or adds up, and what cannot be
understood raises `UsageError`."""

import argparse
import difflib
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from ckptstore.cli.exits import UsageError

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)")
_SIZE = re.compile(r"([0-9]+) ?([KMGT]?)(?:iB|B)?", re.IGNORECASE)


class Parser(ArgumentParser):
    """argparse that raises `UsageError` and says what somebody who mistyped may have meant."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        for name in (None, "store"):
            self.register("action", name, Once)
        self.commands: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        if mistyped := _INVALID_CHOICE.search(message):
            choices = re.findall(r"[^', ]+", mistyped["choices"])
            near = difflib.get_close_matches(mistyped["given"], choices, n=2, cutoff=0.5)
            known = meant(near) or f"; there are {', '.join(choices)}"
            what = (
                "command"
                if self.prog == "ckptstore"
                else message.split(":")[0].removeprefix("argument ").lower()
            )
            message = f"no {what} {mistyped['given']!r}{known}"
        raise UsageError(message, self.prog)


class Once(argparse.Action):
    """Store the value of an option, and refuse a second one. What may be repeated says so:
    `action="append"` or `"extend"`.

    Parsers whose options are the same to a user share `given`, the destinations that have a value.
    """

    def __init__(self, *args: Any, given: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = {} if given is None else given

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self.option_strings:
            if self.dest in self._given:
                both = f"{self._given[self.dest]!r} and {values!r}"
                raise UsageError(
                    f"{option_string} is given twice, with {both}; it takes one value", parser.prog
                )
            self._given[self.dest] = values
        setattr(namespace, self.dest, values)


def meant(near: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def size(text: str) -> int:
    if found := _SIZE.fullmatch(text):
        return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2].upper()]
    raise argparse.ArgumentTypeError(
        f"{text!r} is no size: wanted bytes, or KiB, MiB or GiB, such as 1MiB"
    )


def share(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if found and float(found[1]) <= 100:
        return float(found[1]) / 100
    raise argparse.ArgumentTypeError(f"{text!r} is no share: wanted one such as 5%")


def count(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no count: wanted a whole number from 0 on")


def command(
    commands: Any, common: ArgumentParser, name: str, summary: str, description: str = ""
) -> Parser:
    """Add a command to the parser. Its module has its name unless `module` is set otherwise."""
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        parents=[common],
    )
    parser.set_defaults(module=name)
    return parser
