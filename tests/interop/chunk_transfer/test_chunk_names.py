"""Chunks travel by quick names if no store takes part, and by ids if one does."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.core.ids import CHUNK_ID_BYTES, digest
from ckptstore.interop.chunk_transfer.chunk_names import BLAKE3, NAMINGS, XXH3, is_named, quick_name
from ckptstore.interop.chunk_transfer.protocol import decode_invitation, decode_number
from ckptstore.interop.chunk_transfer.served_state import ServedState, make_offer
from ckptstore.interop.torchft import StoreTransport
from tests.interop.chunk_transfer.conftest import (
    SOON,
    Start,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)
from tests.interop.chunk_transfer.test_outlines import Halting


def served(sender: StoreTransport[Any]) -> ServedState:
    offer = sender._publication._offer
    assert offer is not None
    return offer


@given(st.binary(max_size=2000), st.sampled_from(list(NAMINGS)), st.data())
def test_a_name_says_of_which_kind_it_is_and_is_that_of_no_other_bytes(
    some: bytes, names: str, data: st.DataObject
) -> None:
    name = NAMINGS[names](some)
    assert len(name) == CHUNK_ID_BYTES and decode_number(name) is None
    assert is_named(memoryview(some), name)
    assert quick_name(some) != digest(some)
    changed = bytearray(some or b"\0")
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not is_named(changed, name)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("theirs", "live", "names"),
    [
        (False, True, XXH3),
        (True, True, XXH3),
        (False, False, XXH3),
        (True, False, BLAKE3),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_ids_are_made_for_a_receiver_that_has_no_more_than_a_store(
    start: Start, tmp_path: Path, ours: bool, theirs: bool, live: bool, names: str, in_place: bool
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
        assert served(sender)._descriptions.keys() == {XXH3, names}


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


def test_a_sender_whose_store_cannot_be_written_to_gives_quick_names(
    start: Start, tmp_path: Path
) -> None:
    ckptstore.open(tmp_path / "store").close()
    state = state_of(4)
    with ckptstore.open(tmp_path / "store", read_only=True) as store:
        sender, receiver = start(store), start(state_dict=lambda: copy_of(state))
        assert decode_invitation(sender.metadata()).names == XXH3
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 2


def test_a_state_is_withdrawn_while_its_chunks_get_ids(start: Start) -> None:
    state = {"w": torch.randn(32 * 256, 1024)}
    sender = start()
    halted = threading.Event()

    def until_closed() -> None:
        halted.set()
        while not offer._closed:
            threading.Event().wait(0.001)

    offer = make_offer(
        state, 1, chunk_bytes=1 << 20, pool=sender._pool, threads=sender._threads, guard=None
    )
    offer.fill()
    offer._threads = Halting(until_closed)
    assert offer.describe(BLAKE3, early=False, wait_s=0) is None
    assert halted.wait(SOON.total_seconds())
    offer.close()
    assert offer._renaming is not None and not offer._renaming.is_alive()
    assert offer.describe(BLAKE3, early=False, wait_s=0) is None
