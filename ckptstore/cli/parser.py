"""Describe the command line as data, build its parser, and parse its words."""

import argparse
import re
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast

from ckptstore.cli.call import UsageError
from ckptstore.errors import InvalidInput
from ckptstore.plugin.text import SECOND_NS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZE = r"(?i:([0-9]+) ?([KMGT]?)(?:iB|B)?)"
_SPAN = r"([0-9]+) ?(s|min|m|h|d|w)(?: ago)?"
_SPAN_S = {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<choices>.*)\)")

_DESTRUCTIVE = ("forget", "gc", "migrate", "repair")
"""Commands that are suggested only for words that are spelled almost so."""

_BY_MEANING = {
    "add commit save": "import, or store.commit(…) in Python",
    "backup copy cp mirror sync upload": "push",
    "cat describe get info inspect": "show",
    "check validate": "fsck",
    "checkout load restore resume": "export, or store.checkout(…).restore(…) in Python",
    "clean prune purge vacuum": "gc",
    "cmp compare": "diff",
    "compress shrink": "compact",
    "commits list": "log",
    "convert": "import or export",
    "create make new": "init",
    "del delete drop expire remove rm": "forget",
    "df du size space status usage": "stats",
    "download fetch": "pull",
    "fix heal": "repair",
    "keys leaves tensors tree": "ls",
    "label mv rename": "tag",
    "locks ps writers": "sessions",
    "recover revert undo unforget": "undelete",
    "runs": "stats",
    "update upgrade": "migrate",
    "version": "--version",
}
"""The commands of this program by the words that other programs have for them."""

_EPILOG = """\
A REF is a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, a prefix of a commit id (6
digits or more), 'RUN@STEP' or 'RUN@latest', any of them followed by '~K' for the K-th first parent,
or the path of a pointer file.

The store is -s, else $CKPTSTORE, else the nearest enclosing directory that is a store.
Exit codes: 0 ok, 1 failed, 2 usage, 3 partial or damaged, 10 no store, 11 busy, 130 interrupted."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option (`"-n --dry-run"`) or an operand (`"path"`, `"path?"` if it may be left out,
    `"refs*"` if it may be repeated, too); the fields are those of argparse's `add_argument`. An
    option with a value is given once. Its `metavar` says what the value is (`KINDS`), unless `type`
    does."""

    names: str
    metavar: str | tuple[str, ...] | None
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    dest: str | None = None
    choices: Sequence[str] | None = None
    nargs: str | None = None
    const: Any = None
    action: str | None = None

    @property
    def name(self) -> str:
        """`dry-run` of `"-n --dry-run"`, `path` of `"path?"`."""
        return self.names.split()[-1].strip("-?*")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        settings["type"] = self.type or KINDS.get(self.metavar)
        if self.names[-1] in "?*":
            settings["nargs"] = self.names[-1]
        given = {name: setting for name, setting in settings.items() if setting is not None}
        parser.add_argument(*self.names.rstrip("?*").split(), **given)


Options: TypeAlias = tuple[Option | tuple[Option, ...], ...]
"""What an operation takes; the options of an inner tuple exclude each other."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One verb, written once: its command, the words and help of its arguments, their checks and
    the completions of shells are made from this.

    `run` is the function that carries it out and reports, as text and as JSON (`call.Answer`), by
    its dotted name below `ckptstore`. Where a store has a method of the operation's name, options
    are named as its parameters are, and `Call.carry_out` calls it. `summary` is for the list of
    commands, `description` for the command's own help. With `several_stores`, `-s` may be repeated
    behind the command; the further ones are in `more_stores`. A command that `draws` shows on a
    terminal itself that it works; all others do without being asked.
    """

    name: str
    run: str
    summary: str
    options: Options = ()
    description: str = ""
    several_stores: bool = False
    draws: bool = False

    def each(self) -> Mapping[str, Option]:
        """Its options and operands by their names, also those that exclude each other."""
        items = (item if isinstance(item, tuple) else (item,) for item in self.options)
        return {option.name: option for options in items for option in options}


def flag(
    names: str, help: str, *, dest: str | None = None, means: bool = True, default: Any = False
) -> Option:
    """An option without a value."""
    return Option(names, None, help, default=default, dest=dest, const=means, action="store_const")


