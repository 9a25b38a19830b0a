"""Segments let a host read a long log in few requests, and are trusted only if they match the
log's entries."""

import secrets
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ckptstore.core.ids import checkpoint_key, log_key, segment_key
from ckptstore.errors import Corrupt, Unavailable
from ckptstore.log import log, log_backend
from ckptstore.log.entries import Settings
from ckptstore.log.log import Log
from ckptstore.log.log_backend import SEGMENT_ENTRIES, decode_segment, encode_segment
from ckptstore.objects.frames import bundle, compress, seal, unbundle
from ckptstore.storage import open_storage
from ckptstore.storage.contract import SEGMENT_BYTES_MAX, Storage
from tests.log.builders import STORE, commit, open_log

COUNT = 3 * SEGMENT_ENTRIES + 20
SEGMENTS = [segment_key(SEGMENT_ENTRIES * i) for i in (1, 2, 3)]


class Counting:
    """A bucket that writes down what is read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.keys: list[str] = []

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.keys.append(key)
        return self._storage.read(key, start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def bucket() -> Storage:
    return open_storage(f"memory://{secrets.token_hex(8)}")


def fill(storage: Storage, count: int) -> Log:
    filled = open_log(storage)
    for i in range(1, count + 1):
        filled.append(commit(i) if i % 3 else Settings((("keep", i),)))
    filled.close()
    return filled


def keys(storage: Storage, prefix: str) -> list[str]:
    return [key for key, _ in storage.list(prefix)]


@pytest.fixture(scope="module")
def filled() -> Storage:
    """A bucket with a log of `COUNT` entries, for tests that only read it."""
    storage = bucket()
    fill(storage, COUNT)
    return storage


@pytest.fixture
def copied(filled: Storage) -> Storage:
    """The same log, to be damaged."""
    copy = bucket()
    for key in keys(filled, "log/"):
        copy.put(key, filled.read(key))
    return copy


def test_a_log_is_read_from_its_segments_in_few_requests(filled: Storage) -> None:
    assert keys(filled, "log/segment-") == SEGMENTS
    counting = Counting(filled)
    # a Backend but for its type
    read = [entry.position for entry in open_log(counting).read_entries()]  # type: ignore[arg-type]
    assert [position.n for position in read] == list(range(1, COUNT + 1))
    assert len([key for key in counting.keys if "segment" in key]) <= 16
    assert len(counting.keys) <= 100


def test_the_entries_of_a_segment_are_those_of_the_log(copied: Storage) -> None:
    with_segments = list(open_log(copied).read_entries())
    state = open_log(copied).replay()
    for key in SEGMENTS:
        copied.delete(key)
    assert list(open_log(copied).read_entries()) == with_segments
    assert open_log(copied).replay() == state


def flipped(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 4]) + data[501:]


def well_hashed(content: bytes) -> bytes:
    return seal(compress(content))


def as_before(data: bytes) -> bytes:
    """The entries behind a table of their lengths."""
    files = list(unbundle(data, "", SEGMENT_BYTES_MAX).values())
    return well_hashed(struct.pack("<100I", *map(len, files)) + b"".join(files))


def without_one(data: bytes) -> bytes:
    files = unbundle(data, "", SEGMENT_BYTES_MAX)
    del files[min(files)]  # the chain of the others is whole
    return bundle(files)


def renamed(data: bytes) -> bytes:
    files = unbundle(data, "", SEGMENT_BYTES_MAX)
    files["log/x"] = files.pop(min(files))
    return bundle(files)


def of_another_log(_: bytes) -> bytes:
    """A segment as another history of the same store would have it: whole in itself."""
    other = bucket()
    fill(other, 2 * SEGMENT_ENTRIES)
    return other.read(SEGMENTS[1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flipped,
    "cut": lambda data: data[:700],
    "empty": lambda data: b"",
    "well hashed and empty": lambda data: well_hashed(b""),
    "well hashed zeros": lambda data: well_hashed(bytes(4000)),
    "of another log": of_another_log,
    "of another form": as_before,
    "without one": without_one,
    "renamed": renamed,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_segment_that_is_not_the_logs_is_ignored(
    copied: Storage, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = list(open_log(copied).read_entries())
    copied.put(SEGMENTS[1], DAMAGES[damage](copied.read(SEGMENTS[1])))
    assert list(open_log(copied).read_entries()) == wanted
    assert "are not used" in caplog.text


def test_a_segment_under_another_number_is_ignored(copied: Storage) -> None:
    wanted = list(open_log(copied).read_entries())
    copied.put(SEGMENTS[0], copied.read(SEGMENTS[1]))
    assert list(open_log(copied).read_entries()) == wanted


def test_a_segment_does_not_stand_in_for_a_log_that_ends_before_it(copied: Storage) -> None:
    """As after a bucket was restored from a backup: what the segment has more is not the log's."""
    for n in range(SEGMENT_ENTRIES + 50, COUNT + 1):
        copied.delete(log_key(n))
    assert open_log(copied).replay().n == SEGMENT_ENTRIES + 49


