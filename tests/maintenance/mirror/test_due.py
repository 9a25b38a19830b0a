"""Which commits of a run go to the mirror, if not all do."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import InvalidInput
from ckptstore.plugins.tiers import tiers
from ckptstore.plugins.tiers.tiers import due_commits, is_covered


@dataclass(frozen=True)
class Row:
    run: str
    age: int
    time_ns: int
    step: int
    soft: int = 0


@dataclass
class Log:
    """As much of a log's state as is asked for here."""

    commits: dict[CommitId, Row] = field(default_factory=dict)
    tags: dict[str, CommitId] = field(default_factory=dict)
    replaced: dict[CommitId, CommitId] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, list[CommitId]]:
        found: dict[str, list[CommitId]] = {}
        for commit, row in self.commits.items():
            if not row.soft:
                found.setdefault(row.run, []).append(commit)
        return found


@given(
    runs=st.lists(st.sampled_from("ab"), max_size=24),
    looks=st.sets(st.integers(0, 24)),
    tagged=st.sets(st.integers(0, 23)),
    every=st.integers(2, 5),
    newest=st.booleans(),
    is_odd=st.booleans(),
    drawn=st.data(),
)
def test_every_run_is_sent_every_so_often_whoever_looks_when(
    runs: list[str],
    looks: set[int],
    tagged: set[int],
    every: int,
    newest: bool,
    is_odd: bool,
    drawn: st.DataObject,
) -> None:
    """Uploads happen at `looks`, of what is due then, and afterwards some commits are trimmed here.
    After each look, the mirror has a commit of the newest window of steps. Either the training goes
    back, or the clock `is_odd`."""
    here, there, step = Log(), Log(), 0
    for n, run in enumerate(runs):
        commit = CommitId(f"{n:064}")
        step = drawn.draw(st.integers(step if is_odd else max(0, step - 2), step + 3))
        time_ns = drawn.draw(st.integers(0, 24)) if is_odd else n
        here.commits[commit] = Row(run, n, time_ns, step)
        if n in tagged:
            here.tags[str(n)] = commit
        if n not in looks and n < len(runs) - 1:
            continue
        due = due_commits(here, there, every, newest=newest)  # type: ignore[arg-type]
        there.commits |= {each: here.commits[each] for each in sorted(due)}
        for heads in here.runs.values():
            head = here.commits[heads[-1]]
            sent = [row for row in there.commits.values() if row.run == head.run]
            last = max(sent, key=lambda row: row.age)
            assert last.step // every == head.step // every
            assert not newest or heads[-1] in there.commits
            covered = is_covered(heads[-1], here, there)  # type: ignore[arg-type]
            assert covered == (heads[-1] in there.commits)
        assert set(here.tags.values()) <= there.commits.keys()
        assert due == due_commits(here, there, every, newest=newest)  # type: ignore[arg-type]
        kept = drawn.draw(st.integers(1, 4))
        for heads in here.runs.values():
            for each in heads[:-kept]:
                if each not in here.tags.values():
                    del here.commits[each]


def test_a_host_whose_clock_is_behind_sends_what_it_trains_on_from_the_mirror() -> None:
    """The one before it had another log, which is lost."""
    there = Log({CommitId("a"): Row("a", 1, 3600, 10)})
    here = Log({CommitId(f"{n:064}"): Row("a", n, n, step) for n, step in enumerate((12, 19, 20))})
    due = due_commits(here, there, 10)  # type: ignore[arg-type]
    assert [here.commits[commit].step for commit in due] == [20]


STEPS = (3, 4, 9, 10, 19, 25, 9, 8, 11, 19)
"""From 25 the training went back."""


def test_windows_of_steps() -> None:
    here = Log({CommitId(f"{n:064}"): Row("a", n, n, step) for n, step in enumerate(STEPS)})
    due = due_commits(here, Log(), 10)  # type: ignore[arg-type]
    assert [row.step for commit, row in here.commits.items() if commit in due] == [3, 10, 25, 9, 11]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_what_is_no_number_of_commits_is_refused(every: int) -> None:
    with pytest.raises(InvalidInput, match="1 or more"):
        ckptstore.Mirror("there", every_steps=every)


def test_memory_holds_few_commits_while_the_mirror_takes_every_fourth(tmp_path: Path) -> None:
    keep = ckptstore.KeepLast(2)
    mirror = ckptstore.Mirror(tmp_path / "there", keep_local=keep, every_steps=4)
    with ckptstore.open(tmp_path / "here", mirror=mirror) as store:
        for step in range(1, 12):
            store.commit({"x": list(range(step))}, step=step)
            until = time.monotonic() + 60
            while len(here := store.log()) > 3:
                assert time.monotonic() < until
                time.sleep(0.01)
            assert here[0].step == step
    with ckptstore.open(tmp_path / "there") as there:
        assert [info.step for info in there.log()] == [11, 8, 4, 1]


def test_what_is_committed_while_a_look_is_acted_on_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another trainer commits steps 4 to 7 when it is known what is due, and not yet what goes."""
    trained, look = list[bool](), tiers.due_commits

    def looked(*args: object, **options: bool) -> frozenset[CommitId]:
        due = look(*args, **options)  # type: ignore[arg-type]
        if trained == [False]:
            trained[:] = [True]
            with ckptstore.open(tmp_path / "here") as other:
                for step in range(4, 8):
                    other.commit({"x": list(range(step))}, step=step)
        return due

    monkeypatch.setattr(tiers, "due_commits", looked)
    keep = ckptstore.KeepLast(1)
    mirror = ckptstore.Mirror(tmp_path / "there", keep_local=keep, every_steps=4)
    with ckptstore.open(tmp_path / "here", mirror=mirror) as store:
        store.commit({"x": [1]}, step=1)
        assert store.flush_mirror()
        trained.append(False)
        store.commit({"x": [1, 2]}, step=2)
    assert trained == [True]
    ckptstore.open(tmp_path / "here", mirror=mirror).close()
    with ckptstore.open(tmp_path / "there") as there:
        assert {info.step for info in there.log()} >= {1, 4, 7}
