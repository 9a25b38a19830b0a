"""Thinned commits in mirrors: retention is separate for each store, and no store has two commits in
one place."""

from pathlib import Path

import ckptstore
from ckptstore.maintenance.retention import KeepLast
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