def several(
    names: str,
    metavar: str | tuple[str, ...],
    help: str,
    *,
    action: str = "append",
    nargs: str | None = None,
    const: str | None = None,
    dest: str | None = None,
) -> Option:
    """An option that may be repeated; its values are a list."""
    help = f"{help}; may be repeated"
    return Option(names, metavar, help, None, [], dest, None, nargs, const, action)


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that are written alike: `read` makes one from the groups of `pattern`, or None of one
    beyond its limits. `wanted` says what it takes."""

    what: str
    pattern: str
    read: Callable[..., Any]
    wanted: str

    @property
    def __name__(self) -> str:
        """For what argparse itself refuses."""
        return self.what

    def __call__(self, text: str) -> Any:
        found = re.fullmatch(self.pattern, text)
        value = self.read(*found.groups()) if found else None
        if value is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {self.what}: wanted {self.wanted}")
        return value


def _size(number: str, unit: str) -> int:
    return int(number) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[unit.lower()]


def _share(percent: str) -> float | None:
    return float(percent) / 100 if float(percent) <= 100 else None


def _span(number: str, unit: str) -> int:
    """The seconds of a span."""
    return int(number) * _SPAN_S[unit]


def _port(number: str) -> int | None:
    return int(number) if int(number) < 65_536 else None


KINDS: Mapping[str | tuple[str, ...] | None, Kind] = {
    "N": Kind("count", "([0-9]+)", int, "a whole number, 0 or more"),
    "PORT": Kind("port", "0*([0-9]{1,5})", _port, "a number from 0 to 65535"),
    "SHARE": Kind("share", r"([0-9]+(?:\.[0-9]+)?)%", _share, "a percentage such as 5%"),
    "SIZE": Kind("size", _SIZE, _size, "bytes, or KiB, MiB or GiB, such as 1MiB"),
    "SPAN": Kind("span", _SPAN, _span, "one such as 90min, 12h, 7d"),
}
"""What reads a value, by the word that stands for it in a help text."""


def parse_moment(text: str, now_ns: int, *, end: bool = False) -> int:
    """The time that `text` says, in ns: a span before now (`90min`, `2h`, `3d`), or a date or time
    in ISO 8601, local unless it has a zone.

    A date alone is its first moment, or its last with `end`. Raises `InvalidInput`.
    """
    given = text.strip()
    try:
        if span := re.fullmatch(_SPAN, given):
            return now_ns - _span(*span.groups()) * SECOND_NS
        moment = datetime.fromisoformat(given).astimezone()
        if end and re.fullmatch(_DATE, given):
            moment += timedelta(days=1, microseconds=-1)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1_000
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidInput(
            f"{text!r:.80} is not a time: wanted a span such as 90min, 2h, 3d, 1w, or a date or "
            "time such as 2026-11-20T18:30"
        ) from error


def parse_best(text: str) -> tuple[str, bool]:
    """`METRIC`, `METRIC:min` or `METRIC:max` as the metric and whether large is good."""
    metric, _, order = text.rpartition(":")
    return (metric, order == "max") if metric and order in ("min", "max") else (text, False)


class Parser(ArgumentParser):
    """argparse that raises `UsageError` and suggests similar words."""

    def __init__(self, **kwargs: Any) -> None:
        # Each argument is checked with a formatter, which would ask the terminal for its width.
        checking = partial(RawDescriptionHelpFormatter, width=80)
        super().__init__(allow_abbrev=False, formatter_class=checking, **kwargs)
        for name in (None, "store"):
            self.register("action", name, Once)
        self.commands: dict[str, Parser] = {}
        self.several_stores = False

    def format_help(self) -> str:
        self.formatter_class = RawDescriptionHelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        if mistyped := _INVALID_CHOICE.search(message):
            choices = re.findall(r"[^', ]+", mistyped["choices"])
            what = message.split(":")[0].removeprefix("argument ").lower()
            near = (_near_commands if what == "command" else _near)(mistyped["given"], choices)
            known = _meant(near) or f"; wanted one of {', '.join(choices)}"
            message = f"no {what} {mistyped['given']!r}{known}"
        raise UsageError(message, self.prog)


class Once(argparse.Action):
    """Store the value of an option, and refuse a second one. A parser with such options parses one
    command line."""

    _given: object = None

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self.option_strings:
            several = self.dest == "store" and getattr(parser, "several_stores", False)
            if self._given is not None and several:
                namespace.more_stores = [*namespace.more_stores, values]
                return
            if self._given is not None:
                raise UsageError(
                    f"{option_string} is given twice, with {self._given!r} and {values!r}; it "
                    "takes one value",
                    parser.prog,
                )
            self._given = values
        setattr(namespace, self.dest, values)


def build(commands: Iterable[Operation], words: Sequence[str] | None = None) -> Parser:
    """The parser of the whole command line; given `words`, only for the commands among them, and
    with the names of the others: that takes a tenth of the time."""
    common = _common()
    top = Parser(
        prog="ckptstore",
        description="Inspect and maintain a store of checkpoints.",
        epilog=_EPILOG,
        parents=[common],
    )
    top.add_argument(
        "--version",
        action="store_true",
        help="print the version and exit; with --json, all that a bug report needs",
    )
    absent = Parser(add_help=False)  # for commands that are not among the words: it parses nothing

    def parser_of(**settings: Any) -> Parser:
        return Parser(**settings) if "parents" in settings else absent

    below = top.add_subparsers(
        dest="command",
        prog=top.prog,
        metavar="COMMAND",
        title="commands",
        parser_class=cast(type[Parser], parser_of),
    )
    for command in commands:
        if words is None or command.name in words:
            _add(command, below, common)
        else:
            below.add_parser(command.name, help=command.summary)
    top.commands = below.choices
    return top


def parse(commands: Iterable[Operation], words: Sequence[str]) -> Namespace:
    """The command line as a namespace; `command` is None if there is no command. Raises
    `UsageError`."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    parser = build(commands, words)
    defaults = Namespace(store=None, index=None, json=False, debug=False)
    args, unknown = parser.parse_known_args(words, defaults)
    if unknown:
        asked = parser.commands.get(args.command, parser)
        options = [name for action in asked._actions for name in action.option_strings]
        option = unknown[0].partition("=")[0]
        if option in options:
            raise UsageError(f"{option} goes behind {args.command}", asked.prog)
        raise UsageError(
            f"did not understand {unknown[0]!r}{_meant(_near(option, options))}", asked.prog
        )
    return args


