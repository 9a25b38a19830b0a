"""What the log admits is folded, by the state and by the catalog, and both say the same."""

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from ckptstore.index.catalog import Catalog
from ckptstore.index.queries import Queries
from ckptstore.log.entries import Commit
from ckptstore.maintenance.check import indexes
from ckptstore.maintenance.check.offline_store import unkept_of
from tests.index.building import STORE
from tests.index.histories import History, differences

HISTORIES = 60
LENGTH = 200


@pytest.mark.parametrize("histories", [HISTORIES, pytest.param(5_000, marks=pytest.mark.soak)])
def test_every_history_that_is_admitted_is_folded_and_says_what_the_state_says(
    seed: int, histories: int
) -> None:
    counts: dict[str, int] = {}
    for n in range(histories):
        history, random = History(seed + n, LENGTH, admitted=True), Random(seed + n)
        with closing(Catalog.temporary(STORE)) as catalog:
            while (at := catalog.position().n) < len(history.entries):
                part = history.entries[at : at + random.randrange(1, 30)]
                assert catalog.fold(part), f"{part[0].n} to {part[-1].n} of history {seed + n}"
            assert not list(differences(catalog.queries(), history.state))
            assert not list(found_by_fsck(catalog, history))
            with closing(Catalog.temporary(STORE)) as filled:
                assert filled.fill(history.state, history.entries)
                assert answers(filled.queries()) == answers(catalog.queries())
        for name, count in history.counts.items():
            counts[name] = counts.get(name, 0) + count
    print(counts)
    assert min(counts.values()) > histories
    assert len(counts) == 8


def found_by_fsck(catalog: Catalog, history: History) -> Iterator[str]:
    unkept = {
        entry.n: unkept_of(entry.body, entry.body.schemas)
        for entry in history.entries
        if isinstance(entry.body, Commit)
    }
    return indexes.differences(catalog.queries(), history.state, unkept)


def answers(queries: Queries) -> tuple[object, ...]:
    return (
        *(queries.position(), queries.log(forgotten=True), queries.tags(), queries.runs()),
        *(queries.packs(), queries.totals(), sorted(queries.missing_schemas())),
    )


def test_a_commit_that_is_not_forgotten_has_its_place_in_every_history(seed: int) -> None:
    for n in range(2 * HISTORIES):
        state = History(seed + n, LENGTH, admitted=True).state
        live = [commit for commit, row in state.commits.items() if not row.soft]
        assert all(state.in_place_of(commit) == commit for commit in live)
        places = [state.commits[commit].place for commit in live]
        assert len(places) == len(set(places))


def test_a_history_that_nobody_may_append_is_answered_from_its_state(seed: int) -> None:
    unfoldable = 0
    for n in range(HISTORIES):
        history = History(seed + n, LENGTH, admitted=False)
        with closing(Catalog.temporary(STORE)) as catalog:
            assert catalog.fill(history.state, history.entries)
            assert not list(differences(catalog.queries(), history.state))
            assert not list(found_by_fsck(catalog, history))
        with closing(Catalog.temporary(STORE)) as catalog:
            unfoldable += not catalog.fold(history.entries)
    assert unfoldable
