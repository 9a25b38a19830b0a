"""Transports know by names the chunks that this process has committed; only verified bytes
arrive.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import ChunkId, digest
from ckptstore.errors import CkptStoreError
from ckptstore.interop.torchft.offer import PROBE_CHUNKS, ServedState
from ckptstore.interop.torchft.wire import name_of
from ckptstore.repository import chunk_store
from ckptstore.repository.chunk_store import SecondNames
from ckptstore.store import Store, internals_of
from tests.interop.torchft.conftest import (
    SOON,
    Start,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)

METADATA_CHUNKS = 2
SMALL = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The ids that were recorded with names."""
    found: list[bytes] = []
    learn = SecondNames.learn

    def noted(self: SecondNames, data: memoryview) -> tuple[ChunkId, bytes]:
        found.append(learn(self, data)[0])
        return learn(self, data)

    monkeypatch.setattr(SecondNames, "learn", noted)
    return found


@pytest.mark.parametrize("how", ["commit", "commit_async"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_committed_beside_a_transport_is_found_by_names(
    start: Start, store: Store, learned: list[bytes], how: str, in_place: bool
) -> None:
    state = state_of(6)
    old, wanted = copy_of(state), copy_of(state)
    weights_of(old)["b"][5, 5] += 1
    sender, receiver = start(store), start(state_dict=lambda: old, in_place=in_place)
    if how == "commit":
        store.commit({"any key": weights_of(state)})
    else:
        store.commit_async({"any key": weights_of(state)}).wait()
    assert len(learned) == 6
    sender.send_checkpoint([1], 1, state, SOON)
    assert sender.staged_bytes == 0 and len(learned) == 6
    weights_of(state)["b"].zero_()
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), wanted)
    assert receiver.received is not None and receiver.received.fetched_chunks == 1 + METADATA_CHUNKS


def test_ids_that_were_made_to_look_are_known_the_next_time(
    start: Start, store: Store, learned: list[bytes]
) -> None:
    state = state_of(6)
    store.commit({"any key": weights_of(state)})
    assert learned == []
    sender = start(store)
    for step in (1, 2):
        sender.send_checkpoint([1], step, state, SOON)
        assert sender.staged_bytes == 0 and len(learned) == 6


def test_a_store_without_a_transport_learns_no_names(store: Store, learned: list[bytes]) -> None:
    store.commit({"any key": weights_of(state_of(2))})
    assert learned == []


def test_a_chunk_that_is_known_and_was_collected_is_copied(start: Start, tmp_path: Path) -> None:
    state = state_of(4)
    with ckptstore.open(tmp_path / "store") as store:
        sender, receiver = start(store), start()
        first = store.commit({"any key": weights_of(state)}, step=1)
        for step in (2, 3):
            store.commit({"other": step}, step=step)
        store.forget([first.id])
        store.gc(max_unused=0.0, force=True)
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 4 << 20
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


def test_a_name_of_another_chunk_is_noticed_and_forgotten(start: Start, store: Store) -> None:
    state = state_of(2)
    sender, receiver = start(store), start()
    store.commit({"any key": weights_of(state)})
    one, other = (memoryview(weights_of(state)[name].numpy()).cast("B") for name in ("a", "b"))
    internals_of(store).second_names(name_of)._ids[name_of(one)] = ChunkId(digest(other))
    sender.send_checkpoint([1], 1, state, SOON)
    with pytest.raises(CkptStoreError):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
    sender.send_checkpoint([1], 2, state, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), state)


def test_looking_for_what_was_not_committed_is_given_up(
    start: Start, tmp_path: Path, learned: list[bytes]
) -> None:
    state, chunks = {"w": torch.randn(800, SMALL // 4)}, 800
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=SMALL)) as store:
        store.commit({"something else": torch.randn(SMALL)})
        sender, receiver = start(store), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert PROBE_CHUNKS <= len(learned) < chunks * 3 // 4  # a batch has 128
        assert sender.staged_bytes == chunks * SMALL
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


def test_it_is_not_given_up_where_there_is_no_room_for_a_copy(
    start: Start, tmp_path: Path, learned: list[bytes]
) -> None:
    chunks, stored = 1024, 64
    state = {"w": torch.randn(chunks, SMALL // 4)}
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=SMALL)) as store:
        store.commit({"part": state["w"][-stored:].clone()})
        sender, receiver = start(store, staging_bytes=(chunks - stored) * SMALL), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == (chunks - stored) * SMALL
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


@pytest.mark.parametrize("early", [False, True])
def test_chunks_in_the_store_and_copies_arrive_together_however_they_are_asked_for(
    start: Start, store: Store, early: bool
) -> None:
    state: dict[str, Any] = {
        "old": torch.randn(3 << 18),
        "new": torch.randn(3 << 18),
        "zeros": torch.zeros(3 << 18),
    }
    state["tied"] = state["old"].clone()
    sender = start(store)
    store.commit({"old": state["old"], "zeros": state["zeros"]})
    receiver = start() if early else start(state_dict=lambda: {"new": torch.zeros(5)})
    sender.send_checkpoint([1], 1, state, SOON)
    assert sender.staged_bytes == 3 << 20
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_receiver_takes_from_its_store_what_its_live_state_lacks(
    start: Start, store: Store, in_place: bool
) -> None:
    state = state_of(6)
    old = copy_of(state)
    weights_of(old)["a"].zero_()
    store.commit({"any key": weights_of(state)})
    sender, receiver = start(), start(store, state_dict=lambda: old, in_place=in_place)
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == METADATA_CHUNKS


@pytest.mark.parametrize("told", ["the id of another chunk", "nothing", "too little"])
def test_what_a_peer_says_of_ids_is_not_believed(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    state = state_of(6)
    old = copy_of(state)
    weights_of(old)["a"].zero_()
    other = memoryview(weights_of(state)["b"].numpy()).cast("B")[: 1 << 20]
    said: dict[str, Any] = {"the id of another chunk": [digest(other)], "nothing": [b""]}

    def ids(self: ServedState, names: list[bytes]) -> list[bytes]:
        return said.get(told, [b"short"])[:1] * len(names)

    store.commit({"any key": weights_of(state)})
    sender, receiver = start(), start(store, state_dict=lambda: old, in_place=True)
    sender.send_checkpoint([1], 1, state, SOON)
    monkeypatch.setattr(ServedState, "ids", ids)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 3 + METADATA_CHUNKS


def test_the_oldest_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "NAMES_MAX", 2)
    names = SecondNames(name_of)
    some = [memoryview(bytes([i])) for i in range(3)]
    for data in (*some[:2], some[0], some[2]):
        names.learn(data)
    assert [names.id_of(name_of(data)) for data in some] == [
        digest(some[0]),
        None,
        digest(some[2]),
    ]
