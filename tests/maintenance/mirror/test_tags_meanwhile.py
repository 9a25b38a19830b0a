"""Tags that a push was not asked to send, that somebody sets in the target while it is on its way,
and commits that go there."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import Conflict, NotFound
from ckptstore.maintenance.forget import rename_tag
from ckptstore.restore.reader import Reader
from tests.maintenance.stores import CHUNK_BYTES, make_store

CUTS = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)


def at_the_start(action: Callable[[], object]) -> Callable[[str, int, int], None]:
    """A progress report that acts once the push has planned."""

    def report(phase: str, done: int, total: int) -> None:
        if not done:
            action()

    return report


@pytest.mark.parametrize("pull", [False, True])
def test_only_tags_of_named_commits_travel(tmp_path: Path, pull: bool) -> None:
    place, target = make_store(tmp_path / "store"), tmp_path / "target"
    with ckptstore.open(place) as store, ckptstore.open(target, storage=CUTS) as there:

        def send(ref: str | int, *, force: bool = False) -> None:
            if pull:
                there.pull(place, ref, force=force)
            else:
                store.push(target, ref, force=force)

        store.push(target, tags=False)
        parent = store.log(run="main")[0]
        store.tag("prod", parent.id)
        there.tag("prod", 0)
        child = store.commit({"a": 1}, step=50, tag="child")
        assert store.log()[0].parents == (parent.id,)
        for force in (False, True):
            send(50, force=force)
            assert there.tags()["prod"] == there.checkout(0).id
        assert there.tags()["child"] == child.id
        there.untag("prod")
        store.commit({"a": 2}, step=51)
        send(51, force=True)
        assert "prod" not in there.tags()
        send("prod")
        assert there.tags()["prod"] == parent.id


@pytest.mark.parametrize("tagged", [1, 2], ids=["of a commit that is there", "of one to be sent"])
def test_a_tag_that_is_set_meanwhile_moves_by_force_only(tmp_path: Path, tagged: int) -> None:
    place, target = make_store(tmp_path / "store"), tmp_path / "target"
    with ckptstore.open(place) as store, ckptstore.open(target, storage=CUTS) as there:
        store.push(target, 0, tags=False)
        theirs = store.push(target, 1, tags=False).sent
        store.tag("mine", tagged)
        meanwhile = at_the_start(lambda: there.tag("mine", 0))
        with pytest.raises(Conflict, match=r"tag 'mine' .*force"):
            store.push(target, progress=meanwhile)
        assert there.checkout("mine").step == 0
        assert theirs == (there.checkout(1).id,)
        with pytest.raises(Conflict, match="would move"):
            store.push(target)
        there.untag("mine")
        store.push(target, progress=meanwhile, force=True)
        assert there.checkout("mine").step == tagged


def test_a_tag_that_is_set_meanwhile_where_the_push_would_set_it_is_no_conflict(
    tmp_path: Path,
) -> None:
    place, target = make_store(tmp_path / "store"), tmp_path / "target"
    with ckptstore.open(place) as store, ckptstore.open(target, storage=CUTS) as there:
        store.push(target, 1, tags=False)
        store.tag("mine", 1)
        store.push(target, progress=at_the_start(lambda: there.tag("mine", 1)))
        assert there.checkout("mine").step == 1


def test_a_commit_that_is_purged_meanwhile_gets_no_tag(tmp_path: Path) -> None:
    place, target = make_store(tmp_path / "store", steps=5), tmp_path / "target"
    with ckptstore.open(place) as store, ckptstore.open(target, storage=CUTS) as there:
        store.push(target, tags=False)
        store.tag("mine", 1)
        store.commit({"a": 1}, step=9)

        def purge() -> None:
            there.forget(there.checkout(1).id)
            there.gc(grace_s=0)

        with pytest.raises(NotFound, match="gc has purged"):
            store.push(target, progress=at_the_start(purge))
        assert "mine" not in there.tags()


def test_a_rename_takes_no_tag_that_was_set_since_it_looked(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store, ckptstore.open(tmp_path / "store") as other:
        handle = store._internals.handle
        reader = Reader(handle.config, handle.objects, store._internals.threads)
        read = reader.document

        def document(*what: object) -> object:
            if "new" not in other.tags():
                other.tag("new", 2)
            return read(*what)  # type: ignore[arg-type]

        reader.document = document  # type: ignore[assignment, method-assign]
        with pytest.raises(Conflict, match="tag 'new'"):
            rename_tag(handle, reader, "first", "new")
        assert store.checkout("new").step == 2
        assert store.checkout("first").step == 0


def test_a_rename_removes_no_tag_that_was_moved_since_it_looked(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store, ckptstore.open(tmp_path / "store") as other:
        handle = store._internals.handle
        reader = Reader(handle.config, handle.objects, store._internals.threads)
        read = reader.document

        def document(*what: object) -> object:
            other.tag("first", 2)
            return read(*what)  # type: ignore[arg-type]

        reader.document = document  # type: ignore[assignment, method-assign]
        with pytest.raises(Conflict, match="tag 'first'"):
            rename_tag(handle, reader, "first", "new")
        assert store.checkout("new").step == 0
        assert store.checkout("first").step == 2
