"""How points in time are written and read: ages for people, ISO 8601 for pipes and JSON, and what
`--since` understands. Pure."""

import re
from datetime import UTC, datetime, timedelta

from ckptstore.errors import InvalidInput

SECOND_NS = 1_000_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SPANS = {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_SPAN = re.compile(r"([0-9]+) ?(s|min|m|h|d|w)(?: ago)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_AGES = ((60, 1, "s"), (3_600, 60, "min"), (2 * 86_400, 3_600, "h"), (30 * 86_400, 86_400, "d"))


def age_text(time_ns: int, now_ns: int) -> str:
    """`12 s`, `3 min`, `5 h`, `12 d`; the local date of what is older than a month or lies in the
    future."""
    seconds = (now_ns - time_ns) // SECOND_NS
    if seconds >= 0:
        for limit, unit_s, unit in _AGES:
            if seconds < limit:
                return f"{seconds // unit_s} {unit}"
    return f"{_local(time_ns):%Y-%m-%d}"


def local_text(time_ns: int) -> str:
    """`2026-11-20 23:22:01 +0100`, in the time zone of the reader."""
    return f"{_local(time_ns):%Y-%m-%d %H:%M:%S %z}"


def utc_text(time_ns: int) -> str:
    """`2026-11-20T22:22:01Z`: sorts as it is, and has no spaces."""
    return f"{_utc(time_ns):%Y-%m-%dT%H:%M:%S}Z"


def exact_text(time_ns: int) -> str:
    """`2026-11-20T22:22:01.000000042Z`: every nanosecond."""
    return f"{_utc(time_ns):%Y-%m-%dT%H:%M:%S}.{time_ns % SECOND_NS:09d}Z"


def parse_moment(text: str, now_ns: int, *, end: bool = False) -> int:
    """The time that `text` says, in ns: a span before now (`90min`, `2h`, `3d`), or a date or time
    in ISO 8601, local unless it has a zone.

    A date alone is its first moment, or its last with `end`. Raises `InvalidInput`.
    """
    if span := _SPAN.fullmatch(text.strip()):
        return now_ns - int(span[1]) * _SPANS[span[2]] * SECOND_NS
    try:
        moment = datetime.fromisoformat(text.strip()).astimezone()
        if end and _DATE.fullmatch(text.strip()):
            moment += timedelta(days=1, microseconds=-1)
        return (moment - _EPOCH) // timedelta(microseconds=1) * 1_000
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidInput(
            f"{text!r} is no time: wanted a span such as 90min, 2h, 3d, 1w, or a date or time such "
            "as 2026-11-20T18:30"
        ) from error


def _utc(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns // SECOND_NS, UTC)


def _local(time_ns: int) -> datetime:
    return _utc(time_ns).astimezone()
