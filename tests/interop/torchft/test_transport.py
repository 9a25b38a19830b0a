"""What a transport carries, when and to which peers it serves, and which chunks it does not request
because they are local.
"""

import ctypes
import importlib.util
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
import ckptstore.interop.torchft.transport as transport_module
from ckptstore.errors import Conflict, InvalidInput, Unavailable
from ckptstore.interop.torchft import StoreTransport
from ckptstore.interop.torchft.wire import decode_invitation, encode_invitation
from tests.interop.torchft.conftest import (
    SOON,
    Start,
    Wire,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)

METADATA_CHUNKS = 2
"""A schema and a page."""


def receive(
    transport: StoreTransport[Any],
    sender: StoreTransport[Any],
    step: int = 1,
    timeout: timedelta = SOON,
) -> Any:
    return transport.recv_checkpoint(0, sender.metadata(), step, timeout)


def every_kind() -> dict[str, Any]:
    base = torch.arange(300_000, dtype=torch.float32)
    return {
        "large": torch.randn(700, 1000),
        "transposed": torch.randn(300, 200).t(),
        "half": torch.randn(1000).to(torch.bfloat16),
        "complex": torch.randn(500, dtype=torch.complex64).conj(),
        "bool": torch.rand(1000) > 0.5,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "view": base[1000:2000],
        "parameter": torch.nn.Parameter(torch.randn(40, 40)),
        "nested": [
            {"lr": 1e-3, "betas": (0.9, 0.999)},
            None,
            True,
            "text",
            b"x" * 5000,
            float("inf"),
        ],
        0: {"int key": -1},
    }


def test_a_state_of_every_kind_arrives_as_it_was_sent(start: Start) -> None:
    state = every_kind()
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state | {"transposed": state["transposed"]})


def test_tensors_that_were_tied_are_tied_again_and_travel_once(start: Start) -> None:
    shared = torch.randn(1024, 512)
    sender, receiver = start(), start()
    sender.send_checkpoint(
        [1], 1, {"embedding": shared, "head": shared, "twice": shared.clone()}, SOON
    )
    got = receive(receiver, sender)
    assert got["embedding"] is got["head"] and got["twice"] is not got["head"]
    assert receiver.received is not None and receiver.received.fetched_bytes < 2 * shared.nbytes


def test_what_is_served_does_not_change_with_the_senders_tensors(start: Start) -> None:
    state = state_of(6)
    wanted = copy_of(state)
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state, SOON)
    for tensor in weights_of(state).values():
        tensor.zero_()
    assert_same(receive(receiver, sender), wanted)


def test_another_step_than_the_one_that_is_served_is_refused(start: Start) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 2345, state_of(1), SOON)
    with pytest.raises(Conflict, match="serves step 2345; wanted 1234"):
        receive(receiver, sender, 1234)


def test_nothing_is_served_before_the_first_state_and_after_it_was_disallowed(start: Start) -> None:
    sender, receiver = start(), start()
    with pytest.raises(TimeoutError, match="timed out"):
        receive(receiver, sender, 1, timedelta(milliseconds=10))
    sender.send_checkpoint([1], 1, state_of(1), SOON)
    receive(receiver, sender)
    sender.disallow_checkpoint()
    sender.disallow_checkpoint()
    with pytest.raises(TimeoutError, match="timed out"):
        receive(receiver, sender, 1, timedelta(milliseconds=50))


def test_a_timeout_of_nothing_is_a_timeout(start: Start) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state_of(1), SOON)
    with pytest.raises(TimeoutError):
        receive(receiver, sender, 1, timedelta(0))


def test_a_receiver_that_is_early_gets_the_state_when_it_is_sent(start: Start) -> None:
    state, got = state_of(2), []
    sender, receiver = start(), start()
    early = threading.Thread(target=lambda: got.append(receive(receiver, sender, 5)))
    early.start()
    while not sender._server._open:  # until it has connected
        time.sleep(0.001)
    sender.send_checkpoint([1], 5, state, SOON)
    early.join()
    assert_same(got[0], state)


def test_one_state_follows_another_in_the_same_staging_memory(start: Start) -> None:
    sender, receiver = start(staging_bytes=8 << 20), start()
    for step in range(4):
        state = state_of(6, seed=step)
        sender.send_checkpoint([1], step, state, SOON)
        assert_same(receive(receiver, sender, step), state)


def test_a_state_that_does_not_fit_into_the_staging_memory_is_refused_and_nothing_is_served(
    start: Start,
) -> None:
    sender, receiver = start(staging_bytes=2 << 20), start()
    with pytest.raises(InvalidInput, match="staging_bytes"):
        sender.send_checkpoint([1], 1, state_of(6), SOON)
    with pytest.raises(TimeoutError):
        receive(receiver, sender, 1, timedelta(milliseconds=20))


