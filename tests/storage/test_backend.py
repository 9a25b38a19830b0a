"""What every place for objects has to do, on a local disk, in fsspec's memory and on S3."""

import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptstore.core.ids import SessionId, new_session_id, pack_id, pack_key, twin_key
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, ReadOnly
from ckptstore.repository.pack_writer import OpenPack
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage, Writer, put_finished

SESSION = SessionId("5" * 24)
BAD_KEYS = ["", "/etc/passwd", "..", "../a", "a/../b", "a//b", "./a", "a/", "a/.", "a\0b"]


class BackendContract:
    """Subclass it with a fixture `url`, and perhaps `options`, to hold another backend to the
    contract."""

    @pytest.fixture
    def options(self) -> dict[str, Any] | None:
        return None

    @pytest.fixture
    def storage(self, url: str, options: dict[str, Any] | None) -> Iterator[Storage]:
        storage = open_storage(url, storage_options=options)
        yield storage
        storage.close()

    def test_nothing_is_cached_of_what_is_not_there(self, storage: Storage) -> None:
        storage.put("packs/aa/one", b"0123456789")
        assert storage.is_cached("packs/aa/one", 3) in (False, True)
        assert not storage.is_cached("packs/aa/one", 10)
        assert not storage.is_cached("packs/aa/none", 3)

    def test_what_is_put_is_read(self, storage: Storage) -> None:
        storage.put("a/b/c", b"0123456789")
        assert storage.read("a/b/c") == b"0123456789"
        assert storage.size("a/b/c") == 10
        storage.put("a/b/c", memoryview(b"new"), durable=False)
        assert storage.read("a/b/c") == b"new"

    @pytest.mark.parametrize(
        ("start", "stop", "data"),
        [
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (3, 5, b"34"),
            (8, 99, b"89"),
            (10, 12, b""),
            (12, None, b""),
            (5, 5, b""),
            (5, 3, b""),
        ],
    )
    def test_a_range_holds_what_there_is_of_it(
        self, storage: Storage, start: int, stop: int | None, data: bytes
    ) -> None:
        storage.put("a", b"0123456789")
        assert storage.read("a", start, stop) == data

    @pytest.mark.parametrize(
        ("nbytes", "data"), [(3, b"789"), (10, b"0123456789"), (99, b"0123456789")]
    )
    def test_a_tail_comes_with_the_size(self, storage: Storage, nbytes: int, data: bytes) -> None:
        storage.put("a", b"0123456789")
        assert storage.read_tail("a", nbytes) == (data, 10)

    def test_what_is_read_ahead_is_served_once(self, storage: Storage) -> None:
        storage.put("a", b"0123456789")
        storage.put("grown", b"0123456789")
        storage.read_ahead({"a": 10, "absent": 3, "grown": 9})
        far = storage.capabilities.slow_requests
        for key in ("a", "grown"):
            storage.put(key, b"9876543210")  # to tell where bytes come from
        old, new = (b"0123456789", b"9876543210") if far else (b"9876543210",) * 2
        assert storage.read("grown", 2, 4) == new[2:4], "of another size than was said"
        assert storage.read_tail("a", 3) == (old[-3:], 10)
        assert storage.read_tail("a", 3) == (new[-3:], 10)
        buffer = bytearray(3)
        storage.read_into("a", 4, [memoryview(buffer)])
        assert buffer == old[4:7]
        assert storage.read("a", 7) == old[7:]
        assert storage.read("a", 6, 8) == new[6:8]
        assert storage.read("a", 0, 4) == old[:4]
        storage.put("a", b"0000000000")
        storage.read_ahead({"a": 10})
        storage.put("a", b"9876543210")
        storage.read_ahead({})
        assert storage.read("a") == new
        with pytest.raises(NotFound):
            storage.read("absent")

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        storage.put("a", b"")
        assert (storage.size("a"), storage.read("a"), storage.read_tail("a", 8)) == (
            0,
            b"",
            (b"", 0),
        )

    def test_what_is_absent_is_not_found(self, storage: Storage) -> None:
        storage.put("there", b"x")
        assert storage.size("a") is None
        for key in ("a", "a/b", "there/a"):
            for read in (
                storage.read,
                lambda k: storage.read(k, 3),
                lambda k: storage.read_tail(k, 8),
                lambda k: storage.read_into(k, 0, [space(1)]),
            ):
                with pytest.raises(NotFound):
                    read(key)
            storage.delete(key)

    def test_a_prefix_of_a_key_is_no_object(self, storage: Storage) -> None:
        storage.put("a/b", b"x")
        assert storage.size("a") is None

    @pytest.mark.parametrize("count", [1, 2, 1024, 1025, 3000])
    def test_bytes_go_into_many_buffers_and_come_from_many(
        self, storage: Storage, count: int
    ) -> None:
        parts = [random.randbytes(random.randrange(20)) for _ in range(count)]
        writer = storage.create("p/a", session=SESSION)
        writer.append([memoryview(b"front")])
        writer.append([memoryview(part) for part in parts])
        writer.finish()
        out = [space(len(part)) for part in parts]
        storage.read_into("p/a", 5, out)
        assert [bytes(buffer) for buffer in out] == parts
        assert storage.read("p/a", 0, 5) == b"front"

    def test_buffers_of_wider_items_count_in_bytes(self, storage: Storage) -> None:
        writer = storage.create("a", session=SESSION)
        writer.append([memoryview(b"0123456789abcdef").cast("Q")])
        writer.finish()
        out = space(16).cast("Q")
        storage.read_into("a", 0, [out])
        assert bytes(out) == b"0123456789abcdef"

    @pytest.mark.parametrize("offset", [1, 10, 11])
    def test_an_object_that_ends_too_early_is_corrupt(self, storage: Storage, offset: int) -> None:
        storage.put("a", b"0123456789")
        with pytest.raises(Corrupt, match="wanted 10 bytes"):
            storage.read_into("a", offset, [space(4), space(6)])

    @pytest.mark.parametrize("whole_bytes", [1, 4096, 8 << 20, (8 << 20) + 4096, (17 << 20) + 5])
    def test_a_large_object_grows_by_parts_of_any_size(
        self, storage: Storage, whole_bytes: int
    ) -> None:
        whole = memoryview(random.randbytes(whole_bytes))
        writer = storage.create("packs/aa/x", session=SESSION)
        start = 0
        while start < whole_bytes:
            stop = start + random.choice((1, 5000, 4096, 1 << 20, 9 << 20))
            writer.append(
                [whole[start : start + 2000], whole[start + 2000 : stop]]
                if stop - start > 2000
                else [whole[start:stop]]
            )
            start = stop
        assert storage.size("packs/aa/x") is None
        writer.finish()
        storage.sync_dirs(["packs/aa/x", "packs/aa/y"])
        assert storage.read("packs/aa/x") == whole

    def test_what_is_discarded_leaves_nothing(self, storage: Storage) -> None:
        writer = storage.create("packs/aa/x", session=SESSION)
        writer.append([memoryview(b"abc")])
        writer.discard()
        writer.discard()
        assert list(storage.list("")) == []

    def test_discarding_what_is_finished_does_nothing(self, storage: Storage) -> None:
        writer = storage.create("a", session=SESSION)
        writer.finish()
        writer.discard()
        assert list(storage.list("")) == [("a", 0)]

    def test_an_object_is_created_once(self, storage: Storage) -> None:
        assert storage.put_new("log/1", b"first")
        assert not storage.put_new("log/1", b"second")
        assert storage.read("log/1") == b"first"
        assert list(storage.list("")) == [("log/1", 5)]

    def test_of_many_that_create_one_object_one_does(self, storage: Storage) -> None:
        with ThreadPoolExecutor(8) as pool:
            for n in range(20):
                won = list(
                    pool.map(lambda i, n=n: storage.put_new(f"log/{n}", b"%d" % i), range(8))
                )
                assert won.count(True) == 1
                assert storage.read(f"log/{n}") == b"%d" % won.index(True)

    @pytest.mark.parametrize("whole_bytes", [6, (8 << 20) + 1, (16 << 20) + 5])
    def test_a_finished_object_is_never_replaced(self, storage: Storage, whole_bytes: int) -> None:
        first, second = random.randbytes(whole_bytes), random.randbytes(whole_bytes)
        writers = [written(storage, "packs/aa/x", data) for data in (first, second)]
        assert writers[0].finish()
        with pytest.raises(Conflict, match="packs/aa/x"):
            writers[1].finish()
        writers[1].discard()
        assert storage.read("packs/aa/x") == first
        assert list(storage.list("")) == [("packs/aa/x", whole_bytes)]

    def test_an_object_that_was_put_is_not_replaced_by_a_writer(self, storage: Storage) -> None:
        storage.put("a", b"first")
        with pytest.raises(Conflict):
            written(storage, "a", b"second").finish()
        assert storage.read("a") == b"first"

    def test_of_many_that_finish_one_object_one_does(self, storage: Storage) -> None:
        def finish(writer: Writer) -> bool:
            try:
                return writer.finish()
            except Conflict:
                return False

        with ThreadPoolExecutor(8) as pool:
            for n in range(10):
                won = list(
                    pool.map(finish, [written(storage, f"packs/{n}", b"%d" % i) for i in range(8)])
                )
                assert won.count(True) == 1
                assert storage.read(f"packs/{n}") == b"%d" % won.index(True)
        assert len(list(storage.list(""))) == 10

    def test_only_one_writer_of_equal_bytes_may_take_the_object_for_its_own(
        self, storage: Storage
    ) -> None:
        """The other must not delete it when what it was for fails."""
        assert written(storage, "a", b"same").finish()
        with suppress(Conflict):
            assert not written(storage, "a", b"same").finish()
        assert storage.read("a") == b"same"

    def test_a_pack_and_its_twin_stay_when_another_of_that_name_fails(
        self, storage: Storage
    ) -> None:
        name = pack_id(SESSION, 0, 0)
        packs = [OpenPack(storage, name, metadata=True) for _ in range(2)]
        for pack, data in zip(packs, (b"first", b"other"), strict=True):
            pack.append(data)
        closed = packs[0].close()
        assert closed.own == (pack_key(name), twin_key(name))
        there = [storage.read(key) for key in closed.own]
        with pytest.raises(Conflict):
            packs[1].close()
        packs[1].discard()
        assert [storage.read(key) for key in closed.own] == there
        assert len(list(storage.list(""))) == 2
        packs[0].discard()
        assert list(storage.list("")) == []

    def test_a_document_is_put_once(self, storage: Storage) -> None:
        assert put_finished(storage, "commits/a", b"first")
        assert not put_finished(storage, "commits/a", b"first")
        with pytest.raises(Conflict, match="commits/a"):
            put_finished(storage, "commits/a", b"other")
        assert storage.read("commits/a") == b"first"

    def test_what_is_deleted_is_gone_even_if_it_was_read(self, storage: Storage) -> None:
        storage.put("a", b"x")
        storage.read_into("a", 0, [space(1)])
        storage.delete("a")
        storage.delete("a")
        with pytest.raises(NotFound):
            storage.read_into("a", 0, [space(1)])
        assert storage.put_new("a", b"y")

    def test_what_is_replaced_is_read_anew(self, storage: Storage) -> None:
        for data in (b"x", b"y"):
            storage.put("a", data)
            out = space(1)
            storage.read_into("a", 0, [out])
            assert bytes(out) == data

    def test_keys_are_listed_in_order_and_by_prefix(self, storage: Storage) -> None:
        keys = ["a-b", "a/b", "a/b-c", "a/b0", "a/b.2/c", "a0", "b/log-1", "b/log-2", "b/x"]
        for key in random.sample(keys, len(keys)):
            storage.put(key, key.encode())
        for prefix in ("", "a", "a-b", "a/", "a/b", "a/b.", "b/log-", "b/log-2", "c", "c/d"):
            assert list(storage.list(prefix)) == [
                (key, len(key)) for key in sorted(keys) if key.startswith(prefix)
            ]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_key_does_not_leave_the_root(self, storage: Storage, key: str) -> None:
        for use in (
            storage.read,
            storage.size,
            storage.delete,
            lambda k: storage.read_tail(k, 1),
            lambda k: storage.read_into(k, 0, [space(1)]),
            lambda k: storage.put(k, b""),
            lambda k: storage.put_new(k, b""),
            lambda k: storage.create(k, session=SESSION),
        ):
            with pytest.raises(InvalidInput):
                use(key)

    @pytest.mark.parametrize("prefix", ["../", "/etc/", "a/../", "a//b"])
    def test_a_prefix_does_not_leave_the_root(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(InvalidInput):
            list(storage.list(prefix))

    def test_a_backend_for_reading_only_changes_nothing(
        self, url: str, options: dict[str, Any] | None, storage: Storage
    ) -> None:
        storage.put("a", b"x")
        reader = open_storage(url, read_only=True, storage_options=options)
        for change in (
            lambda: reader.put("a", b"y"),
            lambda: reader.put_new("b", b"y"),
            lambda: reader.create("b", session=SESSION),
            lambda: reader.delete("a"),
        ):
            with pytest.raises(ReadOnly):
                change()
        assert list(reader.list("")) == [("a", 1)]
        assert reader.read("a") == b"x"

    def test_looking_creates_nothing(self, storage: Storage) -> None:
        assert storage.size("a") is None
        assert list(storage.list("")) == []
        with pytest.raises(NotFound):
            storage.read("a")
        root = storage.capabilities.local_root
        assert root is None or not root.exists()


class TestLocal(BackendContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "new" / "store")

    def test_a_file_url_is_a_path(self, url: str, storage: Storage) -> None:
        storage.put("a", b"x")
        assert open_storage(f"file://{url}").read("a") == b"x"
        assert open_storage(Path(url)).capabilities.local_root == Path(url)

    def test_a_symbolic_link_is_neither_read_nor_listed(
        self, url: str, storage: Storage, tmp_path: Path
    ) -> None:
        storage.put("a", b"x")
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "file").write_bytes(b"secret")
        os.symlink(tmp_path / "secret" / "file", f"{url}/link")
        os.symlink(tmp_path / "secret", f"{url}/dir")
        for read in (storage.read, lambda k: storage.read_into(k, 0, [space(1)])):
            with pytest.raises(Corrupt):
                read("link")
        assert list(storage.list("")) == [("a", 1)]
        assert storage.size("link") is None

    @pytest.mark.parametrize("linked", ["a", "a/b"])
    def test_no_directory_beneath_the_root_is_followed_through_a_link(
        self, url: str, storage: Storage, tmp_path: Path, linked: str
    ) -> None:
        """The root itself may be one."""
        storage.put("a/b/c", b"x")
        outside = tmp_path / "outside"
        (Path(url) / linked).rename(outside)
        (Path(url) / linked).symlink_to(outside)
        before = {path: path.stat() for path in outside.rglob("*")}
        (tmp_path / "root").symlink_to(url)
        through = open_storage(tmp_path / "root")
        for act in (
            lambda: storage.put("a/b/c", b"y"),
            lambda: storage.put("a/b/d/e", b"y"),
            lambda: storage.put_new("a/b/d", b"y"),
            lambda: storage.create("a/b/d", session=SESSION).finish(),
            lambda: storage.delete("a/b/c"),
            lambda: storage.read("a/b/c"),
            lambda: storage.size("a/b/c"),
            lambda: list(storage.list("a/b/")),
            lambda: through.put("a/b/c", b"y"),
        ):
            with pytest.raises(Corrupt, match="link"):
                act()
        assert {path: path.stat() for path in outside.rglob("*")} == before
        through.put("d/e", b"z")
        assert through.read("d/e") == storage.read("d/e") == b"z"

    def test_more_files_are_read_than_are_kept_open(self, storage: Storage) -> None:
        for i in range(200):
            storage.put(f"packs/{i}", b"%03d" % i, durable=False)

        def read(i: int) -> bool:
            out = space(3)
            storage.read_into(f"packs/{i}", 0, [out])
            return bytes(out) == b"%03d" % i

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, random.choices(range(200), k=4000)))
        packs = f"{Path(storage.url).resolve()}/packs/"
        assert (
            0
            < len(
                [
                    fd
                    for fd in Path("/proc/self/fd").iterdir()
                    if str(fd.resolve()).startswith(packs)
                ]
            )
            <= 64
        )
        storage.close()
        assert not [
            fd for fd in Path("/proc/self/fd").iterdir() if str(fd.resolve()).startswith(packs)
        ]

    def test_a_forked_child_reads_and_writes(self, storage: Storage) -> None:
        storage.put("a", b"0123")
        storage.read_into("a", 0, [space(4)])

        def child() -> None:
            out = space(2)
            storage.read_into("a", 2, [out])
            storage.put("b", out)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert storage.read("b") == b"23"

    def test_files_get_the_rights_that_the_umask_leaves(self, url: str, storage: Storage) -> None:
        before = os.umask(0o027)
        try:
            storage.put("a", b"x")
        finally:
            os.umask(before)
        assert (Path(url) / "a").stat().st_mode & 0o777 == 0o640

    def test_storage_options_are_refused(self, url: str) -> None:
        with pytest.raises(InvalidInput):
            open_storage(url, storage_options={"key": "x"})


class TestMemory(BackendContract):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{new_session_id()}"

    def test_a_listing_that_another_thread_disturbed_is_made_again(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The garbage collector may let other threads go on while fsspec copies the names that it
        has."""
        storage.put("packs/aa/x", b"x")
        real, disturbed = MemoryFileSystem.find, [True, True]

        def find(fs: MemoryFileSystem, path: str, **more: Any) -> Any:
            if disturbed:
                disturbed.pop()
                for _ in (names := {"a": 1}):
                    names["b"] = 2
            return real(fs, path, **more)

        monkeypatch.setattr(MemoryFileSystem, "find", find)
        assert list(storage.list("packs/")) == [("packs/aa/x", 1)]


def written(storage: Storage, key: str, data: bytes) -> Writer:
    """A writer that has `data` and was not finished."""
    writer = storage.create(key, session=SESSION)
    writer.append([memoryview(data)])
    return writer


def space(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
