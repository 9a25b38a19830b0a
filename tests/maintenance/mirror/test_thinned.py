"""Thinned commits in mirrors: retention is separate for each store, and no store has two commits in
one place."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import document_key
from ckptstore.maintenance.retention import KeepLast
from tests.golden.reader import reader
from tests.maintenance.stores import flip
from tests.maintenance.test_thin import GLOB, make, state

POLICY = KeepLast(2).thin(GLOB)


def test_a_thinned_commit_is_a_thinned_commit_in_a_new_mirror_too(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.forget(POLICY)
        store.gc(grace_s=0)
        store.push(tmp_path / "b", create=True)
        ours = store.log()
    with ckptstore.open(tmp_path / "b") as mirror:
        theirs = mirror.log()
        assert [(i.id, i.step, i.thinned) for i in theirs] == [
            (i.id, i.step, i.thinned) for i in ours
        ]
        assert not mirror.fsck(read_data="100%").findings


def test_a_mirror_with_the_whole_commit_keeps_it(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.push(tmp_path / "b", create=True)
        store.forget(POLICY)
        store.gc(grace_s=0)
        done = store.push(tmp_path / "b")
        assert (done.sent, done.plan.present) == ((), 6)
        with ckptstore.open(tmp_path / "b") as mirror:
            assert [info.id for info in mirror.log()] == commits[::-1]
        pulled = store.pull(tmp_path / "b")
        assert (pulled.sent, pulled.plan.present) == ((), 6)


def test_a_whole_commit_takes_its_place_back_in_a_mirror(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.forget(POLICY)
        store.push(tmp_path / "b", create=True)
        store.undelete(commits[1])
        assert store.push(tmp_path / "b").sent == (commits[1],)
        assert store.push(tmp_path / "b").sent == ()
    with ckptstore.open(tmp_path / "b") as mirror:
        assert [info.step for info in mirror.log()] == [5, 4, 3, 2, 1, 0]
        assert mirror.checkout(1).id == commits[1]
        assert mirror.checkout(1).read("optimizer/state/step") == 1
        assert not mirror.fsck(read_data="100%").findings


def test_a_mirror_that_forgot_a_commit_is_not_sent_what_was_thinned_of_it(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.push(tmp_path / "b", create=True)
        with ckptstore.open(tmp_path / "b") as mirror:
            mirror.forget(commits[0])
        store.forget(POLICY)
        done = store.push(tmp_path / "b")
        assert done.sent == ()
        assert done.plan.forgotten == (store.checkout(0).id,)


def test_a_place_is_forgotten_while_the_whole_commit_waits_for_a_gc_whatever_is_sent(
    tmp_path: Path,
) -> None:
    """A fast tier purges the thinned commit that it gives away, and not what the thinning replaced:
    whoever sends the one or the other finds the place forgotten."""
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.push(tmp_path / "whole", create=True)
        store.forget(POLICY)
        ckptstore.clone(tmp_path / "a", tmp_path / "thinned").close()
    tier = ckptstore.Mirror(tmp_path / "b", keep_local=KeepLast(2))
    with ckptstore.open(tmp_path / "a", mirror=tier) as store:
        assert store.flush_mirror()
        assert [info.step for info in store.log()] == [5, 4]
        for other in ("whole", "thinned"):
            pulled = store.pull(tmp_path / other)
            assert pulled.sent == ()
            assert len(pulled.plan.forgotten) == 4, other
        store.undelete(commits[0])
        assert store.checkout(0).id == commits[0]


def test_a_store_thins_what_its_mirror_has(tmp_path: Path) -> None:
    mirror = ckptstore.Mirror(str(tmp_path / "b"), keep_local=POLICY)
    with ckptstore.open(tmp_path / "a", mirror=mirror) as store:
        for step in range(5):
            store.commit(state(step), step=step)
    with ckptstore.open(tmp_path / "a") as store:
        assert [bool(info.thinned) for info in store.log()] == [False, False, True, True, True]
    with ckptstore.open(tmp_path / "b") as there:
        assert [info.thinned for info in there.log()] == [()] * 5


def test_a_tag_of_a_thinned_commit_names_the_whole_one_that_the_mirror_has(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.push(tmp_path / "b", create=True)
        store.forget(POLICY)
        store.tag("release", 1)
        store.push(tmp_path / "b")
        assert store.push(tmp_path / "b").plan.empty
    with ckptstore.open(tmp_path / "b") as mirror:
        assert mirror.checkout("release").id == commits[1]
        mirror.tag("first", 1)
    with ckptstore.open(tmp_path / "a") as store:
        thinned = store.checkout("release").id
        store.pull(tmp_path / "b")
        assert store.checkout("first").id == thinned != commits[1]


def make_thinned_clone(path: Path) -> list[str]:
    """A store `whole`, its mirror `behind` that thinned it, and `clone`, a clone of that mirror;
    returns the commits of `whole`."""
    commits = make(path / "whole")
    with ckptstore.open(path / "whole") as store:
        store.push(path / "behind", create=True)
    with ckptstore.open(path / "behind") as mirror:
        mirror.forget(POLICY)
        mirror.gc(grace_s=0)
    ckptstore.clone(path / "behind", path / "clone").close()
    return commits


def test_whole_commits_take_the_places_of_thinned_ones_that_came_by_a_clone(
    tmp_path: Path,
) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "clone") as clone:
        pulled = clone.pull(tmp_path / "whole")
        assert (pulled.sent, pulled.plan.present) == (tuple(commits[:4]), 2)
        assert [info.id for info in clone.log()] == commits[::-1]
        target = state(9)
        assert clone.resume(target).step == 5
        assert clone.checkout("latest~4").id == commits[1]
        assert clone.checkout(1).read("optimizer/state/step") == 1
        assert clone.pull(tmp_path / "whole").plan.empty
        clone.gc(grace_s=0)
        assert not clone.fsck(read_data="100%").findings
        assert clone.pull(tmp_path / "whole").plan.empty
        assert clone.checkout("latest~4").id == commits[1]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: flip(path, 30)])
def test_a_document_that_cannot_be_read_makes_no_stranger_of_a_commit(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "clone") as clone:
        before = clone.log()
        thinned = next(info for info in before if info.step == 1)
        document = tmp_path / "clone" / document_key(thinned.session, thinned.id)
        kept = document.read_bytes()
        damage(document)
        pulled = clone.pull(tmp_path / "whole")
        assert pulled.sent == (commits[0], *commits[2:4])
        assert "cannot be read: run `ckptstore fsck` there" in pulled.problems[0]
        assert sorted(info.step or 0 for info in clone.log()) == [0, 1, 2, 3, 4, 5]
        assert clone.log()[0].step == 5
        document.unlink(missing_ok=True)
        document.write_bytes(kept)
        assert clone.pull(tmp_path / "whole").sent == (commits[1],)
        assert [info.id for info in clone.log()] == commits[::-1]


def test_a_thinned_commit_that_came_by_a_clone_is_not_sent_to_a_store_that_has_it_whole(
    tmp_path: Path,
) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "clone") as clone:
        clone.tag("kept", 1)
        pushed = clone.push(tmp_path / "whole")
        assert (pushed.sent, pushed.plan.present) == ((), 6)
    with ckptstore.open(tmp_path / "whole") as whole:
        assert [info.id for info in whole.log()] == commits[::-1]
        assert whole.checkout("kept").id == commits[1]


def test_the_history_of_a_clone_leads_through_thinned_commits(tmp_path: Path) -> None:
    make_thinned_clone(tmp_path)
    ckptstore.clone(tmp_path / "clone", tmp_path / "again").close()
    logs = []
    for name in ("behind", "clone", "again"):
        with ckptstore.open(tmp_path / name) as store:
            assert store.checkout("latest~5").step == 0
            assert not store.fsck(read_data="100%").findings
            logs.append([(info.id, info.parents) for info in store.log()])
    assert logs[1:] == logs[:1] * 2


def test_a_commit_that_was_thinned_twice_is_known_in_a_clone(tmp_path: Path) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "behind") as mirror:
        mirror.forget(KeepLast(2).thin("model/**"))
        mirror.gc(grace_s=0)
    ckptstore.clone(tmp_path / "behind", tmp_path / "twice").close()
    with ckptstore.open(tmp_path / "twice") as clone:
        once = clone.pull(tmp_path / "clone").sent
        assert len(once) == 4
        assert [info.step for info in clone.log()] == [5, 4, 3, 2, 1, 0]
        assert clone.pull(tmp_path / "whole").sent == tuple(commits[:4])
        assert [info.id for info in clone.log()] == commits[::-1]


def test_the_ancestors_of_a_commit_are_sent_beyond_a_thinned_one(tmp_path: Path) -> None:
    make_thinned_clone(tmp_path)
    for name in ("behind", "clone"):
        with ckptstore.open(tmp_path / name) as store:
            sent = store.push(tmp_path / f"from {name}", "latest", ancestors=True, create=True).sent
            assert len(sent) == 6


def test_a_whole_commit_stays_out_of_a_store_where_a_tag_pins_the_thinned_one(
    tmp_path: Path,
) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "clone") as clone:
        clone.tag("pinned", 1)
        pulled = clone.pull(tmp_path / "whole")
        assert pulled.sent == (commits[0], *commits[2:4])
        (problem,) = pulled.problems
        assert "has a tag" in problem and clone.checkout(1).id[:12] in problem
        assert [info.step for info in clone.log()] == [5, 4, 3, 2, 1, 0]


def test_a_store_keeps_what_its_mirror_could_not_take(tmp_path: Path) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "clone") as clone:
        clone.tag("pinned", 1)
    mirror = ckptstore.Mirror(str(tmp_path / "clone"), keep_local=KeepLast(2))
    with ckptstore.open(tmp_path / "whole", mirror=mirror) as store:
        assert store.flush_mirror()
    with ckptstore.open(tmp_path / "whole") as store:
        assert [info.id for info in store.log()] == [commits[5], commits[4], commits[1]]
    with ckptstore.open(tmp_path / "clone") as clone:
        assert [info.step for info in clone.log()] == [5, 4, 3, 2, 1, 0]


def test_a_store_with_thinned_commits_forgets_those_that_its_mirror_has_whole(
    tmp_path: Path,
) -> None:
    commits = make_thinned_clone(tmp_path)
    mirror = ckptstore.Mirror(str(tmp_path / "whole"), keep_local=KeepLast(2))
    with ckptstore.open(tmp_path / "clone", mirror=mirror) as store:
        assert store.flush_mirror()
    with ckptstore.open(tmp_path / "clone") as store:
        assert [info.id for info in store.log()] == [commits[5], commits[4]]
    with ckptstore.open(tmp_path / "whole") as whole:
        assert [info.id for info in whole.log()] == commits[::-1]


def test_a_commit_that_was_purged_and_pulled_again_can_be_thinned_again(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.push(tmp_path / "b", create=True)
        for round_ in range(1, 4):
            store.forget(POLICY)
            thinned = store.checkout(0).id
            store.tag("child", 1)
            store.forget(thinned)
            store.gc(grace_s=0)
            assert store.pull(tmp_path / "b", commits[0]).sent == (commits[0],)
            assert store.checkout("child~1").id == commits[0]
            for step in (10 * round_, 10 * round_ + 1):
                store.commit(state(step), step=step)
            assert store.forget(POLICY).thinned
            parent = store.checkout("child~1")
            assert (parent.step, parent.id != commits[0]) == (0, True)
            assert len(store.log()) == 6 + 2 * round_
            assert store.tags() == {"child": store.checkout(1).id}
            store.undelete(commits[0])
            assert store.checkout("child~1").id == commits[0]
        assert not store.fsck(read_data="100%").findings
        listed = {info.id for info in store.log()}
    foreign = reader.Store(tmp_path / "a").commits
    assert {commit for commit, entry in foreign.items() if not entry["forgotten"]} == listed


def leaves(place: Path, ref: str | int) -> set[str]:
    with ckptstore.open(place) as store:
        return {leaf.path for leaf in store.checkout(ref).leaves() if not leaf.gone}


def thin(place: Path, glob: str, keep: int = 2) -> None:
    """Thin all but the newest, and make that final."""
    with ckptstore.open(place) as store:
        store.forget(KeepLast(keep).thin(glob))
        store.gc(grace_s=0)


def make_two_that_lack_others(path: Path) -> None:
    """Stores `a` and `b` with the same commits, thinned by policies of their own."""
    make(path / "a")
    ckptstore.clone(path / "a", path / "b").close()
    thin(path / "a", "optimizer/state/**")
    thin(path / "b", "model/**")


@pytest.mark.parametrize("pull", [False, True])
def test_two_stores_that_thinned_otherwise_keep_what_each_has(tmp_path: Path, pull: bool) -> None:
    make_two_that_lack_others(tmp_path)
    before = [leaves(tmp_path / name, 1) for name in "ab"]
    assert before[0] - before[1] and before[1] - before[0]
    with ckptstore.open(tmp_path / ("b" if pull else "a")) as store:
        done = store.pull(tmp_path / "a") if pull else store.push(tmp_path / "b")
        assert done.sent == ()
        assert len(done.problems) == 4
        assert "each has leaves that the other lacks" in done.problems[0]
    for name in "ab":
        with ckptstore.open(tmp_path / name) as store:
            store.gc(grace_s=0)
            assert not store.fsck(read_data="100%").findings
    assert [leaves(tmp_path / name, 1) for name in "ab"] == before


def test_a_commit_that_was_made_whole_and_thinned_otherwise_takes_no_leaf_from_a_mirror(
    tmp_path: Path,
) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.forget(KeepLast(2).thin("model/**"))
        ckptstore.clone(tmp_path / "a", tmp_path / "b").close()
        store.undelete(commits[:4])
        store.forget(POLICY)
        assert store.push(tmp_path / "b").sent == ()
        store.gc(grace_s=0)
    with ckptstore.open(tmp_path / "b") as mirror:
        mirror.gc(grace_s=0)
        assert mirror.checkout(1).read("optimizer/state/step") == 1


def test_a_glob_that_covers_another_is_no_sign_of_more_leaves(tmp_path: Path) -> None:
    commits = make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        store.forget(KeepLast(2).thin("optimizer/state/exp_avg"))
        ckptstore.clone(tmp_path / "a", tmp_path / "b").close()
        store.undelete(commits[:4])
        store.forget(POLICY)
        assert store.push(tmp_path / "b").plan.present == 6
    ckptstore.clone(tmp_path / "a", tmp_path / "c").close()
    with ckptstore.open(tmp_path / "c") as clone:
        assert len(clone.pull(tmp_path / "b").sent) == 4
    for name in "bc":
        assert leaves(tmp_path / name, 1) >= {"optimizer/state/step", "optimizer/state/shape"}


def test_thinned_commits_that_are_the_newest_give_way_to_whole_ones(
    tmp_path: Path,
) -> None:
    commits = make_thinned_clone(tmp_path)
    with ckptstore.open(tmp_path / "few") as few:
        few.pull(tmp_path / "behind", 0, 1, 2)
        assert [bool(info.thinned) for info in few.log()] == [True] * 3
        pulled = few.pull(tmp_path / "whole", 0, 1, 2)
        assert pulled.sent == tuple(commits[:3])
        assert not pulled.problems
        assert [info.id for info in few.log()] == commits[2::-1]
        thinned = few.forget(KeepLast(1).thin(GLOB)).thinned
        assert [each.commit for each in thinned] == commits[:1]


def test_a_tier_keeps_what_its_mirror_thinned_otherwise(tmp_path: Path) -> None:
    make_two_that_lack_others(tmp_path)
    before = leaves(tmp_path / "a", 1)
    mirror = ckptstore.Mirror(str(tmp_path / "b"), keep_local=KeepLast(2))
    with ckptstore.open(tmp_path / "a", mirror=mirror) as store:
        assert store.flush_mirror()
    with ckptstore.open(tmp_path / "a") as store:
        assert [info.step for info in store.log()] == [5, 4, 3, 2, 1, 0]
    assert leaves(tmp_path / "a", 1) == before