def test_entries_whose_chain_is_broken_make_no_segment(filled: Storage) -> None:
    entries = list(islice(open_log(filled).read_entries(), SEGMENT_ENTRIES))
    entries[40], entries[41] = entries[41], entries[40]
    with pytest.raises(Corrupt, match="chain is broken"):
        decode_segment(encode_segment(entries), SEGMENT_ENTRIES, STORE)


def test_a_host_that_lacks_only_the_last_entries_reads_no_segment(
    tmp_path: Path, filled: Storage
) -> None:
    storage = bucket()
    opened = Log(storage, STORE, 1, memory=tmp_path / "state")
    for i in range(1, SEGMENT_ENTRIES - 4):
        opened.append(commit(i))
    opened.close()
    again = Log(storage, STORE, 1, memory=tmp_path / "state")
    for i in range(SEGMENT_ENTRIES - 4, SEGMENT_ENTRIES + 1):
        again.append(commit(i))
    again.close()
    entries = decode_segment(storage.read(SEGMENTS[0]), SEGMENT_ENTRIES, STORE)
    assert entries == list(open_log(storage).read_entries())


def test_a_segment_that_its_writer_did_not_live_to_write_is_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_backend, "_COMPLETED_EVERY", 2 * SEGMENT_ENTRIES)
    storage = bucket()
    filled = fill(storage, SEGMENT_ENTRIES)
    written = storage.read(SEGMENTS[0])
    storage.delete(SEGMENTS[0])
    for i in range(1, SEGMENT_ENTRIES + 1):
        filled.append(Settings((("keep", i),)))
    filled.close()
    assert keys(storage, "log/segment-") == SEGMENTS[:2]
    assert storage.read(SEGMENTS[0]) == written


def test_a_segment_that_cannot_be_written_costs_nothing_but_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Counting):
        def put(self, key: str, data: bytes) -> None:
            raise Unavailable("the bucket is full")

    storage = bucket()
    # a Backend but for its type
    filled = fill(Full(storage), SEGMENT_ENTRIES + 1)  # type: ignore[arg-type]
    assert "the bucket is full" in caplog.text
    assert open_log(storage).replay() == filled.state


def test_what_was_read_for_the_state_is_not_read_again_for_the_catalog(
    copied: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", SEGMENT_ENTRIES)
    copied.put(checkpoint_key(3 * SEGMENT_ENTRIES), checkpoint_at(copied, 3 * SEGMENT_ENTRIES))
    counting = Counting(copied)
    opened = open_log(counting)  # type: ignore[arg-type]  # a Backend but for its type
    opened.replay()
    tail = [key for key in counting.keys if log_key(3 * SEGMENT_ENTRIES) < key <= log_key(COUNT)]
    assert len(tail) == 20
    counting.keys.clear()
    assert [entry.n for entry in opened.read_entries()] == list(range(1, COUNT + 1))
    assert not {
        key for key in counting.keys if log_key(3 * SEGMENT_ENTRIES + 1) < key <= log_key(COUNT)
    }


def checkpoint_at(storage: Storage, n: int) -> bytes:
    from ckptstore.log.log_snapshots import encode_state
    from ckptstore.log.state import apply, genesis

    state = genesis(STORE, 1)
    entries: Iterator[Any] = islice(open_log(storage).read_entries(), n)
    for entry in entries:
        state = apply(state, entry)
    return encode_state(state)


def test_a_disk_of_this_host_gets_no_segments(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, fsync=False)
    fill(storage, SEGMENT_ENTRIES)
    assert keys(storage, "log/segment-") == []
