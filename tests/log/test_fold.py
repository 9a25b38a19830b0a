"""The effects of each kind of entry on the state."""

import pytest

from ckptstore.core.model import PackRecord
from ckptstore.log.admission import check
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Forget,
    Moved,
    Over,
    Settings,
    Tag,
    Undelete,
)
from ckptstore.log.resolve import newest_first, resolve
from ckptstore.log.state import State, apply, genesis, number
from tests.log.builders import (
    CONDEMNED,
    FORGOTTEN,
    STORE,
    THINNED,
    THREE,
    commit,
    commit_id,
    entry,
    folded,
    just,
    packs,
    register,
    session,
    step,
    thin,
)


def test_new_packs_are_numbered_on_from_the_highest_ever_used() -> None:
    state = folded(
        commit(1, packs=packs(1, 2)),
        commit(2),
        commit(3),
        Forget((commit_id(1),), ""),
        Condemn(4, 0, just(3), ()),
    )
    state = step(step(state, Delete(just(3))), commit(4, packs=packs(4, 2)))
    assert {n: p.id for n, p in state.packs.items() if n > 3} == {
        4: packs(3)[0].id,
        5: packs(4, 2)[0].id,
        6: packs(4, 2)[1].id,
    }


def test_a_commit_lists_its_packs_ends_its_session_and_moves_its_tags() -> None:
    state = folded(
        commit(1, tags=("best", "prod")),
        commit(2, tags=("best",), metrics=(("loss", 0.5),), reused=just(1)),
    )
    assert dict(state.tags) == {"best": commit_id(2), "prod": commit_id(1)}
    assert state.closed(session(1))
    assert not state.closed(session(3))
    assert state.packs[1]._asdict() == {
        "id": packs(1)[0].id,
        "bytes": 1000,
        "chunks": 10,
        "metadata": False,
        "live": True,
        "stamp": 2,
    }
    assert state.commits[commit_id(2)]._asdict() == {
        "n": 2,
        "place": 2,
        "session": session(2),
        "content": commit(2).content,
        "run": "main",
        "step": 2,
        "time_ns": 0,
        "parents": (),
        "metrics": (("loss", 0.5),),
        "thinned": (),
        "soft": 0,
        "forgotten_ns": 0,
    }


def test_a_commit_has_the_time_at_which_it_was_forgotten_until_it_is_undeleted() -> None:
    state = folded(*THREE)
    forgotten = apply(state, entry(state, Forget((commit_id(1),), "old"), time_ns=1_700_000_000))
    row = forgotten.commits[commit_id(1)]
    assert (row.soft, row.forgotten_ns) == (4, 1_700_000_000)
    again = step(forgotten, Undelete((commit_id(1),), just(1))).commits[commit_id(1)]
    assert (again.soft, again.forgotten_ns) == (0, 0)


@pytest.mark.parametrize(
    "reviving",
    [
        commit(4, reused=just(1)),
        Undelete((commit_id(1),), just(1)),
        Tag("a", commit_id(2), just(1)),
    ],
    ids=["commit", "undelete", "tag"],
)
def test_a_condemned_pack_is_live_again_once_an_entry_refers_to_it(reviving: Body) -> None:
    state = folded(*CONDEMNED)
    assert not state.packs[1].live
    state = step(state, reviving)
    assert (state.packs[1].live, state.packs[1].stamp) == (True, state.n)


def test_a_purged_commit_is_gone_and_a_deleted_pack_too() -> None:
    state = folded(*FORGOTTEN, Condemn(4, 0, just(1), (commit_id(1),)), Delete(just(1)))
    assert commit_id(1) not in state.commits
    assert 1 not in state.packs
    assert state.fence == 5
    assert state.closed(session(1))


def test_a_registered_copy_takes_the_place_of_its_source() -> None:
    state = folded(*FORGOTTEN, register())
    assert (state.packs[1].live, state.packs[4].live, state.packs[4].stamp, state.fence) == (
        False,
        True,
        5,
        5,
    )
    assert state.closed(session(9))


def test_the_newest_two_of_each_run_are_known_and_forgotten_ones_do_not_count() -> None:
    state = folded(*THREE, commit(4, run="other"), Forget((commit_id(1),), ""))
    assert dict(state.runs) == {"main": (commit_id(2), commit_id(3)), "other": (commit_id(4),)}
    assert step(state, Undelete((commit_id(1),), just(1))).runs == state.runs


def test_settings_replace_what_they_name_and_leave_the_rest() -> None:
    state = folded(Settings((("a", 1), ("b", "x"))), Settings((("a", ("y",)), ("b", None))))
    assert dict(state.settings) == {"a": ("y",)}


def test_a_log_that_was_opened_as_the_generation_it_moved_to_goes_on() -> None:
    state = genesis(STORE, 2)
    state = apply(state, entry(state, Moved("db", 2)))
    assert state.moved == (2, "db")
    assert check(state, number(state, commit(1))) is None


