"""A peer without any chunks takes copied chunks while others are copied, and nothing counts before
it is described.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch

from ckptstore.errors import CkptStoreError
from ckptstore.interop.chunk_transfer import server
from ckptstore.interop.chunk_transfer.offer import make_offer
from ckptstore.interop.torchft import StoreTransport
from ckptstore.repository.thread_pool import ThreadPool
from tests.interop.chunk_transfer.conftest import (
    SOON,
    Start,
    Wire,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)
from tests.interop.chunk_transfer.test_peers import flipping
from tests.support.servers.proxy import Proxy

T = TypeVar("T")
MIB = 1 << 20


class Halting(ThreadPool):
    """Does the first half of the work, waits for a signal, and then finishes or fails."""

    def __init__(self, may_go_on: Callable[[], object], *, fails: bool = False) -> None:
        super().__init__(2)
        self._may_go_on, self._fails = may_go_on, fails

    def spread(
        self, task: Callable[[T], object], items: Sequence[T], *, max_workers: int | None = None
    ) -> None:
        half = len(items) // 2
        for item in items[:half]:
            task(item)
        self._may_go_on()
        if self._fails:
            raise OSError("the device is gone")
        for item in items[half:]:
            task(item)


class Receiving:
    """A receiver in a thread; `came` is the number of bytes so far."""

    def __init__(
        self,
        receiver: StoreTransport[Any],
        metadata: str,
        proxy: Proxy,
        spoil: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        self.came, self._spoil = 0, spoil
        self.got: Any = None
        self.error: CkptStoreError | None = None
        proxy.faults.spoil = self._count
        self._thread = threading.Thread(target=self._receive, args=(receiver, metadata))
        self._thread.start()

    def until_came(self, nbytes: int) -> None:
        end = time.monotonic() + SOON.total_seconds()
        while self.came < nbytes:
            assert time.monotonic() < end, (
                f"{self.came} bytes came of {nbytes} that had been copied"
            )
            time.sleep(0.001)

    def result(self) -> Any:
        self._thread.join()
        if self.error:
            raise self.error
        return self.got

    def _count(self, data: bytes) -> bytes:
        self.came += len(data)
        return self._spoil(data)

    def _receive(self, receiver: StoreTransport[Any], metadata: str) -> None:
        try:
            self.got = receiver.recv_checkpoint(0, metadata, 1, SOON)
        except CkptStoreError as error:
            self.error = error


def large_state() -> dict[str, Any]:
    """Four batches of work, and leaves of other kinds."""
    others = {
        "bytes": b"x" * 200_000,
        "transposed": torch.randn(600, 700).t(),
        "scalar": torch.tensor(3),
        "none": None,
    }
    return state_of(32) | {"others": others}


def test_what_has_been_copied_is_taken_while_the_rest_is(start: Start, wire: Wire) -> None:
    state = large_state()
    wanted = copy_of(state)
    sender, receiver = start(), start()
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy)
    sender._threads = Halting(lambda: receiving.until_came(12 * MIB))
    sender.send_checkpoint([1], 1, state, SOON)
    for tensor in weights_of(state).values():
        tensor.zero_()
    assert_same(receiving.result(), wanted)
    took = receiver.received
    assert took is not None and (took.fetched_chunks, took.fetched_bytes, took.retried) == (
        took.chunks,
        took.nbytes,
        0,
    )


def test_a_bit_that_flips_before_the_state_is_described_is_noticed_afterwards(
    start: Start, wire: Wire
) -> None:
    state = large_state()
    sender, receiver = start(), start(connections=1)
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy, flipping(5 * MIB))
    sender._threads = Halting(lambda: receiving.until_came(12 * MIB))
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiving.result(), state)
    assert receiver.received is not None and receiver.received.retried == 1


def test_chunks_that_are_alike_travel_once_all_the_same(start: Start, wire: Wire) -> None:
    state = {
        "new": torch.randn(16, 256, 1024),
        "zeros": torch.zeros(16, 256, 1024),
        "again": torch.zeros(16, 256, 1024),
    }
    sender, receiver = start(), start()
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy)
    sender._threads = Halting(lambda: receiving.until_came(15 * MIB))
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiving.result(), state)
    assert receiver.received is not None and receiver.received.fetched_bytes < 18 * MIB


def test_who_has_a_state_waits_for_the_description_and_asks_for_what_it_lacks(
    start: Start, wire: Wire
) -> None:
    state = large_state()
    live = copy_of(state)
    weights_of(state)["a"][0, 0] += 1
    sender, receiver = start(), start(state_dict=lambda: live)
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy)
    sender._threads = Halting(lambda: receiving.until_came(1))
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiving.result(), state)
    assert receiving.came < 2 * MIB


def test_a_sender_that_fails_while_it_copies_gives_nothing_and_what_came_is_not_asked_for_again(
    start: Start, wire: Wire
) -> None:
    state = large_state()
    sender, receiver = start(), start(patience=timedelta(seconds=1))
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy)
    threads, sender._threads = (
        sender._threads,
        Halting(lambda: receiving.until_came(12 * MIB), fails=True),
    )
    with pytest.raises(OSError, match="the device is gone"):
        sender.send_checkpoint([1], 1, state, SOON)
    with pytest.raises(CkptStoreError):
        receiving.result()
    sender._threads = threads
    sender.send_checkpoint([1], 1, state, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None and receiver.received.fetched_bytes < 28 * MIB


def test_an_outline_that_is_not_kept_to_gives_the_state_that_is_described(
    start: Start, wire: Wire
) -> None:
    """As when a sender is restarted at the same step: schemas may be equal, and values not."""
    sender, receiver = start(), start()
    first, then = ({"w": torch.full((16 * 256, 1024), float(n)), "lr": n} for n in (1, 2))
    options: dict[str, Any] = {"chunk_bytes": MIB, "threads": sender._threads, "pin": None}
    offer, other = (make_offer(state, 1, pool=sender._pool, **options) for state in (first, then))
    metadata, proxy = wire(sender)
    receiving = Receiving(receiver, metadata, proxy)
    sender._server.post(offer)

    def become_the_other() -> None:
        receiving.until_came(MIB)
        other.fill()
        offer._copies, offer._buffer, offer._outline, offer._names, offer._chunks = (
            other._copies,
            other._buffer,
            other._outline,
            other._names,
            offer._chunks | other._chunks,
        )

    offer._threads = Halting(become_the_other)
    offer.fill()
    assert_same(receiving.result(), then)
    other.close()


def test_why_a_sender_failed_is_said_though_a_peer_keeps_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CUTTING_S", 0.01)
    sender = start()
    reader, peer = socket.socketpair()

    def join() -> None:
        sender._server._peers[reader] = server._Peer(None)
        sender._server.join(reader, "transfer", 1, 1.0)

    threads, sender._threads = sender._threads, Halting(join, fails=True)
    with pytest.raises(OSError, match="the device is gone") as failed:
        sender.send_checkpoint([1], 1, large_state(), SOON)
    assert any("1 peers still take a state" in note for note in failed.value.__notes__)
    sender._server._leave(reader)
    reader.close()
    peer.close()
    sender._threads = threads
    sender.send_checkpoint([1], 2, large_state(), SOON)
