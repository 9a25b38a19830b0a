"""No interleaving of writers and gc loses a chunk, and removing any check does lose one."""

from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.log import admission
from ckptstore.log import state as fold
from ckptstore.log.entries import Entry, Undelete
from ckptstore.log.state import _with_soft
from tests.log.model.explore import explore
from tests.log.model.line import forks
from tests.log.model.world import THIN, Scope

NO_LIMIT = 10_000_000

HOLDING = [
    Scope(wants=("abc",)),
    Scope(wants=("a",), duplicate=True),
    Scope(wants=("a",), copies=2),
    Scope(wants=("bc", "c"), forgetting=False),
    Scope(wants=(), gcs=2, duplicate=True, undeleting=False),
    Scope(wants=("a",), tagging=True, undeleting=False),
    Scope(wants=("a",), reading=True),
    Scope(wants=(), duplicate=True, reading=True, tagging=True),
    Scope(wants=("bc",), lossy=True, undeleting=False),
    Scope(wants=("abc",), reindexing=True, undeleting=False),
    Scope(wants=("a",), sparing=True),
    Scope(wants=("a",), undeleting=False, compacting=True),
    Scope(wants=(), compacting=True),
    Scope(wants=(), gcs=2, undeleting=False, compacting=True),
    Scope(wants=(), gcs=2, duplicate=True, undeleting=False, sparing=True),
    Scope(wants=(), thinning=True),
    Scope(wants=(), thinning=True, tagging=True, undeleting=False),
    Scope(wants=(), thinning=True, sending=True, undeleting=False),
    Scope(wants=("b",), patching=True),
    Scope(wants=("c",), patching=True, undeleting=False),
    Scope(wants=("b",), patching=True, duplicate=True, undeleting=False),
    Scope(wants=("b",), patching=True, batching=True, undeleting=False),
    Scope(wants=(), mixed=True),
    Scope(wants=("b",), mixed=True, undeleting=False),
    Scope(wants=("c",), mixed=True, undeleting=False),
]
HOLDING_LONG = [
    Scope(),
    Scope(sparing=True),
    Scope(compacting=True, reading=True),
    Scope(wants=("a",), compacting=True),
    Scope(wants=("a",), gcs=2, undeleting=False, compacting=True),
    Scope(wants=("a", "b"), undeleting=False),
    Scope(copies=2),
    Scope(duplicate=True),
    Scope(wants=("a",), gcs=2, duplicate=True, undeleting=False),
    Scope(wants=(), gcs=2, duplicate=True),
    Scope(wants=(), gcs=2, duplicate=True, undeleting=False, tagging=True, reading=True),
    Scope(wants=("a",), tagging=True, reading=True, duplicate=True),
    Scope(wants=("a", "b"), lossy=True, undeleting=False),
    Scope(wants=("a", "bc"), reindexing=True, undeleting=False),
    Scope(wants=("abc",), tagging=True, reading=True, lossy=True, reindexing=True),
    Scope(wants=("b",), thinning=True),
    Scope(wants=(), thinning=True, tagging=True),
    Scope(wants=(), thinning=True, duplicate=True, sparing=True),
    Scope(wants=(), thinning=True, gcs=2, undeleting=False),
    Scope(wants=(), thinning=True, tagging=True, reading=True, copies=2),
    Scope(wants=(), thinning=True, sending=True),
    Scope(wants=(), thinning=True, sending=True, tagging=True),
    Scope(wants=("b",), thinning=True, sending=True, undeleting=False),
    Scope(wants=("c",), patching=True),
    Scope(wants=("b", "c"), patching=True, undeleting=False),
    Scope(wants=("c",), mixed=True),
    Scope(wants=("c", "b"), mixed=True, forgetting=False),
    Scope(wants=("c", "b"), mixed=True, undeleting=False),
    Scope(wants=("b",), patching=True, copies=2),
    Scope(wants=("c",), patching=True, duplicate=True, gcs=2, undeleting=False),
]


def allow(*_: object) -> None:
    return None


def allow_for(who: str) -> Callable[[Any], Callable[..., Any]]:
    """Take a check of sessions away for writers (`w`) or gc (`gc`) only."""
    return lambda original: (
        lambda state, session: None if session.startswith(who) else original(state, session)
    )


