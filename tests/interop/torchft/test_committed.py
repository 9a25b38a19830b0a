"""Transports know the chunks of the store's last commits by their checksums; only verified bytes
arrive.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import checksum, digest
from ckptstore.errors import CkptStoreError
from ckptstore.interop.torchft import offer
from ckptstore.interop.torchft.wire import name_of
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


def commit(place: Path, state: Any, **options: Any) -> None:
    with ckptstore.open(place, **options) as store:
        store.commit({"any key": weights_of(state)})


def committed(place: Path, state: Any) -> Store:
    """A store in which this object commits."""
    store = ckptstore.open(place)
    store.commit({"any key": weights_of(state)})
    return store


def committed_behind(place: Path, state: Any) -> Store:
    store = ckptstore.open(place)
    store.commit_async({"any key": weights_of(state)}).wait()
    return store


def committed_by_a_worker_process(place: Path, state: Any) -> Store:
    store = ckptstore.open(place, background=ckptstore.Async(executor="process"))
    store.commit_async({"any key": weights_of(state)}).wait()
    return store


def committed_by_another(place: Path, state: Any) -> Store:
    """As by another rank."""
    store = ckptstore.open(place)
    store.commit({"any key": {"w": torch.zeros(5)}})
    commit(place, state)
    return store


def resumed(place: Path, state: Any) -> Store:
    commit(place, state)
    store = ckptstore.open(place)
    store.resume({"any key": copy_of(weights_of(state))})
    return store


def restored_from_another_run(place: Path, state: Any) -> Store:
    commit(place, state, run="other")
    commit(place, {"user": {"default": {"model": {"w": torch.zeros(5)}}}})
    store = ckptstore.open(place)
    store.checkout("other@latest").restore({"any key": copy_of(weights_of(state))})
    return store


@pytest.mark.parametrize(
    "opened",
    [
        committed,
        committed_behind,
        committed_by_a_worker_process,
        committed_by_another,
        resumed,
        restored_from_another_run,
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_committed_last_is_served_from_the_store(
    start: Start, tmp_path: Path, opened: Callable[[Path, Any], Store], in_place: bool
) -> None:
    state = state_of(6)
    old, wanted = copy_of(state), copy_of(state)
    weights_of(old)["b"][5, 5] += 1
    with opened(tmp_path / "store", state) as store:
        sender, receiver = start(store), start(state_dict=lambda: old, in_place=in_place)
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 0
        weights_of(state)["b"].zero_()
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), wanted)
    assert receiver.received is not None and receiver.received.fetched_chunks == 1 + METADATA_CHUNKS


def test_each_commit_takes_the_place_of_the_one_before(start: Start, store: Store) -> None:
    state, new = state_of(4), state_of(4, seed=2)
    sender, receiver = start(store), start()
    for step, (committed, staged) in enumerate([(state, 4), (new, 0)]):
        store.commit({"any key": weights_of(committed)})
        sender.send_checkpoint([1], step, new, SOON)
        assert sender.staged_bytes == staged << 20
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), step, SOON), new)


def test_a_chunk_that_is_known_and_was_collected_is_copied(start: Start, tmp_path: Path) -> None:
    state = state_of(4)
    with ckptstore.open(tmp_path / "store") as store:
        sender, receiver = start(store), start()
        first = store.commit({"any key": weights_of(state)}, step=1)
        for step in (2, 3):
            store.commit({"other": step}, step=step)
        store.forget([first.id])
        store.gc(max_unused=0.0, force=True, grace_s=0)
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 4 << 20
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


def test_what_the_index_says_of_another_chunk_is_noticed(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(2)
    sender, receiver = start(store), start()
    store.commit({"any key": weights_of(state)})
    one, other = (memoryview(weights_of(state)[name].numpy()).cast("B") for name in ("a", "b"))
    with monkeypatch.context() as patch:
        wrong = {checksum(one): digest(other)}
        patch.setattr(internals_of(store), "committed_chunks", lambda: wrong)
        sender.send_checkpoint([1], 1, state, SOON)
    assert sender.staged_bytes == 1 << 20
    with pytest.raises(CkptStoreError, match="damaged"):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
    sender.send_checkpoint([1], 2, state, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), state)


def test_a_tensor_that_is_written_to_while_it_is_looked_for_is_served_as_it_was_copied(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of copies are made of the copies."""
    state = state_of(6)
    store.commit({"any key": weights_of(state)})
    weights_of(state)["a"][0, 0] += 1
    sender, receiver = start(store), start()

    def name_and_write(data: memoryview) -> bytes:
        name = name_of(data)
        if weights_of(state)["a"][:, 1].any():
            weights_of(state)["a"][:, 1] = 0
        return name

    with monkeypatch.context() as patch:
        patch.setattr(offer, "name_of", name_and_write)
        sender.send_checkpoint([1], 1, state, SOON)
    assert sender.staged_bytes > 0
    got = receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
    assert receiver.received is not None and receiver.received.retried == 0
    rows = 256
    for i in range(0, len(weights_of(state)["a"]), rows):
        chunk = weights_of(got)["a"][i : i + rows]
        written, before = weights_of(state)["a"][i : i + rows], state_of(6)["user"]["default"]
        assert torch.equal(chunk, written) or torch.equal(
            chunk, before["model"]["a"][i : i + rows]
        ), i