def test_a_copy_that_fails_is_not_served_and_gives_its_memory_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(6)
    sender, receiver = start(staging_bytes=8 << 20), start()

    def fail(*_: object) -> None:
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", fail)
        with pytest.raises(OSError, match="the device is gone"):
            sender.send_checkpoint([1], 1, state, SOON)
    with pytest.raises(TimeoutError):
        receive(receiver, sender, 1, timedelta(milliseconds=20))
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)


def test_chunks_that_are_alike_travel_once(start: Start) -> None:
    state = {
        "new": torch.randn(4, 256, 1024),
        "zeros": torch.zeros(4, 256, 1024),
        "again": torch.zeros(4, 256, 1024),
    }
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)
    assert receiver.received is not None and receiver.received.fetched_bytes < 6 << 20


def test_an_object_that_only_a_pickle_could_carry_is_refused_by_its_path(start: Start) -> None:
    with pytest.raises(InvalidInput, match="state/user/hook"):
        start().send_checkpoint([1], 1, {"user": {"hook": threading.Lock()}}, SOON)


def test_only_chunks_that_the_live_state_lacks_are_asked_for(start: Start, wire: Wire) -> None:
    state = state_of(12)
    live = copy_of(state)
    weights_of(state)["a"][300, 5] += 1  # the second chunk of six
    weights_of(state)["b"][0, 0] += 1
    before = copy_of(live)
    sender, receiver = start(), start(state_dict=lambda: live)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    came: list[int] = []
    proxy.faults.spoil = lambda data: came.append(len(data)) or data  # type: ignore[func-returns-value]
    assert_same(receiver.recv_checkpoint(0, metadata, 1, SOON), state)
    assert receiver.received is not None
    assert receiver.received.fetched_chunks == 2 + METADATA_CHUNKS
    assert 2 << 20 <= receiver.received.fetched_bytes < (2 << 20) + 10_000
    assert (
        sum(came) < receiver.received.fetched_bytes + 10_000
    )  # on the wire, with heads and description
    assert (
        receiver.received.requests == 1 + 1 + 2
    )  # the description, its schema and page, a chunk on each of two connections
    assert_same(live, before)


def test_a_chunk_counts_wherever_the_live_state_has_it(start: Start) -> None:
    state = state_of(6)
    sender, receiver = start(), start(state_dict=lambda: {"renamed": copy_of(weights_of(state))})
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == METADATA_CHUNKS


def test_chunks_that_changed_places_are_not_asked_for(start: Start) -> None:
    a, b, c = torch.randn(700, 1000), torch.randn(700, 1000), torch.randn(700, 1000)
    live = {
        "x": b.clone(),
        "y": a.clone(),
        "other size": c.clone(),
        "z": torch.zeros(350_000, dtype=torch.complex64),
    }
    state = {"x": a, "y": b, "other size": torch.randn(10, 1000), "z": c}
    before = copy_of(live)
    sender, receiver = start(), start(state_dict=lambda: live)
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == 1 + METADATA_CHUNKS
    assert_same(live, before)


def test_in_place_the_live_tensors_take_what_came_and_keep_what_they_had(start: Start) -> None:
    state = state_of(12)
    live = copy_of(state)
    weights_of(state)["a"][300, 5] += 1
    addresses = {name: tensor.data_ptr() for name, tensor in weights_of(live).items()}
    sender, receiver = start(), start(state_dict=lambda: live, in_place=True)
    sender.send_checkpoint([1], 1, state, SOON)
    got = receive(receiver, sender)
    assert_same(got, state)
    assert_same(weights_of(live), weights_of(state))
    assert {name: tensor.data_ptr() for name, tensor in weights_of(got).items()} == addresses
    assert receiver.received is not None and receiver.received.fetched_chunks == 1 + METADATA_CHUNKS


def test_in_place_exchanged_tensors_and_strided_ones_become_what_was_sent(start: Start) -> None:
    a, b, strided = torch.randn(512, 512), torch.randn(512, 512), torch.randn(600, 500)
    state = {"x": a, "y": b, "strided": strided, "small": torch.arange(3)}
    live = {
        "x": b.clone(),
        "y": a.clone(),
        "strided": torch.zeros(500, 600).t(),
        "small": torch.zeros(3, dtype=torch.int64),
    }
    sender, receiver = start(), start(state_dict=lambda: live, in_place=True)
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)
    assert_same(live, state)


