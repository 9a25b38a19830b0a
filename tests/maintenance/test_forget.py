"""Forget and undelete: what is removed, what is pinned, what is restored."""

from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import Conflict, InvalidInput, NotFound, ReadOnly
from ckptstore.log.entries import Body, Entry, Undelete
from ckptstore.log.log import Log
from ckptstore.maintenance.retention import KeepBest, KeepEverySteps, KeepLast
from ckptstore.open_store import open
from tests.maintenance import collecting
from tests.maintenance.collecting import state_of


def test_forgotten_commits_leave_the_log_and_come_back_whole(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 5)
    with open(tmp_path) as store:
        plan = store.forget(KeepLast(2))
        assert [decision.commit for decision in plan.forgotten] == commits[2::-1]
        assert [info.step for info in store.log()] == [4, 3]
        store.undelete([commits[0], commits[2][:12]])
        assert [info.step for info in store.log()] == [4, 3, 2, 0]
    collecting.verify(tmp_path, [0, 2, 3, 4])


def test_a_dry_run_returns_the_plan_that_is_executed_and_changes_nothing(tmp_path: Path) -> None:
    collecting.make(tmp_path, 6)
    with open(tmp_path) as store:
        planned = store.forget([KeepEverySteps(2), KeepLast(1)], dry_run=True)
        assert len(store.log()) == 6
        done = store.forget([KeepEverySteps(2), KeepLast(1)])
        assert done == planned
        assert {info.id for info in store.log()} == {decision.commit for decision in planned.kept}


def test_a_dry_run_plans_for_a_store_that_may_not_be_written(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 4)
    with open(tmp_path, read_only=True) as store:
        plan = store.forget(KeepLast(2), dry_run=True)
        assert [decision.commit for decision in plan.forgotten] == commits[1::-1]
        with pytest.raises(ReadOnly):
            store.forget(KeepLast(2))


def test_a_policy_is_about_the_stores_own_run_unless_all_are_wanted(tmp_path: Path) -> None:
    for run in "ab":
        with open(tmp_path, run=run) as store:
            for step in range(4):
                store.commit(state_of(step), step=step)
    with open(tmp_path, run="a") as store:
        store.forget(KeepLast(2))
        assert [len(store.log(run=run)) for run in "ab"] == [2, 4]
        store.forget(KeepLast(2), all_runs=True)
        assert [len(store.log(run=run)) for run in "ab"] == [2, 2]


def test_what_is_pinned_cannot_be_forgotten_by_name(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 5)
    with open(tmp_path) as store:
        store.tag("keep", commits[0])
        with pytest.raises(Conflict, match=r"step 0 of run main, tag keep.*nothing was forgotten"):
            store.forget(commits[0])
        with pytest.raises(Conflict, match="`ckptstore tag -d keep`"):
            store.forget([commits[1], commits[0]], dry_run=True)
        with pytest.raises(Conflict, match="tag keep"):
            store.forget(run="main", all_commits=True)
        assert len(store.log()) == 5
        store.forget(commits[1])
        store.untag("keep")
        store.forget(commits[0])
        assert [info.step for info in store.log()] == [4, 3, 2]


def test_the_newest_commits_are_forgotten_by_name_as_long_as_one_is_left(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 4)
    with open(tmp_path) as store:
        store.forget(["latest", 2])
        assert [info.step for info in store.log()] == [1, 0]
        with pytest.raises(
            Conflict, match=r"step 0 of run main\), .*--run main --all.*nothing was"
        ):
            store.forget([0, 1])
        assert store.forget(KeepLast(1)).forgotten == ()
        assert store.undelete(commits[3]) == (commits[3],)
        store.forget([0, 1])
        store.forget(3, all_commits=True)
        assert store.log() == []
        assert store.resume({"model": {}}) is None


def test_a_whole_run_is_forgotten_and_comes_back_until_a_gc_has_purged_it(tmp_path: Path) -> None:
    for run in ("keep", "abandoned"):
        with open(tmp_path, run=run) as store:
            for step in range(3):
                store.commit(state_of(step), step=step)
    with open(tmp_path, run="keep") as store:
        plan = store.forget(run="abandoned", all_commits=True, dry_run=True)
        assert {each.row.run for each in plan.forgotten} == {"abandoned"}
        assert store.forget(run="abandoned", all_commits=True) == plan
        assert store.runs() == ["keep"]
        with pytest.raises(NotFound, match="undelete --run abandoned --all"):
            store.forget(run="abandoned", all_commits=True)
        store.undelete([info.id for info in store.forgotten(all_runs=True)])
        assert store.checkout("abandoned@latest").step == 2
        store.forget(run="abandoned", all_commits=True)
        store.gc(grace_s=0)
        assert store.forgotten(all_runs=True) == []
        with pytest.raises(NotFound, match=r"no run 'abandoned'.*runs with commits: keep"):
            store.forget(run="abandoned", all_commits=True)


@pytest.mark.parametrize(
    "options",
    [
        {"all_commits": True},
        {"what": KeepLast(1), "run": "main", "all_commits": True},
        {"run": "main", "all_runs": True, "all_commits": True},
    ],
)
def test_all_commits_needs_the_name_of_a_run_and_no_policy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    collecting.make(tmp_path, 3)
    with open(tmp_path) as store:
        with pytest.raises(InvalidInput, match="name it by --run"):
            store.forget(**options)
        assert len(store.log()) == 3


