"""Ages, dates, and what `--since` and `--until` understand."""

from datetime import UTC, datetime

import pytest

from ckptstore.cli.parser import parse_moment
from ckptstore.core.text import age_text, exact_text, utc_text
from ckptstore.errors import InvalidInput

S = 1_000_000_000
NOW = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()) * S


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3_599, "59 min"),
        (3_600, "1 h"),
        (47 * 3_600, "47 h"),
        (48 * 3_600, "2 d"),
        (29 * 86_400, "29 d"),
        (100 * 86_400, "2026-08-12"),
        (-100 * 86_400, "2027-02-28"),
    ],
)
def test_an_age_is_one_number_and_a_unit_until_a_date_says_more(seconds: int, text: str) -> None:
    assert age_text(NOW - seconds * S, NOW) == text


def test_times_for_programs_are_utc_and_exact() -> None:
    assert utc_text(NOW + 42) == "2026-11-20T12:00:00Z"
    assert exact_text(NOW + 42) == "2026-11-20T12:00:00.000000042Z"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30s", NOW - 30 * S),
        ("90min", NOW - 5_400 * S),
        ("90m", NOW - 5_400 * S),
        ("2 h", NOW - 7_200 * S),
        ("3d ago", NOW - 3 * 86_400 * S),
        ("1w", NOW - 7 * 86_400 * S),
        ("2026-11-20T12:00:00Z", NOW),
        ("2026-11-20 13:00+01:00", NOW),
        ("2026-11-20T12:00:00.000001+00:00", NOW + 1_000),
    ],
)
def test_a_moment_is_a_span_before_now_or_iso_8601(text: str, moment: int) -> None:
    assert parse_moment(text, NOW) == moment


def test_a_date_is_its_first_moment_or_its_last() -> None:
    first, last = parse_moment("2026-11-20", NOW), parse_moment("2026-11-20", NOW, end=True)
    assert 86_399 * S < last - first < 86_400 * S


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "3",
        "3y",
        "2026-13-01",
        "h",
        "99999999999999-01-01",
        "9" * 5_000 + "d",
        "0001-01-01T00:00+23:59",
    ],
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidInput, match="3d"):
        parse_moment(text, NOW)