@pytest.mark.parametrize(
    "body",
    [
        commit(1, reused=just(99)),
        Condemn(0, 0, just(99), (commit_id(99),)),
        Delete(just(99)),
        Undelete((commit_id(99),), just(99)),
        Forget((commit_id(99),), ""),
        Tag("a", None, just(99)),
    ],
    ids=lambda body: type(body).__name__,
)
def test_apply_ignores_what_is_not_listed(body: Body) -> None:
    state = folded(*THREE)
    after = apply(state, entry(state, body))
    assert 99 not in after.packs
    assert commit_id(99) not in after.commits


def test_a_state_never_changes() -> None:
    states: list[tuple[State, State]] = []
    state = genesis(STORE, 1)
    for body in (*CONDEMNED, commit(4, reused=just(1)), Settings((("a", 1),)), Over((session(8),))):
        state = step(state, body)
        states.append((state, folded_again(len(states) + 1, state)))
    assert all(kept == again for kept, again in states)


def folded_again(n: int, state: State) -> State:
    bodies = (*CONDEMNED, commit(4, reused=just(1)), Settings((("a", 1),)), Over((session(8),)))
    again = folded(*bodies[:n])
    assert again == state
    return again


def test_a_commit_may_list_no_pack_at_all() -> None:
    state = folded(commit(1), commit(2, packs=(), reused=just(1)))
    assert len(state.packs) == 1
    assert isinstance(number(state, commit(3)), Commit)
    # a Commit
    assert number(state, commit(3)).packs == (PackRecord(packs(3)[0].id, 1000, 10, False, 2),)  # type: ignore[union-attr]


def held(state: State) -> list[int]:
    """The commits that are not forgotten, newest first, by their numbers."""
    found = newest_first(state, "main")
    return [int(each.id, 16) for each in found]


def test_a_thinned_commit_has_the_place_the_time_and_the_children_of_the_original() -> None:
    before = folded(commit(1), commit(2, parents=(commit_id(1),)), commit(3))
    state = apply(before, entry(before, number(before, thin(4, 1)), time_ns=77))
    row, old = state.commits[commit_id(4)], state.commits[commit_id(1)]
    assert held(state) == [3, 2, 4]
    assert (row.place, row.n, row.time_ns, row.thinned) == (1, 4, 0, ("optimizer/**",))
    assert (old.soft, old.forgotten_ns) == (4, 77)
    assert state.parents_of(commit_id(2)) == (commit_id(4),)
    assert state.newest("main", 1) == commit_id(4)
    assert resolve(state, "latest~0", None).id == commit_id(3)
    assert resolve(state, "2~1", None).id == commit_id(4)


def test_an_undelete_gives_the_original_its_place_back_and_forgets_the_thinned_commit() -> None:
    state = step(folded(*THINNED), Undelete((commit_id(1),), just(1)))
    assert held(state) == [3, 2, 1]
    assert state.commits[commit_id(4)].soft == 5
    state = step(state, Undelete((commit_id(4),), just(4)))
    assert held(state) == [3, 2, 4]
    assert state.in_place_of(commit_id(1)) == commit_id(4)


def test_a_commit_thinned_twice_is_one_place_whichever_of_the_three_is_there() -> None:
    state = step(folded(*THINNED), thin(5, 4))
    assert held(state) == [3, 2, 5]
    for wanted in (1, 4, 5, 4, 1):
        if held(state)[-1] != wanted:
            state = step(state, Undelete((commit_id(wanted),), just(wanted)))
        assert held(state) == [3, 2, wanted]
        assert {state.in_place_of(commit_id(i)) for i in (1, 4, 5)} == {commit_id(wanted)}


def test_the_place_outlives_the_purge_of_the_original() -> None:
    state = step(
        folded(commit(1), commit(2, parents=(commit_id(1),)), commit(3), thin(4, 1)),
        Condemn(4, 0, just(1), (commit_id(1),)),
    )
    assert held(state) == [3, 2, 4]
    assert state.parents_of(commit_id(2)) == (commit_id(4),)


def test_a_reduced_commit_that_replaces_nothing_known_is_a_commit_of_its_own_age() -> None:
    state = folded(*THREE)
    state = apply(state, entry(state, number(state, thin(4, 9))))
    assert held(state) == [4, 3, 2, 1]


def forged(*bodies: Body) -> State:
    """The state after entries that no writer would append."""
    state = genesis(STORE, 1)
    for body in bodies:
        state = apply(state, entry(state, number(state, body)))
    return state


@pytest.mark.parametrize(
    "bodies",
    [
        (commit(1), thin(1, 1)),
        (commit(1), thin(2, 1), thin(1, 2)),
        (commit(1), thin(2, 1), thin(1, 2), Undelete((commit_id(1),), frozenset())),
        (commit(1), thin(2, 1), thin(3, 2), thin(1, 3)),
    ],
)
@pytest.mark.timeout(20)
def test_a_commit_that_a_forged_log_replaces_by_itself_is_resolved_all_the_same(
    bodies: tuple[Body, ...],
) -> None:
    state = forged(*bodies)
    assert all(state.in_place_of(commit) in state.commits for commit in state.commits)


@pytest.mark.parametrize("run", ["main", "other"])
def test_a_commit_that_a_forged_log_purges_too_early_is_only_gone(run: str) -> None:
    purge = Condemn(1, 0, frozenset(), (commit_id(1),))
    state = forged(commit(1), commit(1, run=run), purge, commit(2))
    assert state.runs["main"] == (commit_id(2),)
