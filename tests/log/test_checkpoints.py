"""A checkpoint gives the state that its log gives, or is ignored."""

import math
from pathlib import Path

import pytest

from ckptstore.core.ids import StoreId, checkpoint_key, digest, log_key
from ckptstore.errors import Corrupt, Unavailable
from ckptstore.log import log, log_snapshots
from ckptstore.log.entries import Condemn, Delete, Forget, Moved, Over, Settings, Undelete
from ckptstore.log.log_snapshots import decode_state, encode_state
from ckptstore.log.state import apply, genesis
from ckptstore.objects import canonical
from ckptstore.objects.frames import compress, decompress
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.log.builders import (
    STORE,
    Wrapped,
    commit,
    commit_id,
    entry,
    folded,
    open_log,
    packs,
    session,
)

FULL = folded(
    commit(1, packs=packs(1, 3), metrics=(("acc", math.inf), ("loss", 0.1)), tags=("best",)),
    commit(
        2, run="other", step=None, parents=(commit_id(1), commit_id(8)), reused=frozenset({1, 2})
    ),
    commit(3, metrics=(("loss", -0.0),)),
    commit(4),
    commit(5, message="é"),
    Forget((commit_id(3),), "old"),
    Condemn(6, 0, frozenset({5}), ()),
    Undelete((commit_id(3),), frozenset({5})),
    Forget((commit_id(3),), "old"),
    Condemn(9, 7, frozenset({5, 6}), (commit_id(3),)),
    Delete(frozenset({5})),
    Over((session(98), session(99))),
    Settings((("best", ("loss",)), ("keep", 3), ("name", "x"))),
    Moved("postgresql://x", 1),
)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A store whose log is checkpointed at every tenth entry."""
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 10)
    return open_storage(tmp_path, fsync=False)


def fill(storage: Storage, count: int) -> log.Log:
    """A log of `count` commits, its checkpoints written."""
    filled = open_log(storage)
    for i in range(1, count + 1):
        filled.append(commit(i))
        filled.close()
    return filled


def test_a_state_reads_back_as_it_was() -> None:
    assert decode_state(encode_state(FULL), STORE, 1) == FULL
    assert decode_state(encode_state(genesis(STORE, 1)), STORE, 1) == genesis(STORE, 1)


def test_the_time_of_a_forget_reads_back_to_the_nanosecond() -> None:
    state = folded(commit(1), commit(2), commit(3))
    state = apply(state, entry(state, Forget((commit_id(1),), "old"), time_ns=2**60 + 1))
    assert state.commits[commit_id(1)].forgotten_ns == 2**60 + 1
    assert decode_state(encode_state(state), STORE, 1) == state


def test_any_flipped_byte_and_any_truncation_is_found() -> None:
    data = encode_state(FULL)
    for i in range(len(data)):
        with pytest.raises(Corrupt):
            decode_state(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], STORE, 1)
        with pytest.raises(Corrupt):
            decode_state(data[:i], STORE, 1)


def test_a_checkpoint_of_another_store_or_another_fold_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode_state(FULL)
    with pytest.raises(Corrupt):
        decode_state(data, StoreId("6" * 32), 1)
    monkeypatch.setattr(log_snapshots, "FOLD_VERSION", 999)
    with pytest.raises(Corrupt):
        decode_state(data, STORE, 1)


@pytest.mark.parametrize(
    "frame", [b"", b"no frame", b"\x28\xb5\x2f\xfd" + b"\xff" * 14], ids=["empty", "junk", "huge"]
)
def test_a_well_hashed_file_that_is_no_checkpoint_is_refused(frame: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_state(digest(frame).hex().encode() + b"\n" + frame, STORE, 1)


@pytest.mark.parametrize("moved", [[[]], ["a place alone"], 7, {"place": 1}], ids=repr)
def test_a_well_hashed_checkpoint_that_says_nonsense_of_where_the_log_went_is_refused(
    moved: object,
) -> None:
    content = decompress(encode_state(FULL)[65:], 1 << 20)
    end = 4 + int.from_bytes(content[:4], "little")
    document = canonical.decode(content[4:end])
    document["state"]["moved"] = moved  # type: ignore[index, call-overload]  # two dicts
    head = canonical.encode(document)
    frame = compress(len(head).to_bytes(4, "little") + head + content[end:])
    with pytest.raises(Corrupt):
        decode_state(digest(frame).hex().encode() + b"\n" + frame, STORE, 1)


def test_the_newest_two_checkpoints_are_kept(storage: Storage) -> None:
    fill(storage, 34)
    assert [key for key, _ in storage.list("log/checkpoint-")] == [
        checkpoint_key(20),
        checkpoint_key(30),
    ]


@pytest.mark.parametrize("count", [9, 10, 11, 25, 40, 57])
def test_the_state_from_a_checkpoint_is_the_state_from_the_whole_log(
    storage: Storage, count: int
) -> None:
    written = fill(storage, count).state
    read: list[str] = []
    reopened = open_log(Recording(storage, read)).replay()
    for key, _ in list(storage.list("log/checkpoint-")):
        storage.delete(key)
    assert written == reopened == open_log(storage).replay()
    assert len([key for key in read if not key.startswith("log/checkpoint-")]) <= 12


class Recording(Wrapped):
    """A backend that writes down what is read."""

    def __init__(self, storage: Storage, read: list[str]) -> None:
        super().__init__(storage, lambda create, key, data: create(key, data))
        self._read = read

    def read(self, key: str) -> bytes:
        self._read.append(key)
        return self._storage.read(key)


def test_a_damaged_checkpoint_is_ignored_and_the_older_one_serves(storage: Storage) -> None:
    written = fill(storage, 34).state
    for key in (checkpoint_key(30), checkpoint_key(20)):
        storage.put(key, b"x" + storage.read(key)[1:])
        assert open_log(storage).replay() == written


def test_a_checkpoint_that_is_not_of_the_logs_own_entry_is_ignored(
    storage: Storage, tmp_path: Path
) -> None:
    written = fill(storage, 12).state
    other = open_log(open_storage(tmp_path / "other", fsync=False))
    for i in range(101, 111):
        other.append(commit(i))
    other.close()
    storage.put(checkpoint_key(10), encode_state(other.state))
    assert open_log(storage).replay() == written


def test_a_checkpoint_under_another_number_is_ignored(storage: Storage) -> None:
    written = fill(storage, 34).state
    storage.put(checkpoint_key(30), storage.read(checkpoint_key(20)))
    assert open_log(storage).replay() == written


def test_a_checkpoint_that_cannot_be_written_costs_nothing_but_time(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Wrapped):
        def put(self, key: str, data: bytes) -> None:
            raise Unavailable("the disk is full")

    filled = open_log(Full(storage, lambda create, key, data: create(key, data)))
    for i in range(1, 13):
        filled.append(commit(i))
    filled.close()
    assert "the disk is full" in caplog.text
    assert open_log(storage).replay() == filled.state
    assert storage.size(log_key(12)) is not None
