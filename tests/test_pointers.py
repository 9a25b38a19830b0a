"""Pointer files: a path that means a commit, wherever a ref may stand; what is no pointer file is
refused and never followed."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import Conflict, InvalidInput, NotFound
from ckptstore.cli.call import Exit
from ckptstore.core import refs
from ckptstore.core.ids import CommitId
from ckptstore.objects.pointer_files import POINTER_BYTES_MAX, Pointer, read_pointer, write_pointer
from tests.cli.running import call

COMMIT = CommitId("ab" * 32)


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "store")
    for step in (1, 2, 3):
        store.commit({"w": torch.full((8,), step), "step": step}, step=step)
    return store


def test_a_pointer_opens_the_commit_without_the_store(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    written = ckptstore.write_pointer(tmp_path / "exports" / "best", store, 2)
    store.close()
    with ckptstore.open_pointer(tmp_path / "exports" / "best") as snap:
        assert (snap.id, snap.step) == (written.id, 2)
        assert torch.equal(snap.read("w"), torch.full((8,), 2))


def test_a_path_is_taken_wherever_a_ref_is(store: ckptstore.Store, tmp_path: Path) -> None:
    path = tmp_path / "one"
    first = ckptstore.write_pointer(path, store, 1)
    assert (
        store.checkout(path).id
        == store.checkout(str(path)).id
        == store.checkout(first).id
        == first.id
    )
    assert [change.path for change in store.diff(path, 1).changes] == []
    store.tag("old", path)
    assert store.tags() == {"old": first.id}
    store.untag("old")
    assert store.push(tmp_path / "other", path, create=True).plan.commits
    with ckptstore.open(tmp_path / "other") as other:
        assert other.checkout(path).id == first.id  # a commit has one id, in whatever store
    store.forget(path)
    store.undelete([path])
    assert store.checkout(path).id == first.id


def test_a_tag_goes_before_a_file_of_that_name(
    store: ckptstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckptstore.write_pointer("good", store, 1)
    assert store.checkout("good").step == 1
    store.tag("good", 3)
    assert store.checkout("good").step == 3
    assert store.checkout("./good").step == 1


def test_a_beginning_of_several_ids_is_no_file_of_that_name(
    store: ckptstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refs, "_PREFIX", re.compile("[0-9a-f]{1,64}"))
    for step in range(20):  # with the three before: two of some digit that is no step
        store.commit({"step": step}, step=step + 1000)
    firsts = Counter(info.id[0] for info in store.log())
    first = next(digit for digit, count in firsts.items() if count > 1 and digit not in "123")
    ckptstore.write_pointer(first, store, 1)
    with pytest.raises(InvalidInput, match="begins several commit ids"):
        store.checkout(first)
    assert store.checkout(f"./{first}").step == 1


def test_the_command_takes_paths_and_finds_the_store_by_them(
    store: ckptstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "two")
    wanted = ckptstore.write_pointer(path, store, 2).id
    store.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPTSTORE", raising=False)
    for ref in (path, "./two", "two"):
        assert call("show", ref, "--json").document["commit"]["id"] == wanted
    assert call("ls", path, "--json").document["commit"] == wanted
    assert call("diff", path, "3", "--json").document["before"]["id"] == wanted
    assert call("tag", "t", path, "--json").document["commit"] == wanted
    assert call("export", path, str(tmp_path / "out.pt"), "--json").document["commit"] == wanted
    assert (
        call("-s", str(tmp_path / "store"), "show", "two", "--json").document["commit"]["id"]
        == wanted
    )
    assert call("show", "./three").code == Exit.FAILED
    assert call("show", "three").code == Exit.NO_STORE


def test_a_pointer_and_its_store_are_moved_together(store: ckptstore.Store, tmp_path: Path) -> None:
    ckptstore.write_pointer(tmp_path / "store" / "epoch" / "1", store)
    ckptstore.write_pointer(tmp_path / "beside", store)
    store.close()
    (tmp_path / "new").mkdir()
    (tmp_path / "store").rename(tmp_path / "new" / "store")
    (tmp_path / "beside").rename(tmp_path / "new" / "beside")
    for path in ("store/epoch/1", "beside"):
        with ckptstore.open_pointer(tmp_path / "new" / path) as snap:
            assert snap.step == 3


def test_a_pointer_far_from_its_store_names_it_absolutely(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_pointer(tmp_path / "a" / "b" / "p", Pointer(str(tmp_path / "x" / "store"), COMMIT))
    assert json.loads((tmp_path / "a" / "b" / "p").read_text())["store"] == str(
        tmp_path / "x" / "store"
    )
    assert read_pointer(tmp_path / "a" / "b" / "p") == Pointer(
        str(tmp_path / "x" / "store"), COMMIT
    )


def test_a_pointer_is_in_its_store_by_whichever_path(tmp_path: Path) -> None:
    (tmp_path / "disk" / "store").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk")
    write_pointer(tmp_path / "p", Pointer(str(tmp_path / "link" / "store"), COMMIT))
    found = read_pointer(tmp_path / "p")
    assert found.is_in(str(tmp_path / "link" / "store"))
    assert found.is_in(str(tmp_path / "disk" / "store"))
    assert not found.is_in(str(tmp_path / "store"))
    bucket = Pointer("s3://bucket/runs", COMMIT)
    assert bucket.is_in("s3://bucket/runs") and not bucket.is_in("s3://bucket/others")
    assert not bucket.is_in(str(tmp_path)) and not found.is_in("s3://bucket/runs")


def test_a_pointer_is_replaced_at_once_and_nothing_else_ever(tmp_path: Path) -> None:
    path, other = tmp_path / "p", CommitId("cd" * 32)
    write_pointer(path, Pointer("s3://bucket/runs", COMMIT))
    held = path.open("rb")
    write_pointer(path, Pointer("s3://bucket/runs", other))
    assert COMMIT.encode() in held.read()  # the old file, whole: the new one is another
    held.close()
    assert read_pointer(path) == Pointer("s3://bucket/runs", other)
    assert sorted(tmp_path.iterdir()) == [path]
    (tmp_path / "weights.pt").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "weights.pt")
    (tmp_path / "folder").mkdir()
    for name in ("weights.pt", "link", "folder"):
        with pytest.raises(Conflict, match="no pointer file"):
            write_pointer(tmp_path / name, Pointer("s3://bucket/runs", COMMIT))
    assert (tmp_path / "weights.pt").read_bytes() == b"precious"


def test_what_is_not_there_is_named(store: ckptstore.Store, tmp_path: Path) -> None:
    write_pointer(tmp_path / "stray", Pointer(store.url, COMMIT))
    write_pointer(tmp_path / "lost", Pointer(str(tmp_path / "gone"), COMMIT))
    for path, what in (("stray", "abababab"), ("lost", "gone"), ("nothing", "no pointer file")):
        with pytest.raises(NotFound, match=what):
            ckptstore.open_pointer(tmp_path / path)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        '{"ckptstore_pointer": 1}',
        '{"ckptstore_pointer": true, "store": "a", "commit": "%s"}',
        '{"ckptstore_pointer": 2, "store": "a", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": ["a"], "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "a\\u0000b", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "a\\u001b[2J", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "http://169.254.169.254/latest", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "file:///etc", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "simplecache::s3://b/k", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "s3://user:secret@host/b", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "s3://b/../c", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "a", "commit": "latest"}',
        '{"ckptstore_pointer": 1, "store": "a", "commit": "../../etc/passwd"}',
        '{"ckptstore_pointer": 1, "store": "a", "store": "b", "commit": "%s"}',
        '{"ckptstore_pointer": 1, "store": "%s", "commit": "%%s"}' % ("x" * POINTER_BYTES_MAX),
    ],
)
def test_foreign_content_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text.replace("%s", COMMIT))
    with pytest.raises(InvalidInput, match="pointer file"):
        read_pointer(tmp_path / "p")


def test_links_pipes_and_directories_are_never_read(store: ckptstore.Store, tmp_path: Path) -> None:
    ckptstore.write_pointer(tmp_path / "p", store)
    (tmp_path / "link").symlink_to(tmp_path / "p")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "store"):
        with pytest.raises(InvalidInput):
            store.checkout(tmp_path / name)


def test_secrets_do_not_get_into_pointers(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        write_pointer(tmp_path / "p", Pointer("s3://user:hunter22@bucket/runs", COMMIT))
    assert "hunter22" not in str(caught.value)
