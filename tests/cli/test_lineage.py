"""The lineage graph: every shape that branches and merges can make, and what is left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import CommitId
from ckptstore.plugins.reports.log import Node, draw, shown


def nodes(text: str) -> list[Node]:
    """`d:b,c c:a b:a a:` from the newest to the oldest."""
    pairs = (word.split(":") for word in text.split())
    return [
        Node(CommitId(name), tuple(CommitId(p) for p in parents.split(",") if p))
        for name, parents in pairs
    ]


@pytest.mark.parametrize(
    ("history", "lines"),
    [
        ("a:", ["●"]),
        ("c:b b:a a:", ["●", "●", "●"]),
        ("c:a b:a a:", ["●", "│ ●", "●─╯"]),
        ("d:b c:a b:a a:", ["●", "│ ●", "● │", "●─╯"]),
        ("d:a c:a b:a a:", ["●", "│ ●", "│ │ ●", "●─┴─╯"]),
        ("d:b,c c:a b:a a:", ["●─╮", "│ ●", "● │", "●─╯"]),
        ("e:d,a d:c c:b b:a a:", ["●─╮", "● │", "● │", "● │", "●─╯"]),
        ("d:b c:a,b b: a:", ["●", "├─●", "● │", "  ●"]),
        ("f:c e:a d:b c:b,a b: a:", ["●", "│ ●", "│ │ ●", "●─┤ │", "●─┼─╯", "  ●"]),
        ("b: a:", ["●", "●"]),
        ("d:b c:a b: a:", ["●", "│ ●", "● │", "  ●"]),
    ],
)
def test_each_commit_is_one_line(history: str, lines: list[str]) -> None:
    assert draw(nodes(history)) == lines


def test_parents_that_are_not_shown_are_bridged_or_marked() -> None:
    parents = {
        CommitId(name): tuple(map(CommitId, above))
        for name, above in {"e": "d", "d": "c", "c": "b", "b": "a", "a": ""}.items()
    }
    bridged = shown([CommitId("e"), CommitId("b")], parents)
    assert bridged == [Node(CommitId("e"), (CommitId("b"),)), Node(CommitId("b"), (), cut=True)]
    assert draw(bridged) == ["●", "○"]


def test_a_long_line_that_is_not_shown_is_bridged_without_recursion() -> None:
    parents = {CommitId(str(i)): (CommitId(str(i - 1)),) for i in range(1, 5_000)}
    assert shown([CommitId("4999"), CommitId("0")], parents)[0].parents == (CommitId("0"),)


@given(st.lists(st.lists(st.integers(0, 30), max_size=3), max_size=25))
def test_any_history_is_drawn_with_one_node_a_line(choices: list[list[int]]) -> None:
    count = len(choices)
    history = []
    for i, picks in enumerate(choices):
        older = range(i + 1, count)
        parents = (
            dict.fromkeys(CommitId(str(older[pick % len(older)])) for pick in picks)
            if older
            else ()
        )
        history.append(Node(CommitId(str(i)), tuple(parents)))
    lines = draw(history)
    assert [line.count("●") for line in lines] == [1] * count
    if lines:
        assert not set(lines[-1]) & set("╮┤├"), "nothing leads on below the oldest"
