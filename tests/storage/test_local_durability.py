"""A local disk that fails or loses power: nothing gets its name before its bytes are safe, and no
failure passes for success."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptstore.core.ids import SessionId
from ckptstore.errors import CkptStoreError, Corrupt, NotFound, ReadOnly, Unavailable
from ckptstore.storage import local_files, open_storage
from ckptstore.storage.contract import Storage

SESSION = SessionId("5" * 24)
WRITES: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("dir/a", b"data"),
    "put_new": lambda storage: storage.put_new("dir/a", b"data"),
    "create": lambda storage: write_large(storage),
}


def write_large(storage: Storage) -> None:
    writer = storage.create("dir/a", session=SESSION)
    try:
        writer.append([memoryview(b"data")])
        writer.finish()
    finally:
        writer.discard()
    storage.sync_dirs(["dir/a"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[str]:
    """What is done to the disk, in order, as `<call> <path below the root>`; temporary names are
    `tmp/*`."""
    done: list[str] = []

    def short(path: str | int) -> str:
        text = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        name = os.path.relpath(text, root)
        return "tmp/*" if name.startswith("tmp/") else name

    def record(name: str) -> None:
        real = getattr(os, name)

        def recorded(*args: str | int, **named: object) -> object:
            folders = [fd for key, fd in named.items() if key.endswith("dir_fd")]
            paths = (
                [
                    f"{os.readlink(f'/proc/self/fd/{fd}')}/{a}"
                    for fd, a in zip(folders, args, strict=True)
                ]
                if folders
                else args
            )
            what = " ".join([name, *(short(path) for path in paths)])
            result = real(*args, **named)
            done.append(what)
            return result

        monkeypatch.setattr(os, name, recorded)

    for name in ("fsync", "rename", "link", "unlink"):
        record(name)
    return done


@pytest.mark.parametrize(
    ("write", "placing"), [("put", "rename"), ("put_new", "link"), ("create", "link")]
)
def test_bytes_are_safe_before_the_name_and_the_name_before_the_return(
    calls: list[str], root: Path, write: str, placing: str
) -> None:
    WRITES[write](open_storage(root))
    assert [call for call in calls if not call.startswith("unlink")] == [
        "fsync ..",
        "fsync tmp/*",
        f"{placing} tmp/* dir/a",
        "fsync dir",
        "fsync .",
    ]


def test_the_directories_above_a_new_store_are_durable_too(
    calls: list[str], tmp_path: Path
) -> None:
    open_storage(tmp_path / "store" / "of" / "mine").put("a", b"")
    assert [call for call in calls if call.startswith("fsync") and "/tmp/" not in call] == [
        "fsync ..",
        "fsync .",
        "fsync of",
        "fsync of/mine",
    ]


def test_the_name_of_a_directory_is_made_durable_once(calls: list[str], root: Path) -> None:
    storage = open_storage(root)
    storage.put("x/y/a", b"")
    calls.clear()
    storage.sync_dirs(["x/y/a", "x/y/b", "x/y/c"])
    assert calls == ["fsync x/y"]


def test_a_directory_that_another_process_made_is_made_durable_too(
    calls: list[str], root: Path
) -> None:
    storage = open_storage(root)
    storage.put("x/a", b"")
    (root / "x" / "y").mkdir()
    calls.clear()
    storage.put("x/y/a", b"")
    assert calls == ["fsync tmp/*", "rename tmp/* x/y/a", "fsync x/y", "fsync x"]


@pytest.mark.parametrize("write", WRITES)
def test_who_renounces_durability_pays_for_none(calls: list[str], root: Path, write: str) -> None:
    WRITES[write](open_storage(root, fsync=False))
    assert not [call for call in calls if call.startswith("fsync")]


def test_what_need_not_be_durable_is_not_fsynced(calls: list[str], root: Path) -> None:
    root.mkdir()
    open_storage(root).put("a", b"x", durable=False)
    assert calls == ["rename tmp/* a"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_after_a_failed_fsync_there_is_no_file(
    monkeypatch: pytest.MonkeyPatch, root: Path, write: str, code: int
) -> None:
    monkeypatch.setattr(os, "fsync", failing(code))
    storage = open_storage(root)
    with pytest.raises(Unavailable):
        WRITES[write](storage)
    assert list(storage.list("")) == []


@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_is_unavailable_and_says_how_much_is_wanted(
    monkeypatch: pytest.MonkeyPatch, root: Path, write: str
) -> None:
    monkeypatch.setattr(os, "pwritev", failing(errno.ENOSPC))
    storage = open_storage(root)
    with pytest.raises(Unavailable, match=r"wanted 4 bytes, free are [0-9]+"):
        WRITES[write](storage)
    assert list(storage.list("")) == []


@pytest.mark.parametrize("write", WRITES)
def test_a_disk_that_takes_a_little_at_a_time_gets_it_all(
    monkeypatch: pytest.MonkeyPatch, root: Path, write: str
) -> None:
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, offset: os.pwrite(fd, buffers[0][:1], offset)
    )
    storage = open_storage(root)
    WRITES[write](storage)
    assert storage.read("dir/a") == b"data"


def test_a_disk_that_gives_a_little_at_a_time_gives_it_all(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    storage = open_storage(root)
    storage.put("a", b"0123456789")
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:3]], offset)
    )
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 3), offset))
    out = [memoryview(bytearray(4)), memoryview(bytearray(5))]
    storage.read_into("a", 1, out)
    assert b"".join(out) == b"123456789"
    assert storage.read("a") == b"0123456789"


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("open", errno.EACCES, ReadOnly),
        ("open", errno.EROFS, ReadOnly),
        ("open", errno.EMFILE, Unavailable),
        ("rename", errno.EIO, Unavailable),
        ("rename", errno.EDQUOT, Unavailable),
        ("rename", errno.EROFS, ReadOnly),
    ],
)
def test_a_failed_write_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch, root: Path, call: str, code: int, kind: type[CkptStoreError]
) -> None:
    storage = open_storage(root)
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(kind):
        storage.put("a", b"x")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.ESTALE, NotFound),
        (errno.EIO, Corrupt),
        (errno.EBADMSG, Corrupt),
        (errno.EACCES, Unavailable),
        (errno.ELOOP, Corrupt),
        (errno.EISDIR, Corrupt),
    ],
)
def test_a_failed_read_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch, root: Path, code: int, kind: type[CkptStoreError]
) -> None:
    storage = open_storage(root)
    storage.put("a", b"x")
    monkeypatch.setattr(os, "pread", failing(code))
    monkeypatch.setattr(os, "preadv", failing(code))
    for read in (
        storage.read,
        lambda k: storage.read_tail(k, 1),
        lambda k: storage.read_into(k, 0, [memoryview(bytearray(1))]),
    ):
        with pytest.raises(kind):
            read("a")


def test_a_file_whose_inode_is_damaged_is_corrupt(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    storage = open_storage(root)
    storage.put("a", b"x")
    monkeypatch.setattr(os, "open", failing(errno.EUCLEAN))
    with pytest.raises(Corrupt, match="cannot read a"):
        storage.read("a")


def test_a_disk_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    storage = open_storage(root)
    storage.put("a", b"x")
    pread, errors = os.pread, iter([OSError(errno.EIO, "once")])

    def flaky(fd: int, n: int, offset: int) -> bytes:
        if error := next(errors, None):
            raise error
        return pread(fd, n, offset)

    monkeypatch.setattr(os, "pread", flaky)
    assert storage.read("a") == b"x"


def test_a_server_that_is_away_has_lost_nothing(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    storage = open_storage(root)
    storage.put("a", b"x")
    monkeypatch.setattr(local_files, "is_network_filesystem", lambda path: path == root)
    monkeypatch.setattr(os, "pread", failing(errno.EIO))
    with pytest.raises(Unavailable):
        storage.read("a")


def test_a_filesystem_without_hard_links_says_so(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    storage = open_storage(root)
    with pytest.raises(Unavailable, match="hard links"):
        storage.put_new("a", b"x")
    assert list(storage.list("")) == []


def test_a_link_whose_answer_was_lost_counts_as_made(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    link = os.link

    def answer_lost(source: str, target: str, **named: Any) -> None:
        link(source, target, **named)
        link(source, target, **named)

    monkeypatch.setattr(os, "link", answer_lost)
    storage = open_storage(root)
    assert storage.put_new("a", b"x")
    assert list(storage.list("")) == [("a", 1)]


def test_what_a_crash_leaves_is_named_after_the_session(root: Path) -> None:
    storage = open_storage(root)
    writer = storage.create("packs/aa/x", session=SESSION)
    writer.append([memoryview(b"data")])
    ((key, nbytes),) = storage.list("")
    assert key.startswith(f"tmp/{SESSION}-")
    assert nbytes == 4
    writer.discard()


def failing(code: int) -> Callable[..., object]:
    def fail(*args: object, **named: object) -> object:
        raise OSError(code, os.strerror(code))

    return fail
