"""What the state refuses: one example for each demand on an entry."""

import re

import pytest

from ckptstore.log.admission import Code, check, newest_spared, one_left
from ckptstore.log.entries import (
    Body,
    Condemn,
    Delete,
    Forget,
    Moved,
    Over,
    Settings,
    Tag,
    Undelete,
)
from ckptstore.log.state import number
from tests.log.builders import (
    CONDEMNED,
    FORGOTTEN,
    THINNED,
    THREE,
    commit,
    commit_id,
    folded,
    just,
    packs,
    register,
    session,
    step,
    thin,
)

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
    assert {case[3] for case in REFUSED} == set(Code) - {
        Code.PACKS_MISNUMBERED,
        Code.LAST,
        Code.TAG_TAKEN,
    }


def test_a_refusal_names_just_the_packs_and_commits_that_are_in_the_way() -> None:
    state = folded(*THREE)
    assert check(state, Condemn(2, 0, just(1, 2, 3), ())) == check(
        state, Condemn(2, 0, just(3), ())
    )
    tagged = step(state, Tag("a", commit_id(3), just()))
    refusal = check(tagged, Forget((commit_id(1), commit_id(3)), ""))
    assert refusal is not None
    assert refusal.commits == (commit_id(3),)


def test_wrongly_numbered_packs_are_refused() -> None:
    refusal = check(folded(commit(1)), commit(2))
    assert refusal is not None
    assert refusal.code is Code.PACKS_MISNUMBERED


def test_policies_spare_the_newest_of_a_run_and_names_leave_one() -> None:
    state = folded(*THREE)
    ids = tuple(map(commit_id, (1, 2, 3)))
    refusal = newest_spared(ids)(state)
    assert refusal is not None
    assert (refusal.code, refusal.commits) == (Code.NEWEST, ids[1:])
    assert newest_spared(ids[:1])(state) is None
    assert one_left(ids[1:])(state) is None
    refusal = one_left(ids)(state)
    assert refusal is not None
    assert (refusal.code, refusal.commits) == (Code.LAST, ids)


def test_the_older_ones_are_the_newest_when_the_newest_are_forgotten() -> None:
    state = step(folded(*THREE, commit(4)), Forget((commit_id(4), commit_id(3)), ""))
    assert list(state.runs.values()) == [(commit_id(1), commit_id(2))]
    state = step(state, Undelete((commit_id(4),), just(4)))
    assert list(state.runs.values()) == [(commit_id(2), commit_id(4))]
    left = tuple(commit for commit, row in state.commits.items() if not row.soft)
    assert list(step(state, Forget(left, "")).runs.values()) == [()]


def test_a_refusal_names_every_commit_with_step_run_and_tags() -> None:
    state = folded(*THREE, Tag("a", commit_id(1), just()), Tag("b", commit_id(3), just()))
    refusal = check(state, Forget(tuple(map(commit_id, (1, 2, 3))), ""))
    assert refusal is not None
    for i, tag in ((1, "a"), (3, "b")):
        assert re.search(rf"{commit_id(i)[:12]} \([^)]*run \w+, tag {tag}\)", refusal.why)
    assert "`ckptstore tag -d a b`" in refusal.why