def arguments(command: Operation, given: Mapping[str, Sequence[str]]) -> Namespace:
    """The arguments of a command whose options of these names have these values, read and checked
    as those of a command line. Raises `UsageError`."""
    words: list[str] = []
    for name, values in given.items():
        if any(value.startswith("-") for value in values):
            raise UsageError(f"--{name} takes no value that begins with -")
        together = command.each()[name].nargs
        words += [f"--{name}", *values] if together else [f"--{name}={each}" for each in values]
    return build([command]).commands[command.name].parse_args(words)


def _near(given: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    import difflib  # only here: seldom needed

    return difflib.get_close_matches(given, list(dict.fromkeys(names)), n=2, cutoff=cutoff)


def _near_commands(given: str, names: Sequence[str]) -> list[str]:
    """What the word means elsewhere, else commands that are spelled alike."""
    meant = {word: name for words, name in _BY_MEANING.items() for word in words.split()}
    if given.lower() in meant:
        return [meant[given.lower()]]
    words = [word for word, name in meant.items() if name not in _DESTRUCTIVE]
    alike = dict.fromkeys(meant[word] for word in _near(given, words, 0.8))
    harmless = [name for name in names if name not in _DESTRUCTIVE]
    return list(alike) or [*_near(given, _DESTRUCTIVE, 0.8), *_near(given, harmless)]


def _add(command: Operation, commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=command.description or f"{command.summary.capitalize()}.",
        parents=[common],
    )
    parser.set_defaults(operation=command, more_stores=[])
    parser.several_stores = command.several_stores
    for item in command.options:
        if isinstance(item, Option):
            item.add_to(parser)
        else:
            group = parser.add_mutually_exclusive_group()
            for option in item:
                option.add_to(group)


def _common() -> ArgumentParser:
    """Options before or after the command."""
    # Without defaults: a subparser's own would overwrite what was given before the command.
    parser = Parser(add_help=False, argument_default=SUPPRESS)
    group = parser.add_argument_group("common options")
    group.add_argument("-s", "--store", metavar="STORE", help="the store: a directory or a URL")
    group.add_argument(
        "--index",
        metavar="URL",
        help="the database with the log, if it is in one (default: $CKPTSTORE_INDEX)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document (docs/cli.md)")
    group.add_argument("--debug", action="store_true", help="print tracebacks and log messages")
    return parser


def _meant(near: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(near)}?)" if near else ""
