"""Build the parser of the command line and parse its words.

Each command is a module of this room, imported when the command runs.
"""

import argparse
import difflib
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from ckptstore.cli.arguments import Parser, meant
from ckptstore.cli.exits import UsageError
from ckptstore.cli.maintenance_options import EXCHANGE, MAINTENANCE, add_migrate
from ckptstore.cli.query_options import QUERIES, add_completion

_REFS = """\
A REF is a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, the beginning of a commit id
(6 digits or more), 'RUN@STEP' or 'RUN@latest', any of them with '~K' behind for the K-th parent,
and the path of a pointer file."""

_EPILOG = f"""\
{_REFS}

The store is -s, else $CKPTSTORE, else the nearest enclosing directory that is one.
Exit codes: 0 ok, 1 failed, 2 usage, 3 partial or damaged, 10 no store, 11 busy, 130 interrupted."""


class _Version(argparse.Action):
    """Print the version and stop."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        import ckptstore

        print(f"ckptstore {ckptstore.__version__}")
        parser.exit()


def build() -> Parser:
    """The parser of the whole command line."""
    given: dict[str, Any] = {}
    top = Parser(
        prog="ckptstore",
        description="Look into a store of checkpoints and manage it.",
        epilog=_EPILOG,
        parents=[_common(given)],
    )
    top.set_defaults(store=None, index=None, json=False, debug=False)
    top.add_argument("--version", action=_Version, help="print the version and exit")
    common = _common(given)  # a fresh one: the top parser has changed the defaults of the first
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    for add in (*QUERIES, *MAINTENANCE, *EXCHANGE, add_migrate, add_completion):
        add(commands, common)
    top.commands = commands.choices
    return top


def parse(words: Sequence[str]) -> Namespace:
    """The command line as a namespace; `command` is None if there is no command. Raises
    `UsageError`."""
    parser = build()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked = parser.commands.get(args.command, parser)
        options = re.findall(r"--[a-z-]+", asked.format_help())
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=2, cutoff=0.6)
        raise UsageError(f"did not understand {unknown[0]!r}{meant(near)}", asked.prog)
    return args


def _common(given: dict[str, Any]) -> ArgumentParser:
    """Options that stand before or behind the command, once in all."""
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
        help="the database that holds the log, if one does (default: $CKPTSTORE_INDEX)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document (docs/cli.md)")
    group.add_argument("--debug", action="store_true", help="show tracebacks and what is going on")
    return parser
