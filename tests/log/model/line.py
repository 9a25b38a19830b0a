"""Does each commit of a training follow the newest one before it that the log has, although answers
were lost? All interleavings are explored.

The ranks that train have one memory: what was acknowledged last, and the sessions for which the log
was asked since. Whoever of them leads may be another one for each commit.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ckptstore.core.ids import CommitId, SessionId
from ckptstore.log.admission import check, not_made
from ckptstore.log.entries import Commit, Entry, Settings
from ckptstore.log.state import State, apply, genesis
from tests.log.model.world import STORE, commit_body

COMMITS = 4
OTHERS = 2
"""Entries of other authors."""


class Training(NamedTuple):
    """`late` are entries on their way, each with its number."""

    state: State
    tip: CommitId | None = None
    asked: tuple[SessionId, ...] = ()
    late: tuple[tuple[int, Commit], ...] = ()
    commits: int = 0
    others: int = 0


def _append(training: Training, body: Commit | Settings) -> Training:
    state = training.state
    after = apply(state, Entry(state.n + 1, "", 0, STORE, 1, "", 0, body, "", 0))
    late = tuple(each for each in training.late if each[0] > after.n)
    return training._replace(state=after, late=late)


def _moves(training: Training, *, forgetful: bool) -> Iterator[Training]:
    state = training.state
    for n, late in training.late:
        if n == state.n + 1:
            yield _append(training, late)
    if training.others < OTHERS:
        yield _append(training, Settings(()))._replace(others=training.others + 1)
    if training.commits == COMMITS:
        return
    refused = not_made(training.asked[::-1], None)(state)
    parents = refused.commits if refused else (training.tip,) if training.tip else ()
    body = replace(commit_body(f"c{training.commits}", "", (), frozenset()), parents=parents)
    assert check(state, body) is None
    begun = training._replace(commits=training.commits + 1)
    yield _append(begun, body)._replace(tip=body.commit, asked=())
    unsure = begun._replace(asked=() if forgetful else (*training.asked, body.session))
    yield _append(unsure, body)
    yield unsure._replace(late=(*training.late, (state.n + 1, body)))


def _is_line(state: State) -> bool:
    rows = sorted(state.commits.items(), key=lambda item: item[1].n)
    wanted = [(), *((commit,) for commit, _ in rows)]
    return all(row.parents == parents for (_, row), parents in zip(rows, wanted, strict=False))


def forks(*, forgetful: bool = False) -> tuple[int, list[State]]:
    """How many trainings were explored, and the states that are no line. A `forgetful` rank leads
    next without what another one asked for."""
    left, explored, found = [Training(genesis(STORE, 1))], 0, list[State]()
    while left:
        training = left.pop()
        explored += 1
        if not _is_line(training.state):
            found.append(training.state)
        else:
            left += _moves(training, forgetful=forgetful)
    return explored, found