@pytest.mark.parametrize("fits", [True, False])
def test_a_sample_without_committed_chunks_ends_the_search_if_all_copies_fit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    chunks, stored = 1024, 64
    state = {"w": torch.randn(chunks, SMALL // 4)}
    looked = list[memoryview]()

    def name(data: memoryview) -> bytes:
        looked.append(data)
        return name_of(data)

    monkeypatch.setattr(offer, "name_of", name)
    monkeypatch.setattr(offer, "SAMPLE_BATCHES", 2)
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=SMALL)) as store:
        store.commit({"part": state["w"][-stored:].clone()})
        copied = chunks if fits else chunks - stored
        sender, receiver = start(store, staging_bytes=copied * SMALL), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert len(looked) - METADATA_CHUNKS == (chunks // 4 if fits else chunks)
        assert sender.staged_bytes == copied * SMALL
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


@pytest.mark.parametrize("why", ["of another chunk", "not there", "unreadable commit"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_receiver_whose_store_is_wrong_takes_everything_from_its_peer(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch, why: str, in_place: bool
) -> None:
    state = state_of(6)
    old = copy_of(state)
    weights_of(old)["a"].zero_()
    store.commit({"any key": weights_of(state)})
    internals = internals_of(store)
    if why == "unreadable commit":

        def unreadable(commits: object) -> None:
            raise ckptstore.Corrupt("as injected")

        monkeypatch.setattr(internals, "_ids_by_checksum", unreadable)
    else:
        other = memoryview(weights_of(state)["b"].numpy()).cast("B")[: 1 << 20]
        said = digest(other) if why == "of another chunk" else bytes(32)
        wrong = dict.fromkeys(internals.committed_chunks(), said)
        assert len(wrong) == 6
        monkeypatch.setattr(internals, "committed_chunks", lambda: wrong)
    sender, receiver = start(), start(store, state_dict=lambda: old, in_place=in_place)
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 3 + METADATA_CHUNKS


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_receiver_that_has_restarted_takes_what_it_can_from_its_store(
    start: Start, tmp_path: Path, executor: Any
) -> None:
    state = state_of(6)
    commit(tmp_path / "store", state)
    weights_of(state)["b"][5, 5] += 1
    options = {"background": ckptstore.Async(executor=executor)}
    with ckptstore.open(tmp_path / "store", **options) as store:
        sender, receiver = start(), start(store)
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 1 + METADATA_CHUNKS
