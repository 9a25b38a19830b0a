"""Peers that lie, disconnect or are dead are refused or passed over; never a wrong tensor."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ckptstore.errors import Corrupt, Unavailable
from tests.interop.torchft.conftest import (
    IMPATIENT,
    SOON,
    Start,
    Wire,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)


def flipping(at: int) -> Callable[[bytes], bytes]:
    """Flips one bit of the byte at offset `at`."""
    passed = 0

    def flip(data: bytes) -> bytes:
        nonlocal passed
        start, passed = passed, passed + len(data)
        if not start <= at < passed:
            return data
        changed = bytearray(data)
        changed[at - start] ^= 0x10
        return bytes(changed)

    return flip


def cutting(proxy: Any, after: int) -> Callable[[bytes], bytes]:
    """Resets all connections, once, after this many bytes."""
    passed = 0

    def count(data: bytes) -> bytes:
        nonlocal passed
        before, passed = passed, passed + len(data)
        if before < after <= passed:
            proxy.drop()
        return data

    return count


def test_a_bit_flipped_on_the_wire_is_noticed_and_its_chunk_asked_for_again(
    start: Start, wire: Wire
) -> None:
    state = state_of(8)
    sender, receiver = start(), start(connections=1)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    proxy.faults.spoil = flipping(5 << 20)
    assert_same(receiver.recv_checkpoint(0, metadata, 1, SOON), state)
    assert receiver.received is not None
    assert receiver.received.retried == 1
    assert receiver.received.fetched_chunks == receiver.received.chunks + 1


def test_a_bit_flipped_anywhere_is_never_a_wrong_state(start: Start, wire: Wire) -> None:
    state = {"w": state_of(2)["user"]["default"]["model"]["a"][:20].clone(), "n": list(range(300))}
    sender, receiver = start(), start(connections=1, patience=IMPATIENT)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    seen: list[int] = []
    proxy.faults.spoil = lambda data: seen.append(len(data)) or data  # type: ignore[func-returns-value]
    assert_same(start(connections=1).recv_checkpoint(0, metadata, 1, SOON), state)
    for at in [*range(0, 1200, 53), *range(1200, sum(seen), sum(seen) // 12)]:
        proxy.faults.spoil = flipping(at)
        with suppress(Corrupt, Unavailable):  # the damaged byte may be in the peer's hello
            assert_same(receiver.recv_checkpoint(0, metadata, 1, SOON), state)


@pytest.mark.parametrize("connections", [2, 8])
def test_a_cut_connection_goes_on_where_it_was(start: Start, wire: Wire, connections: int) -> None:
    """Any number of connections that break together is one failure."""
    state = state_of(24)
    sender, receiver = start(), start(connections=connections)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    proxy.faults.spoil = cutting(proxy, after=13 << 20)
    assert_same(receiver.recv_checkpoint(0, metadata, 1, SOON), state)
    assert receiver.received is not None
    assert receiver.received.retried > 0
    assert (
        receiver.received.fetched_chunks == receiver.received.chunks
    )  # each was received whole once


def test_a_chunk_that_came_damaged_before_a_cut_is_asked_for_again(
    start: Start, wire: Wire
) -> None:
    state = state_of(8)
    sender, receiver = start(), start(connections=1)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    flip, cut = flipping(2 << 20), cutting(proxy, after=5 << 20)
    proxy.faults.spoil = lambda data: cut(flip(data))
    assert_same(receiver.recv_checkpoint(0, metadata, 1, SOON), state)
    assert receiver.received is not None and receiver.received.retried > 1


def dying(proxy: Any, after: int) -> Callable[[bytes], bytes]:
    """Refuses everything after this many bytes."""
    passed = 0

    def count(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        if passed > after:
            proxy.faults.refuse = True
            proxy.drop()
        return data

    return count


def test_what_came_before_a_failure_is_not_asked_for_by_the_next_call(
    start: Start, wire: Wire
) -> None:
    state = state_of(24)
    sender, receiver = start(), start(connections=1)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    proxy.faults.spoil = dying(proxy, after=20 << 20)
    with pytest.raises(Unavailable):
        receiver.recv_checkpoint(0, metadata, 1, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None
    assert (
        receiver.received.fetched_chunks < receiver.received.chunks
    )  # the last were in buffers when the peer died


def test_what_came_before_a_failure_is_freed_by_a_transfer_of_another_state(
    start: Start, wire: Wire
) -> None:
    sender, receiver = start(), start(connections=1)
    for step in (1, 2):
        sender.send_checkpoint([1], step, state_of(24, seed=step), SOON)
        metadata, proxy = wire(sender)
        proxy.faults.spoil = dying(proxy, after=20 << 20)
        with pytest.raises(Unavailable):
            receiver.recv_checkpoint(0, metadata, step, SOON)
    sender.send_checkpoint([1], 3, state_of(24, seed=1), SOON)
    receiver.recv_checkpoint(0, sender.metadata(), 3, SOON)
    assert receiver.received is not None
    assert receiver.received.fetched_chunks == receiver.received.chunks


def test_a_peer_that_always_sends_other_bytes_is_refused(start: Start, wire: Wire) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state_of(4), SOON)
    metadata, proxy = wire(sender)
    proxy.faults.spoil = lambda data: data if len(data) < 20_000 else bytes(len(data))
    with pytest.raises((Corrupt, Unavailable)):
        receiver.recv_checkpoint(0, metadata, 1, SOON)


def test_in_place_a_transfer_that_fails_leaves_verified_bytes_only(
    start: Start, wire: Wire
) -> None:
    state, live = state_of(6), state_of(6, seed=2)
    before = copy_of(live)
    sender, receiver = start(), start(state_dict=lambda: live, in_place=True)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    proxy.faults.spoil = lambda data: data if len(data) < 20_000 else bytes(len(data))
    with pytest.raises((Corrupt, Unavailable)):
        receiver.recv_checkpoint(0, metadata, 1, SOON)
    for name, tensor in weights_of(live).items():
        pieces = (
            each.view(-1).split(1 << 18)
            for each in (tensor, weights_of(before)[name], weights_of(state)[name])
        )
        for got, old, new in zip(*pieces, strict=True):
            assert got.equal(old) or got.equal(new)


def test_of_several_peers_all_give_and_those_that_cannot_are_passed_over(
    start: Start, wire: Wire
) -> None:
    state = state_of(32)
    good, second, damaged, behind = start(), start(), start(), start()
    for sender in (good, second, damaged):
        sender.send_checkpoint([3], 4, state, SOON)
    behind.send_checkpoint([3], 3, state_of(1), SOON)
    dead = start()
    dead.shutdown()
    given, sources = [0, 0], []
    gave = threading.Event(), threading.Event()
    for number, sender in enumerate((good, second)):
        metadata, proxy = wire(sender)

        def count(data: bytes, number: int = number) -> bytes:
            """None gives all before the other one has begun: a busy machine may let it wait for so
            long."""
            given[number] += len(data)
            if given[number] > 1 << 20:
                gave[number].set()
            if given[number] > 4 << 20:
                gave[1 - number].wait(SOON.total_seconds())
            return data

        proxy.faults.spoil = count
        sources.append(metadata)
    metadata, proxy = wire(damaged)
    proxy.faults.spoil = lambda data: data if len(data) < 20_000 else bytes(len(data))
    receiver = start(connections=2)
    assert_same(
        receiver.recv_from([dead.metadata(), behind.metadata(), *sources, metadata], 4, SOON), state
    )
    assert min(given) > 1 << 20


def test_peers_that_disagree_about_a_state_never_give_a_mixture(start: Start) -> None:
    states = [state_of(8, seed=seed) for seed in (1, 2)]
    weights_of(states[1])["a"] = weights_of(states[0])[
        "a"
    ].clone()  # half of the chunks are the same
    senders = [start(), start()]
    for sender, state in zip(senders, states, strict=True):
        sender.send_checkpoint([2], 1, state, SOON)
    receiver = start()
    got = receiver.recv_from([sender.metadata() for sender in senders], 1, SOON)
    assert_same(
        got, states[0] if weights_of(got)["b"].equal(weights_of(states[0])["b"]) else states[1]
    )
    assert receiver.received is not None and receiver.received.retried == 0