THINNING = Scope(wants=(), thinning=True, tagging=True)
SENDING = Scope(wants=(), thinning=True, sending=True, undeleting=False)
ONE_WRITER = Scope(wants=("a",))
GC_PAIR = Scope(wants=(), gcs=2, duplicate=True, undeleting=False)
BROKEN: dict[str, tuple[Scope, str, Callable[[Any], Callable[..., Any]]]] = {
    "gc condemns what is referred to since the mark": (ONE_WRITER, "_stamped", lambda _: allow),
    "a commit does not look whether its packs are listed": (
        ONE_WRITER,
        "_reused_gone",
        lambda _: allow,
    ),
    "gc deletes what is live again": (ONE_WRITER, "_still_live", lambda _: allow),
    "a session that is over commits": (ONE_WRITER, "_session_closed", allow_for("w")),
    "a compaction that is over registers": (
        Scope(wants=(), undeleting=False, compacting=True),
        "_session_closed",
        allow_for("cp"),
    ),
    "a retry lists its old session's pack": (ONE_WRITER, "_foreign", lambda _: allow),
    "gc purges what was undeleted": (ONE_WRITER, "_not_forgotten", lambda _: allow),
    "gc registers a copy although it was declared over": (
        Scope(wants=("a",), gcs=2, undeleting=False),
        "_session_closed",
        allow_for("gc"),
    ),
    "two gcs do not know of each other": (GC_PAIR, "_fenced", lambda _: allow),
    "a forget that was planned before a tag forgets the tagged commit": (
        Scope(wants=(), tagging=True),
        "_tagged",
        lambda _: allow,
    ),
    "a tag that was planned before a forget names a forgotten commit": (
        Scope(wants=(), tagging=True),
        "_forgotten",
        lambda _: allow,
    ),
    "a thinning replaces a commit that was tagged or forgotten meanwhile": (
        THINNING,
        "_irreplaceable",
        lambda _: allow,
    ),
    "an undelete takes its place from a tagged commit": (
        THINNING,
        "_places_taken",
        lambda _: allow,
    ),
    "a commit comes again beside what was thinned of it": (
        Scope(wants=(), thinning=True, sending=True),
        "_place_held",
        lambda _: allow,
    ),
    "a commit comes again although its session is over": (
        SENDING,
        "_session_closed",
        allow_for("sd"),
    ),
    "a thinning commits although its session is over": (
        THINNING,
        "_session_closed",
        allow_for(THIN),
    ),
}


@pytest.mark.parametrize("scope", HOLDING, ids=str)
def test_nothing_is_lost_in_any_interleaving(scope: Scope) -> None:
    result = explore(scope, NO_LIMIT)
    assert not result.lost, "\n".join(result.path)
    assert result.complete


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scope", HOLDING_LONG, ids=str)
def test_nothing_is_lost_in_any_interleaving_of_more_actors(scope: Scope) -> None:
    result = explore(scope, NO_LIMIT)
    print(f"{result.worlds:,} states{'' if result.complete else ', not all'}")
    assert not result.lost, "\n".join(result.path)


@pytest.mark.parametrize("broken", BROKEN)
def test_each_check_that_is_taken_away_loses_a_chunk(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, check, without = BROKEN[broken]
    monkeypatch.setattr(admission, check, without(getattr(admission, check)))
    result = explore(scope, NO_LIMIT)
    assert result.lost
    assert result.path


def keep_the_other(state: Any, body: Undelete, entry: Entry) -> Any:
    return _with_soft(state, body.commits, 0, 0)


def test_an_undelete_that_leaves_the_thinned_commit_in_its_place_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold, "_undeleted", keep_the_other)
    assert explore(Scope(wants=(), thinning=True), NO_LIMIT).lost


def mark_the_other(state: Any, commit: Any, *others: Any) -> Any:
    return state.replaced.update((other, commit) for other in others)


def test_a_commit_that_comes_again_and_does_not_get_its_place_back_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold, "_in_place", mark_the_other)
    assert explore(SENDING, NO_LIMIT).lost


RULES = {
    "an object is deleted before its entry": Scope(wants=("a",), object_first=True),
    "an undelete does not stamp its packs": Scope(wants=("a",), blind_undelete=True),
    "a reader does not look again": Scope(
        wants=(), duplicate=True, reading=True, stubborn_reader=True
    ),
    "a writer without an answer deletes its pack": Scope(
        wants=("a",), lossy=True, undeleting=False, hasty_writer=True
    ),
    "a commit does not refer to the bases of its patches": Scope(
        wants=("b",), patching=True, undeleting=False, shallow_writer=True
    ),
    "a mirror does not refer to the bases of patches that it has listed": Scope(
        wants=("c",), patching=True, batching=True, undeleting=False, forgetful_batch=True
    ),
    "gc does not mark the bases of patches": Scope(wants=(), patching=True, shallow_mark=True),
    "an undelete does not stamp the packs of bases": Scope(
        wants=(), patching=True, shallow_undelete=True
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_that_an_actor_breaks_loses_a_chunk(rule: str) -> None:
    assert explore(RULES[rule], NO_LIMIT).lost


def test_each_commit_follows_the_one_before_whoever_leads_and_whatever_was_answered() -> None:
    explored, found = forks()
    assert explored > 1000 and not found


def test_a_rank_that_leads_without_what_was_asked_for_forks() -> None:
    assert forks(forgetful=True)[1]
