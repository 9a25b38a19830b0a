"""Serving from a store: gc spares its chunks meanwhile, damage in it is found, and an unreliable
store is not used.
"""

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore.store import internals_of
from tests.interop.torchft.conftest import (
    SOON,
    Start,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)


def three_commits(place: Path) -> None:
    """One commit of `state_of(6)` that may be removed, and two newer ones that a run always
    keeps.
    """
    with ckptstore.open(place) as store:
        store.commit({"any key": weights_of(state_of(6))}, step=1)
        for step in (2, 3):
            store.commit({"other": step}, step=step)


def test_a_gc_leaves_what_is_served_until_it_is_withdrawn(start: Start, tmp_path: Path) -> None:
    place, state = tmp_path / "store", state_of(6)
    three_commits(place)
    with ckptstore.open(place) as store, ckptstore.open(place) as other:
        sender, receiver = start(store), start()
        first = store.checkout(1)
        first.restore({"any key": copy_of(weights_of(state))})
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 0
        other.forget([first.id])
        assert other.gc(max_unused=0.0, grace_s=0).freed_bytes < 1 << 20
        assert (
            sum(pack.stat().st_size for pack in (place / "packs").rglob("*") if pack.is_file())
            > 6 << 20
        )
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
        sender.disallow_checkpoint()
        assert other.gc(max_unused=0.0, grace_s=0).freed_bytes > 6 << 20


def test_what_a_gc_has_condemned_already_is_copied(start: Start, tmp_path: Path) -> None:
    place, state = tmp_path / "store", state_of(6)
    three_commits(place)
    with ckptstore.open(place) as store, ckptstore.open(place) as other:
        guard = internals_of(store).gc_pin("hold the gc back")
        assert guard is not None
        first = store.checkout(1)
        first.restore({"any key": copy_of(weights_of(state))})
        assert internals_of(store).committed_chunks()
        other.forget([first.id])
        other.gc(max_unused=0.0, grace_s=0)  # it condemns packs and deletes none
        sender, receiver = start(store), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 6 << 20
        guard.end()
        other.gc(max_unused=0.0, force=True, grace_s=0)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


@pytest.mark.parametrize("end", ["disallow", "shut down", "shut down at once", "refuse"])
def test_no_session_outlives_what_was_served(start: Start, tmp_path: Path, end: str) -> None:
    place = tmp_path / "store"
    with ckptstore.open(place) as store:
        store.commit({"any key": weights_of(state_of(2))})
        sender = start(store, staging_bytes=2 << 20)
        if end == "refuse":
            with pytest.raises(ckptstore.InvalidInput, match="staging_bytes"):
                sender.send_checkpoint([1], 1, {"new": torch.randn(1 << 20)}, SOON)
        else:
            sender.send_checkpoint([1], 1, state_of(2), SOON)
            assert len(list((place / "sessions").iterdir())) == 1
        if end == "disallow":
            sender.disallow_checkpoint()
        elif end != "refuse":
            sender.shutdown(wait=end == "shut down")
            sender.shutdown()  # waits for the other one's work
        assert not list((place / "sessions").iterdir())


def test_a_store_that_cannot_be_written_is_not_relied_on(start: Start, tmp_path: Path) -> None:
    place, state = tmp_path / "store", state_of(2)
    with ckptstore.open(place) as store:
        store.commit({"any key": weights_of(state)})
    with ckptstore.open(place, read_only=True) as store:
        sender, receiver = start(store), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 2 << 20
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_is_damaged_in_the_store_of_one_peer_comes_from_another(
    start: Start, tmp_path: Path, codec: str
) -> None:
    state = {"a": torch.randn(1 << 20).bfloat16().float()}  # two of four bytes compress well
    wanted = copy_of(state)
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
        store.commit(state)
        sender, other, receiver = start(store), start(), start()
        sender.send_checkpoint([1], 1, state, SOON)
        other.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 0
        flip_a_bit_of_each_pack(tmp_path / "store")
        state["a"].zero_()
        assert_same(receiver.recv_from([sender.metadata(), other.metadata()], 1, SOON), wanted)
        with pytest.raises(CkptStoreError, match=r"damaged|early"):
            receiver.recv_from([sender.metadata()], 1, SOON)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize(("live", "in_place"), [(False, False), (True, False), (True, True)])
def test_only_what_is_new_travels_whichever_side_has_a_store(
    start: Start, tmp_path: Path, ours: bool, theirs: bool, live: bool, in_place: bool
) -> None:
    state = state_of(6)
    old = copy_of(state)
    weights_of(state)["a"][300, 5] += 1
    with ckptstore.open(tmp_path / "ours") as one, ckptstore.open(tmp_path / "theirs") as other:
        sender = start(*[one] * ours)
        receiver = start(
            *[other] * theirs, **({"state_dict": lambda: old, "in_place": in_place} if live else {})
        )
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
        assert (
            receiver.received is not None
            and receiver.received.fetched_chunks == (1 if live else 6) + 2
        )  # a schema and a page


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_was_found_damaged_in_the_store_is_copied_the_next_time(
    start: Start, tmp_path: Path, codec: str
) -> None:
    state = {"a": torch.randn(1 << 20).bfloat16().float()}
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
        store.commit(state)
        flip_a_bit_of_each_pack(tmp_path / "store")
        sender, receiver = start(store), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 0
        with pytest.raises(CkptStoreError, match=r"damaged|early"):
            receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
        sender.send_checkpoint([1], 2, state, SOON)
        assert sender.staged_bytes == 4 << 20
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), state)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_is_damaged_in_the_store_of_the_receiver_comes_from_its_peer(
    start: Start, tmp_path: Path, codec: str
) -> None:
    state = {"a": torch.randn(1 << 20).bfloat16().float()}
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(codec=codec)) as store:
        store.commit(state)
        flip_a_bit_of_each_pack(tmp_path / "store")
        sender, receiver = start(), start(store)
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks > 2


def test_of_peers_with_and_without_a_store_all_give(start: Start, tmp_path: Path) -> None:
    state = state_of(12)
    with ckptstore.open(tmp_path / "store") as store:
        senders = [start(store), start()]
        for sender in senders:
            sender.send_checkpoint([2], 1, state, SOON)
        receiver = start(connections=1)
        assert_same(receiver.recv_from([sender.metadata() for sender in senders], 1, SOON), state)
    assert (
        receiver.received is not None
        and receiver.received.fetched_chunks == receiver.received.chunks == 12 + 2
    )


def test_a_sender_whose_store_cannot_be_written_to_sends_what_is_missing(
    start: Start, tmp_path: Path
) -> None:
    ckptstore.open(tmp_path / "store").close()
    state = state_of(4)
    with ckptstore.open(tmp_path / "store", read_only=True) as store:
        sender, receiver = start(store), start(state_dict=lambda: copy_of(state))
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 2


def flip_a_bit_of_each_pack(place: Path) -> None:
    """In the first chunk of packs with tensors."""
    for pack in (place / "packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 10_000:
            pack.chmod(0o600)
            data = bytearray(pack.read_bytes())
            data[1000] ^= 1
            pack.write_bytes(data)
