"""How a place becomes a store, who may open it, and what is refused before anything is touched."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Conflict, Corrupt, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.repository import init_store as creation
from ckptstore.repository.init_store import init_store
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"notes\.txt"):
        ckptstore.open(tmp_path)
    with pytest.raises(NotFound, match="ckptstore init"):
        ckptstore.open(tmp_path / "nothing", create=False)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_that_is_no_unicode_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / os.fsdecode(b"\xff\xe9")
    for step in (1, 2):
        with ckptstore.open(place) as store:
            store.commit({"w": torch.arange(1000.0), "step": step}, step=step)
            assert torch.equal(store.checkout(1).read("w"), torch.arange(1000.0))
            assert not store.fsck(read_data="100%").damaged
            store.gc()
            assert [info.step for info in store.log()] == [2, 1][2 - step :]


def test_a_script_that_opens_commits_and_resumes_does_not_import_torchs_compiler(
    place: Path,
) -> None:
    code = (
        "import sys, torch, ckptstore\n"
        "model = torch.nn.Linear(3, 2)\n"
        f"with ckptstore.open({str(place)!r}) as store:\n"
        "    store.commit({'model': model}, step=1)\n"
        "    store.commit_async({'model': model}, step=2).wait()\n"
        "    assert store.resume({'model': model}).step == 2\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda text: text[:40], Corrupt, "not JSON"),
        (lambda text: "", Corrupt, "not JSON"),
        (lambda text: json.dumps({"name": "something else"}), InvalidInput, "not a ckptstore's"),
        (lambda text: json.dumps({**json.loads(text), "ckptstore": 4}), InvalidInput, "format 4"),
        (lambda text: json.dumps({**json.loads(text), "ckptstore": 1}), InvalidInput, "format 1"),
        (
            lambda text: json.dumps({**json.loads(text), "chunk_bytes": 1 << 16}),
            Corrupt,
            "check does not match",
        ),
    ],
)
def test_a_store_file_that_is_not_ours_or_damaged_is_refused(
    place: Path, change: Any, error: type[Exception], says: str
) -> None:
    init_store(place)
    config = place / "ckptstore.json"
    config.write_text(change(config.read_text()))
    with pytest.raises(error, match=says):
        ckptstore.open(place)


@pytest.mark.parametrize(("kind", "error"), [("read", InvalidInput), ("write", ReadOnly)])
def test_unknown_features_stop_readers_or_writers(
    place: Path, kind: str, error: type[Exception]
) -> None:
    from dataclasses import replace

    from ckptstore.objects.documents import decode_config, encode_config

    init_store(place)
    with ckptstore.open(place) as store:
        store.commit({"n": 1}, step=1)
    config = place / "ckptstore.json"
    features = {kind: ("teleport",)}
    config.write_bytes(
        encode_config(replace(decode_config(config.read_bytes(), "here"), **features))
    )
    if kind == "read":
        with pytest.raises(error, match="teleport"):
            ckptstore.open(place)
        return
    with ckptstore.open(place) as store:
        assert store.checkout(1).read("n") == 1
        with pytest.raises(error, match="teleport"):
            store.commit({"n": 2})


def test_a_read_only_store_can_be_read_and_not_written(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"n": 1}, step=1)
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    with ckptstore.open(place, read_only=True) as store:
        assert store.checkout(1).read("n") == 1
        for write in (
            lambda: store.commit({"n": 2}),
            lambda: store.tag("x"),
            lambda: store.untag("x"),
        ):
            with pytest.raises(ReadOnly, match="read_only"):
                write()
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


def test_a_store_that_was_closed_takes_nothing_any_more(place: Path) -> None:
    with ckptstore.open(place) as store:
        snapshot = store.commit({"n": 1, "model": {"weight": torch.arange(3000.0)}}, step=1)
    for write in (
        lambda: store.commit({"n": 2}),
        lambda: store.commit_async({"n": 2}),
        lambda: store.tag("x"),
        lambda: store.gc(),
    ):
        with pytest.raises(InvalidInput, match="was closed; open it again"):
            write()
    assert torch.equal(snapshot.read("model/weight"), torch.arange(3000.0))


def test_a_close_that_is_interrupted_closes_all(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ckptstore.open(place)
    store.commit({"n": 1}, step=1)

    def interrupted(pool: ThreadPool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPool, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="was closed; open it again"):
        store.commit({"n": 2})
    store.close()


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with ckptstore.open("~/runs/checkpoints") as store:
        assert store.url == str(tmp_path / "runs" / "checkpoints")
    assert (tmp_path / "runs" / "checkpoints" / "ckptstore.json").is_file()


def test_a_file_where_a_store_should_be_made_is_a_clear_error(place: Path) -> None:
    place.write_text("notes")
    with pytest.raises(InvalidInput, match="is a file; wanted a directory"):
        ckptstore.open(place)
    assert place.read_text() == "notes"


def test_an_unwritable_path_is_a_clear_error(place: Path) -> None:
    ckptstore.open(place).close()
    with tempfile.TemporaryDirectory() as closed:
        os.chmod(closed, 0o555)
        child = os.fork()  # root may write anywhere, so a child that is somebody else tries
        if not child:
            status = 1
            try:
                os.seteuid(65534)
                ckptstore.open(Path(closed) / "store")
            except ReadOnly as error:
                status = 0 if "right to write" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.listdir(closed) == []


def test_a_store_that_appears_while_another_is_made_is_opened(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = creation._refuse_foreign

    def another_is_faster(storage: Storage) -> None:
        monkeypatch.undo()
        init_store(place)
        refuse(storage)

    monkeypatch.setattr(creation, "_refuse_foreign", another_is_faster)
    with ckptstore.open(place) as store:
        assert store.log() == []


def test_of_two_processes_that_make_a_store_at_once_one_makes_it(place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        ids = pool.map(_open_and_commit, [(str(place), i) for i in range(8)], chunksize=1)
    assert len(set(ids)) == 1
    with ckptstore.open(place) as store:
        assert sorted(info.step for info in store.log()) == list(range(8))
        assert all(
            torch.equal(store.checkout(i).read("w"), torch.full((50_000,), float(i)))
            for i in range(8)
        )


def _open_and_commit(job: tuple[str, int]) -> str:
    place, step = job
    with ckptstore.open(place) as store:
        store.commit(
            {"w": torch.full((50_000,), float(step)), "same": torch.arange(50_000)}, step=step
        )
        return store.id


def test_init_is_refused_where_there_is_a_store(place: Path) -> None:
    init_store(place)
    with pytest.raises(Conflict, match="is a store already"):
        init_store(place)


def test_an_init_that_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: str, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), source, None, target)

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(Unavailable, match="hard links"):
        init_store(tmp_path / "new" / "store")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(Unavailable, match="hard links"):
        init_store(tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_opening_reads_without_torch_know_the_position(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"n": 1})
    store_handle = StoreHandle(place, read_only=True)
    assert store_handle.queries().position().n == 1
    store_handle.close()


def test_what_a_store_was_made_with_cannot_be_asked_for_otherwise_later(place: Path) -> None:
    made = ckptstore.Storage(codec="zstd", chunk_bytes=1 << 17)
    for _ in range(2):
        ckptstore.open(place, storage=made).close()
    ckptstore.open(place).close()
    for other, says in (
        (ckptstore.Storage(codec="raw"), "made with codec='zstd', which stays; wanted 'raw'"),
        (ckptstore.Storage(chunk_bytes=1 << 20), "made with chunk_bytes=131072, which stays"),
    ):
        with pytest.raises(InvalidInput, match=says):
            ckptstore.open(place, storage=other)


def test_a_store_that_may_not_be_made_is_not_offered_for_reading() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.seteuid(65_534)
        try:
            for place in (folder, f"{folder}/below"):
                with pytest.raises(ReadOnly, match=r"no store can be made at .* denied") as caught:
                    ckptstore.open(place)
                assert "read_only" not in str(caught.value)
        finally:
            os.seteuid(0)


def test_the_loser_of_two_who_make_a_store_leaves_its_directories(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = creation._is_store

    def late(storage: Storage) -> bool:
        """Another process makes the store after this one saw that nothing is there."""
        monkeypatch.undo()
        init_store(place)
        return look(storage)

    monkeypatch.setattr(creation, "_is_store", late)
    with pytest.raises(Conflict, match="is a store already"):
        init_store(place)
    assert (place / "tmp").is_dir()