def test_in_place_live_tensors_that_share_memory_are_left_alone(start: Start) -> None:
    flat = torch.zeros(400_000)
    live = {"whole": flat, "part": flat[:200_000], "tied": flat}
    state = {
        "whole": torch.randn(400_000),
        "part": torch.randn(200_000),
        "tied": torch.randn(400_000),
    }
    sender, receiver = start(), start(state_dict=lambda: live, in_place=True)
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receive(receiver, sender), state)


def test_a_committed_state_is_served_from_the_store_without_a_copy(
    start: Start, tmp_path: Path
) -> None:
    state = state_of(6)
    wanted = copy_of(state)
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"any key": weights_of(state)})
        sender, receiver = start(store), start()
        sender.send_checkpoint([1], 1, state, SOON)
        assert sender.staged_bytes == 0
        weights_of(state)["a"].zero_()
        assert_same(receive(receiver, sender), wanted)
        sender.send_checkpoint([1], 2, state, SOON)
        assert sender.staged_bytes == 3 << 20  # the zeros; the store has the rest
        assert_same(receive(receiver, sender, 2), state)


def test_the_local_store_counts_as_what_is_here(start: Start, tmp_path: Path) -> None:
    state = state_of(6)
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"any key": weights_of(state)})
        sender, receiver = start(), start(store)
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receive(receiver, sender), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == METADATA_CHUNKS


def test_what_was_received_is_committed_as_what_was_sent(start: Start, tmp_path: Path) -> None:
    state = state_of(2)
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state, SOON)
    got = receive(receiver, sender)
    with ckptstore.open(tmp_path / "store") as store:
        assert (
            store.commit(got["user"]["default"]).content_id
            == store.commit(state["user"]["default"]).content_id
        )


def test_a_store_with_another_chunk_size_takes_part(start: Start, tmp_path: Path) -> None:
    state = state_of(4)
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=64 << 10)
    ) as store:
        sender, receiver = start(store), start(state_dict=lambda: state)
        sender.send_checkpoint([1], 1, state, SOON)
        assert_same(receive(receiver, sender), state)
    assert receiver.received is not None and receiver.received.fetched_chunks == METADATA_CHUNKS


def test_a_state_larger_than_allowed_is_refused_before_memory_is_taken(start: Start) -> None:
    sender, receiver = start(), start(max_bytes=1 << 20)
    sender.send_checkpoint([1], 1, state_of(2), SOON)
    with pytest.raises(InvalidInput, match="max_bytes"):
        receive(receiver, sender)


def test_metadata_of_another_transport_and_a_wrong_token_are_refused(start: Start) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state_of(1), SOON)
    with pytest.raises(InvalidInput, match="no metadata of a StoreTransport"):
        receiver.recv_checkpoint(0, "http://host:1234/checkpoint/", 1, SOON)
    wrong = encode_invitation(replace(decode_invitation(sender.metadata()), token="0" * 64))
    with pytest.raises(InvalidInput, match="not the token"):
        receiver.recv_checkpoint(0, wrong, 1, SOON)


def test_the_token_is_not_shown(start: Start) -> None:
    sender = start()
    invitation = decode_invitation(sender.metadata())
    assert invitation.token not in repr(invitation)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_a_transport_is_reached_over_ipv4_and_ipv6(start: Start, host: str) -> None:
    try:
        sender = start(host=host)
    except OSError:
        pytest.skip(f"this host has no {host}")
    receiver = start()
    sender.send_checkpoint([1], 1, {"x": 1}, SOON)
    assert receive(receiver, sender) == {"x": 1}


def test_an_address_that_leads_nowhere_does_not_hide_one_that_leads_there(start: Start) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, {"x": 1}, SOON)
    invitation = decode_invitation(sender.metadata())
    unreachable = (("192.0.2.77", 9), ("2001:db8::77", 9))
    metadata = encode_invitation(
        replace(invitation, addresses=(*unreachable, *invitation.addresses))
    )
    assert receiver.recv_checkpoint(0, metadata, 1, SOON) == {"x": 1}


def test_after_shutdown_nobody_answers(start: Start) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, {"x": 1}, SOON)
    sender.shutdown()
    sender.shutdown()
    with pytest.raises(Unavailable, match="no transport of this id answers"):
        receive(receiver, sender)


def test_without_torchft_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.checkpointing.transport", None)
    spec = importlib.util.spec_from_file_location("again", transport_module.__file__)
    assert spec and spec.loader
    with pytest.raises(ImportError, match=r'pip install "ckptstore\[torchft\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_in_place_needs_a_live_state(start: Start) -> None:
    with pytest.raises(InvalidInput, match="state_dict"):
        start(in_place=True)
