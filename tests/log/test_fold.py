"""The demands of each kind of entry on the state, and its effects."""

from typing import Any

import pytest

from ckptstore.core.model import PackRecord
from ckptstore.log.admission import Code, best_commits, check
from ckptstore.log.entries import (
    Body,
    Commit,
    Condemn,
    Delete,
    Forget,
    Moved,
    Over,
    Reduced,
    Register,
    Settings,
    Tag,
    Undelete,
)
from ckptstore.log.resolve import newest_first, resolve
from ckptstore.log.state import State, apply, genesis, number
from tests.log.builders import (
    STORE,
    commit,
    commit_id,
    entry,
    folded,
    packs,
    reduced,
    session,
    step,
)


def just(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


THREE = (commit(1), commit(2), commit(3))
"""Entries 1 to 3: three commits of one run with the packs 1 to 3; commit 1 is the only one that may
be forgotten."""
FORGOTTEN = (*THREE, Forget((commit_id(1),), "old"))
UNDELETED = (*FORGOTTEN, Undelete((commit_id(1),), just(1)))
CONDEMNED = (*FORGOTTEN, Condemn(4, 0, just(1), ()))


def register(i: int = 9, **changes: Any) -> Register:
    fields: dict[str, Any] = {
        "session": session(i),
        "mark": 4,
        "fence": 0,
        "packs": packs(i),
        "condemn": just(1),
    }
    return Register(**{**fields, **changes})


def thin(i: int, of: int, **changes: Any) -> Reduced:
    """Commit `i`, which takes the place of commit `of`."""
    return reduced(i, replaces=commit_id(of), thinned=("optimizer/**",), step=of, **changes)


THINNED = (*THREE, thin(4, 1))
TWICE = (*THINNED, Forget((commit_id(4),), ""))


REFUSED: list[tuple[str, tuple[Body, ...], Body, Code]] = [
    ("a commit of a session declared over", (Over((session(1),)),), commit(1), Code.SESSION_OVER),
    (
        "a second commit of one session",
        (commit(1),),
        commit(1, commit=commit_id(2), packs=()),
        Code.SESSION_ENDED,
    ),
    (
        "a commit that reuses a pack that was never there",
        THREE,
        commit(4, reused=just(9)),
        Code.PACKS_GONE,
    ),
    (
        "a commit that reuses a deleted pack",
        (*CONDEMNED, Delete(just(1))),
        commit(4, reused=just(1, 2)),
        Code.PACKS_GONE,
    ),
    ("a commit with another session's pack", (), commit(1, packs=packs(2)), Code.PACKS_FOREIGN),
    (
        "a commit that names a pack twice",
        (),
        commit(1, packs=packs(1) + packs(1)),
        Code.PACKS_KNOWN,
    ),
    (
        "a commit that is there already",
        (commit(1),),
        commit(2, commit=commit_id(1)),
        Code.COMMIT_KNOWN,
    ),
    (
        "a tag on a commit that is not there",
        THREE,
        Tag("a", commit_id(9), just()),
        Code.NO_SUCH_COMMIT,
    ),
    ("a tag on a forgotten commit", FORGOTTEN, Tag("a", commit_id(1), just(1)), Code.FORGOTTEN),
    (
        "a tag that relies on a pack that is gone",
        THREE,
        Tag("a", commit_id(1), just(9)),
        Code.PACKS_GONE,
    ),
    ("removing a tag that is not there", THREE, Tag("a", None, just()), Code.NO_SUCH_TAG),
    ("forgetting what is not there", THREE, Forget((commit_id(9),), ""), Code.NO_SUCH_COMMIT),
    ("forgetting twice", FORGOTTEN, Forget((commit_id(1),), ""), Code.FORGOTTEN),
    (
        "forgetting a tagged commit",
        (*THREE, Tag("a", commit_id(1), just())),
        Forget((commit_id(1),), ""),
        Code.TAGGED,
    ),
    (
        "forgetting one of a run's newest two",
        THREE,
        Forget((commit_id(1), commit_id(2)), ""),
        Code.NEWEST,
    ),
    ("undeleting what is not there", THREE, Undelete((commit_id(9),), just()), Code.NO_SUCH_COMMIT),
    (
        "undeleting what is not forgotten",
        THREE,
        Undelete((commit_id(1),), just(1)),
        Code.NOT_FORGOTTEN,
    ),
    (
        "undeleting a commit whose pack is gone",
        (*CONDEMNED, Delete(just(1))),
        Undelete((commit_id(1),), just(1)),
        Code.PACKS_GONE,
    ),
    (
        "condemning what is referred to since the mark",
        THREE,
        Condemn(2, 0, just(3), ()),
        Code.PACKS_STAMPED,
    ),
    (
        "condemning what a commit reused since the mark",
        (*THREE, commit(4, reused=just(1))),
        Condemn(3, 0, just(1), ()),
        Code.PACKS_STAMPED,
    ),
    ("condemning what is not listed", THREE, Condemn(3, 0, just(9), ()), Code.PACKS_GONE),
    ("condemning twice", CONDEMNED, Condemn(5, 5, just(1), ()), Code.PACKS_CONDEMNED),
    (
        "condemning when another gc has since the mark",
        CONDEMNED,
        Condemn(4, 0, just(), ()),
        Code.FENCED,
    ),
    ("condemning after a mark in the future", THREE, Condemn(4, 0, just(), ()), Code.MARK_AHEAD),
    (
        "purging what is not forgotten",
        THREE,
        Condemn(3, 0, just(), (commit_id(1),)),
        Code.NOT_FORGOTTEN,
    ),
    (
        "purging what was forgotten after the mark",
        FORGOTTEN,
        Condemn(3, 0, just(), (commit_id(1),)),
        Code.NOT_FORGOTTEN,
    ),
    (
        "purging what was undeleted",
        (*FORGOTTEN, Undelete((commit_id(1),), just(1))),
        Condemn(4, 0, just(), (commit_id(1),)),
        Code.NOT_FORGOTTEN,
    ),
    (
        "purging what is not there",
        FORGOTTEN,
        Condemn(4, 0, just(), (commit_id(9),)),
        Code.NO_SUCH_COMMIT,
    ),
    (
        "a copy of a session declared over",
        (*FORGOTTEN, Over((session(9),))),
        register(),
        Code.SESSION_OVER,
    ),
    (
        "a second copy of one session",
        (*FORGOTTEN, register()),
        register(fence=5, condemn=just()),
        Code.SESSION_ENDED,
    ),
    ("a copy of another session", FORGOTTEN, register(packs=packs(8)), Code.PACKS_FOREIGN),
    ("a copy when another gc condemned since", CONDEMNED, register(), Code.FENCED),
    (
        "a copy whose source is referred to since the mark",
        FORGOTTEN,
        register(mark=0),
        Code.PACKS_STAMPED,
    ),
    ("a copy whose source is condemned", CONDEMNED, register(fence=5), Code.PACKS_CONDEMNED),
    ("deleting a live pack", THREE, Delete(just(1)), Code.PACKS_LIVE),
    (
        "deleting a pack that a commit made live again",
        (*CONDEMNED, commit(4, reused=just(1))),
        Delete(just(1)),
        Code.PACKS_LIVE,
    ),
    ("deleting twice", (*CONDEMNED, Delete(just(1))), Delete(just(1)), Code.PACKS_GONE),
    ("declaring over twice", (Over((session(1),)),), Over((session(1),)), Code.SESSION_OVER),
    ("declaring over what has ended", (commit(1),), Over((session(1),)), Code.SESSION_ENDED),
    (
        "thinning a tagged commit",
        (*THREE, Tag("t", commit_id(1), just(1))),
        thin(4, 1),
        Code.TAGGED,
    ),
    ("thinning one of the newest", THREE, thin(4, 2), Code.NEWEST),
    ("thinning what is forgotten", FORGOTTEN, thin(4, 1), Code.FORGOTTEN),
    ("thinning what is not there", THREE, thin(4, 9), Code.NO_SUCH_COMMIT),
    ("thinning twice", THINNED, thin(5, 1), Code.FORGOTTEN),
    (
        "taking a place back from a tagged commit",
        (*THINNED, Tag("t", commit_id(4), just(4))),
        Undelete((commit_id(1),), just(1)),
        Code.TAGGED,
    ),
    (
        "undeleting two commits of one place",
        TWICE,
        Undelete((commit_id(1), commit_id(4)), just(1)),
        Code.SAME_PLACE,
    ),
    ("anything after the log has moved", (commit(1), Moved("db", 2)), Settings(()), Code.MOVED),
]


@pytest.mark.parametrize(
    ("before", "body", "code"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_the_state_refuses(before: tuple[Body, ...], body: Body, code: Code) -> None:
    state = folded(*before)
    refusal = check(state, number(state, body))
    assert refusal is not None
    assert refusal.code is code
    assert refusal.why


def test_every_code_of_a_refusal_is_in_the_table_or_concerns_numbers_and_metrics() -> None:
    assert {case[3] for case in REFUSED} == set(Code) - {Code.PACKS_MISNUMBERED, Code.BEST}


def test_a_refusal_names_just_the_packs_and_commits_that_are_in_the_way() -> None:
    state = folded(*THREE)
    assert check(state, Condemn(2, 0, just(1, 2, 3), ())) == check(
        state, Condemn(2, 0, just(3), ())
    )
    refusal = check(state, Forget((commit_id(1), commit_id(3)), ""))
    assert refusal is not None
    assert refusal.commits == (commit_id(3),)


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


def test_wrongly_numbered_packs_are_refused() -> None:
    refusal = check(folded(commit(1)), commit(2))
    assert refusal is not None
    assert refusal.code is Code.PACKS_MISNUMBERED


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


def test_the_best_by_each_metric_of_the_settings_cannot_be_forgotten() -> None:
    values = ((0.5, 0.1), (0.2, 0.9), (0.2, 0.3), (float("nan"), 0.0), (0.7, 0.2), (0.8, 0.2))
    state = folded(
        *(
            commit(i, metrics=(("acc", acc), ("loss", loss)))
            for i, (loss, acc) in enumerate(values, 1)
        ),
        Settings((("best", ("loss", "acc:max", "speed")),)),
    )
    assert best_commits(state) == {commit_id(3), commit_id(2)}
    refusal = check(state, Forget(tuple(commit_id(i) for i in range(1, 5)), ""))
    assert refusal is not None
    assert (refusal.code, refusal.commits) == (Code.BEST, (commit_id(2), commit_id(3)))
    without = step(state, Settings((("best", None),)))
    assert check(without, Forget((commit_id(3),), "")) is None


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
