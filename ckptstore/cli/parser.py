"""Build the parser of the command line and parse its words."""

import argparse
import difflib
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.exits import UsageError
from ckptstore.cli.options import Command, Option

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)")

_EPILOG = """\
A REF is a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, a prefix of a commit id (6
digits or more), 'RUN@STEP' or 'RUN@latest', any of them followed by '~K' for the K-th first parent,
or the path of a pointer file.

The store is -s, else $CKPTSTORE, else the nearest enclosing directory that is a store.
Exit codes: 0 ok, 1 failed, 2 usage, 3 partial or damaged, 10 no store, 11 busy, 130 interrupted."""


class Parser(ArgumentParser):
    """argparse that raises `UsageError` and suggests similar words."""

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
            known = _meant(near) or f"; wanted one of {', '.join(choices)}"
            what = message.split(":")[0].removeprefix("argument ").lower()
            message = f"no {what} {mistyped['given']!r}{known}"
        raise UsageError(message, self.prog)


class Once(argparse.Action):
    """Store the value of an option, and refuse a second one.

    Parsers whose options are the same to a user share `given`, the values given so far by
    destination.
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


def build(words: Sequence[str] | None = None) -> Parser:
    """The parser of the whole command line; given `words`, with options only for commands among
    them, which is quicker."""
    given: dict[str, Any] = {}
    top = Parser(
        prog="ckptstore",
        description="Inspect and maintain a store of checkpoints.",
        epilog=_EPILOG,
        parents=[_common(given)],
    )
    top.set_defaults(store=None, index=None, json=False, debug=False, version=False)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    common = _common(given)  # a fresh one: the top parser has changed the defaults of the first
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    for command in COMMANDS:
        if words is None or command.name in words:
            _add(command, commands, common)
        else:
            commands.add_parser(command.name, help=command.summary)
    top.commands = commands.choices
    return top


def parse(words: Sequence[str]) -> Namespace:
    """The command line as a namespace; `command` is None if there is no command. Raises
    `UsageError`."""
    parser = build(words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked = parser.commands.get(args.command, parser)
        options = [name for action in asked._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=2, cutoff=0.6)
        raise UsageError(f"did not understand {unknown[0]!r}{_meant(near)}", asked.prog)
    return args


def _add(command: Command, commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=command.description or f"{command.summary.capitalize()}.",
        parents=[common],
    )
    parser.set_defaults(run_command=command.run)
    for item in command.options:
        if isinstance(item, Option):
            item.add_to(parser)
        else:
            group = parser.add_mutually_exclusive_group()
            for option in item:
                option.add_to(group)


def _common(given: dict[str, Any]) -> ArgumentParser:
    """Options that are given once, before or after the command."""
    # Their defaults are the top parser's: a subparser's own would overwrite what was given before
    # the command.
    parser = Parser(add_help=False, argument_default=SUPPRESS)
    group = parser.add_argument_group("common options")
    group.add_argument(
        "-s", "--store", given=given, metavar="STORE", help="the store: a directory or a URL"
    )
    group.add_argument(
        "--index",
        given=given,
        metavar="URL",
        help="the database with the log, if it is in one (default: $CKPTSTORE_INDEX)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document (docs/cli.md)")
    group.add_argument("--debug", action="store_true", help="print tracebacks and log messages")
    return parser


def _meant(near: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(near)}?)" if near else ""
