"""Describe a command: its name, its options, and the function that runs it."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from ckptstore.core.text import SECOND_NS
from ckptstore.errors import InvalidInput

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZE = re.compile(r"([0-9]+) ?([KMGT]?)(?:iB|B)?", re.IGNORECASE)
_SPAN = re.compile(r"([0-9]+) ?(s|min|m|h|d|w)(?: ago)?")
_SPAN_S = {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class Option:
    """An option (`"-n --dry-run"`) or an operand (`"path"`); the fields are those of argparse's
    `add_argument`. An option with a value is given once."""

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

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        given = {name: setting for name, setting in settings.items() if setting is not None}
        parser.add_argument(*self.names.split(), **given)


Options: TypeAlias = tuple[Option | tuple[Option, ...], ...]
"""What a command takes; the options of an inner tuple exclude each other."""


@dataclass(frozen=True, slots=True)
class Command:
    """`run` is the function of this room that runs the command: `module.function`. `summary` is
    for the list of commands, `description` for the command's own help."""

    name: str
    run: str
    summary: str
    options: Options = ()
    description: str = ""


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


def size(text: str) -> int:
    if found := _SIZE.fullmatch(text):
        return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2].upper()]
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a size: wanted bytes, or KiB, MiB or GiB, such as 1MiB"
    )


def share(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if found and float(found[1]) <= 100:
        return float(found[1]) / 100
    raise argparse.ArgumentTypeError(f"{text!r} is not a share: wanted a percentage such as 5%")


def count(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a count: wanted a whole number, 0 or more")


def parse_moment(text: str, now_ns: int, *, end: bool = False) -> int:
    """The time that `text` says, in ns: a span before now (`90min`, `2h`, `3d`), or a date or time
    in ISO 8601, local unless it has a zone.

    A date alone is its first moment, or its last with `end`. Raises `InvalidInput`.
    """
    if span := _SPAN.fullmatch(text.strip()):
        return now_ns - int(span[1]) * _SPAN_S[span[2]] * SECOND_NS
    try:
        moment = datetime.fromisoformat(text.strip()).astimezone()
        if end and _DATE.fullmatch(text.strip()):
            moment += timedelta(days=1, microseconds=-1)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1_000
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidInput(
            f"{text!r} is not a time: wanted a span such as 90min, 2h, 3d, 1w, or a date or time "
            "such as 2026-11-20T18:30"
        ) from error


def parse_best(text: str) -> tuple[str, bool]:
    """`METRIC`, `METRIC:min` or `METRIC:max` as the metric and whether large is good."""
    metric, _, order = text.rpartition(":")
    return (metric, order == "max") if metric and order in ("min", "max") else (text, False)