def test_forgetting_without_anything_to_go_by_is_refused(tmp_path: Path) -> None:
    collecting.make(tmp_path, 1)
    with open(tmp_path) as store:
        with pytest.raises(InvalidInput, match="no policy"):
            store.forget([])
        with pytest.raises(InvalidInput, match="one or the other"):
            store.forget([KeepLast(1), 0])


def test_a_metric_that_no_commit_has_is_refused_with_similar_names(tmp_path: Path) -> None:
    with open(tmp_path, run="other") as store:
        store.commit(state_of(9), step=9, metrics={"accuracy": 0.5})
    with open(tmp_path) as store:
        for step in range(6):
            store.commit(state_of(step), step=step, metrics={"val_loss": 1.0 / (step + 1)})
        for dry_run in (True, False):
            with pytest.raises(InvalidInput, match=r"'val_los'.*did you mean 'val_loss'"):
                store.forget([KeepLast(2), KeepBest("val_los", n=3)], dry_run=dry_run)
        with pytest.raises(InvalidInput, match=r"'x'; there are accuracy, val_loss; nothing was"):
            store.forget(KeepBest("x"))
        assert len(store.log()) == 7
        assert not store.forget([KeepLast(6), KeepBest("val_los")]).forgotten


def test_a_policy_that_keeps_fewer_than_it_says_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open(tmp_path) as store:
        for step in range(5):
            store.commit(state_of(step), step=step, metrics={"loss": 1.0} if not step else {})
        store.forget(KeepBest("loss", n=3), dry_run=True)
        assert not caplog.messages
        assert len(store.forget(KeepBest("loss", n=3)).forgotten) == 2
    assert "keeps 1 commit of run 'main'" in caplog.text


def test_a_tag_that_appears_while_forget_looks_is_respected(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 5)

    class Tagging(KeepLast):
        """A policy during whose work somebody tags a commit."""

        def keeps(self, newest_first):  # type: ignore[no-untyped-def]
            with open(tmp_path) as other:
                if "late" not in other.tags():
                    other.tag("late", commits[1])
            return super().keeps(newest_first)

    with open(tmp_path) as store:
        plan = store.forget(Tagging(2))
        assert [decision.commit for decision in plan.forgotten] == [commits[2], commits[0]]
        assert {info.step for info in store.log()} == {1, 3, 4}


def test_undelete_names_what_is_not_forgotten_and_what_is_purged(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 4, forget=[0])
    with open(tmp_path) as store:
        with pytest.raises(Conflict, match="not forgotten"):
            store.undelete(commits[1])
        store.gc(grace_s=0)
        with pytest.raises(NotFound):
            store.undelete(commits[0])


def test_forgotten_commits_are_listed_by_run_until_they_are_purged(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 5)
    with open(tmp_path, run="other") as store:
        other = [store.commit(state_of(step), step=step).id for step in range(3)]
        store.forget(KeepLast(2), all_runs=True)
        assert [info.id for info in store.forgotten()] == [other[0]]
        assert [info.id for info in store.forgotten(all_runs=True)] == [other[0], *commits[2::-1]]
        store.gc(grace_s=0)
        assert store.forgotten(all_runs=True) == []


def test_an_undelete_that_a_gc_overtakes_finds_the_commit_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = collecting.make(tmp_path, 3)
    append = Log.append

    def overtaken(log: Log, body: Body, **options: Any) -> Entry:
        if isinstance(body, Undelete):
            with open(tmp_path) as other:
                other.gc(grace_s=0)
        return append(log, body, **options)

    with open(tmp_path) as store:
        store.forget(commits[0])
        monkeypatch.setattr(Log, "append", overtaken)
        with pytest.raises(NotFound, match=f"no commit {commits[0][:12]}"):
            store.undelete(commits[0])
    collecting.verify(tmp_path, [1, 2])


def test_undelete_takes_any_ref_of_a_forgotten_commit_and_returns_what_it_restored(
    tmp_path: Path,
) -> None:
    with open(tmp_path) as store:
        ids = {
            step: store.commit(state_of(step), step=step, metrics={"loss": float(step)}).id
            for step in (1, 2, 3, 4, 5)
        }
        again = store.commit(state_of(1), step=1).id
        store.forget([ids[step] for step in (1, 2, 3, 4)])
        assert store.undelete("best:loss") == (ids[1],)
        assert store.undelete("latest") == (ids[4],)
        assert store.undelete([2, f"main@{3}", ids[2][:12]]) == (ids[2], ids[3])
        assert [info.id for info in store.log()] == [again, *(ids[n] for n in (5, 4, 3, 2, 1))]
        with pytest.raises(Conflict, match="not forgotten"):
            store.undelete(5)
        with pytest.raises(NotFound, match=r"no commit is forgotten.*`ckptstore log` lists"):
            store.undelete(77)
        store.forget(2)
        with pytest.raises(NotFound, match=r"step 77.*nearest steps are 2;.*log --forgotten"):
            store.undelete(77)
        assert store.undelete([]) == ()


def test_undelete_makes_condemned_packs_live_again(tmp_path: Path) -> None:
    commits = collecting.make(tmp_path, 4)
    with open(tmp_path) as store:
        store.forget([commits[0]])
        state = store._handle.log.replay()
        own = frozenset(
            n for n, pack in state.packs.items() if pack.stamp == state.commits[commits[0]].n
        )
        store.forget(KeepLast(2))
        store.undelete([commits[0], commits[1]])
        store.gc(max_unused=0.0, grace_s=0)
        assert own <= set(store._handle.log.replay().packs)
    collecting.verify(tmp_path, [0, 1, 2, 3])
