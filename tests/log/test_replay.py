"""A log is read as it was written, from the start or from where a reader stands; damage stops the
replay."""

import shutil
from pathlib import Path

import pytest

from ckptstore.core.ids import StoreId, log_key
from ckptstore.errors import Corrupt, NotFound, ReadOnly
from ckptstore.log.entries import Moved
from ckptstore.log.log import Log, Refused
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.log.builders import (
    STORE,
    commit,
    encoded,
    open_log,
)

# -- damage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a log of five entries."""
    log = open_log(tmp_path / "store")
    for i in range(1, 6):
        log.append(commit(i))
    return tmp_path / "store"


@pytest.mark.parametrize("n", [1, 3, 5])
def test_any_flipped_byte_of_any_entry_stops_the_replay(root: Path, n: int) -> None:
    path = root / log_key(n)
    data = path.read_bytes()
    for i in range(0, len(data), 7):
        path.write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
        with pytest.raises(Corrupt):
            open_log(root).replay()
        with pytest.raises(Corrupt):
            list(open_log(root).read_entries())


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_truncated_entry_stops_the_replay(root: Path, n: int) -> None:
    path = root / log_key(n)
    data = path.read_bytes()
    for size in (0, 64, 65, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(Corrupt):
            open_log(root).replay()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_removed_entry_is_missed(root: Path, n: int) -> None:
    (root / log_key(n)).unlink()
    with pytest.raises(Corrupt, match=f"entry {n} of the log is missing"):
        open_log(root).replay()


def test_an_entry_of_a_fork_breaks_the_chain(root: Path, tmp_path: Path) -> None:
    """Somebody who appended to a copy of the store puts an entry back."""
    shutil.copytree(root, tmp_path / "copy")
    for n in (4, 5):
        (tmp_path / "copy" / log_key(n)).unlink()
    fork = open_log(tmp_path / "copy")
    fork.append(commit(44))
    fork.append(commit(45))
    shutil.copy(tmp_path / "copy" / log_key(4), root / log_key(4))
    with pytest.raises(Corrupt, match="chain is broken behind entry 4"):
        open_log(root).replay()
    shutil.copy(tmp_path / "copy" / log_key(5), root / log_key(5))
    assert open_log(root).replay().n == 5


def test_a_log_of_another_store_is_refused(root: Path) -> None:
    with pytest.raises(Corrupt):
        Log(open_storage(root), StoreId("6" * 32), 1).replay()


def test_an_entry_written_after_the_log_has_moved_is_refused(root: Path) -> None:
    log = open_log(root)
    log.replay()
    moved = log.append(Moved("db", 2))
    data = encoded(
        commit(7),
        n=7,
        attempt="a" * 32,
        time_ns=0,
        store=STORE,
        generation=1,
        prev_hash=moved.hash,
        prev_bytes=moved.bytes,
    )
    (root / log_key(7)).write_bytes(data)
    with pytest.raises(Corrupt, match="generation 1"):
        open_log(root).replay()


def test_a_moved_log_refuses_appends_until_it_is_opened_as_the_next_generation(root: Path) -> None:
    log = open_log(root)
    log.append(Moved("db", 2))
    with pytest.raises(Refused, match="moved to db"):
        log.append(commit(6))
    assert Log(open_storage(root, fsync=False), STORE, 2).append(commit(6)).generation == 2
    with pytest.raises(Corrupt, match="open the store again"):
        open_log(root).replay()


# -- reading


def test_entries_are_read_from_where_the_reader_stands(storage: Storage) -> None:
    log = open_log(storage)
    entries = [log.append(commit(i)) for i in range(1, 8)]
    assert list(open_log(storage).read_entries(*entries[3].position)) == entries[4:]
    assert list(open_log(storage).read_entries(*entries[6].position)) == []


def test_a_reader_that_remembers_another_log_is_told(storage: Storage) -> None:
    log = open_log(storage)
    entries = [log.append(commit(i)) for i in range(1, 4)]
    for n, prev_hash, size in (
        (2, "0" * 64, entries[1].bytes),
        (3, "0" * 64, entries[2].bytes),
        (9, entries[2].hash, entries[2].bytes),
    ):
        with pytest.raises(Corrupt):
            list(open_log(storage).read_entries(n, prev_hash, size))


def test_a_refreshing_replay_leaves_nothing_behind(storage: Storage) -> None:
    log = open_log(storage)
    log.append(commit(1))
    assert log.replay(refresh=True).n == 1
    assert [key for key, _ in storage.list("log/")] == [log_key(1)]


def test_a_read_only_store_is_replayed_and_not_appended_to(root: Path) -> None:
    log = Log(open_storage(root, read_only=True), STORE, 1)
    assert log.replay(refresh=True).n == 5
    with pytest.raises(ReadOnly):
        log.append(commit(6))


def test_an_unknown_store_is_an_empty_log(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert log.replay().n == 0
    assert not log.head_after(0)
    with pytest.raises(NotFound):
        open_storage(tmp_path).read(log_key(1))


def test_entries_that_were_removed_are_missed_however_many(tmp_path: Path) -> None:
    """All but the last ones, of which nobody here can know: neither read past nor written anew."""
    last = 9
    storage = open_storage(tmp_path / "store", fsync=False)
    log = open_log(storage)
    for i in range(1, last + 1):
        log.append(commit(i))
    for first in range(1, last):
        for stop in range(first + 1, last + 1):
            removed = {log_key(n): storage.read(log_key(n)) for n in range(first, stop)}
            for key in removed:
                storage.delete(key)
            with pytest.raises(Corrupt, match=f"entry {first} of the log is missing"):
                open_log(storage).append(commit(10))
            for key, data in removed.items():
                assert storage.size(key) is None
                storage.put(key, data)
    assert open_log(storage).replay().n == last
