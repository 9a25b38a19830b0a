"""The text of a ref: one table for what it means, one for what is refused."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.refs import Ancestor, Best, Latest, Name, Ref, Step, parse_ref
from ckptstore.errors import InvalidInput

COMMIT = "91bc" * 16

MEANINGS: list[tuple[str | int, Ref]] = [
    (100, Step(100)),
    (0, Step(0)),
    ("100", Step(100)),
    ("-1", Step(-1)),
    ("123456", Step(123456, prefix="123456")),
    ("run@100", Step(100, "run")),
    ("team/run-7@123456", Step(123456, "team/run-7")),
    ("latest", Latest()),
    ("exp7@latest", Latest("exp7")),
    ("best:val_loss", Best("val_loss")),
    ("best:val_loss:min", Best("val_loss")),
    ("best:acc:max", Best("acc", "max")),
    ("best:eval/acc@5:max", Best("eval/acc@5", "max")),
    ("best:max", Best("max")),
    ("best:a:b", Best("a:b")),
    ("exp7@best:acc:max", Best("acc", "max", "exp7")),
    ("prod", Name("prod")),
    ("release/1.0", Name("release/1.0")),
    ("abcde", Name("abcde")),
    ("abcdef", Name("abcdef", "abcdef")),
    ("ABCDEF", Name("ABCDEF")),
    (COMMIT, Name(COMMIT, COMMIT)),
    ("latest~2", Ancestor(Latest(), 2)),
    ("prod~", Ancestor(Name("prod"), 1)),
    ("prod~~~", Ancestor(Name("prod"), 3)),
    ("prod~2~3", Ancestor(Name("prod"), 5)),
    ("prod~0", Name("prod")),
    ("100~1", Ancestor(Step(100), 1)),
    ("run@100~10", Ancestor(Step(100, "run"), 10)),
    ("best:acc:max~1", Ancestor(Best("acc", "max"), 1)),
]


@pytest.mark.parametrize(("text", "meaning"), MEANINGS, ids=str)
def test_a_ref_means(text: str | int, meaning: Ref) -> None:
    assert parse_ref(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "a~1234567890",
        "@5",
        "run@",
        "run@tag",
        "best:",
        "a b",
        "..@5",
        "~1",
        "tag~x",
        "a~1b",
        "é",
        "x@best:",
        "-",
        "/a",
        True,
        None,
        1.5,
    ],
)
def test_what_no_ref_looks_like_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput, match="wanted"):
        parse_ref(text)  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_any_text_is_a_ref_or_refused(text: str) -> None:
    with suppress(InvalidInput):
        parse_ref(text)
