"""Peers that are silent or slow are passed over in time; one that receives slowly delays nobody."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest

from ckptstore.errors import CkptStoreError, Conflict, Unavailable
from ckptstore.interop.torchft.connection import Connection, Deadline, PeerFailed, Route
from ckptstore.interop.torchft.wire import (
    Invitation,
)
from tests.interop.torchft.conftest import (
    IMPATIENT,
    SOON,
    Start,
    Wire,
    assert_same,
    state_of,
    stranger,
)


def test_a_peer_that_falls_silent_is_passed_over(start: Start, wire: Wire) -> None:
    state = state_of(24)
    good, silent = start(), start()
    for sender in (good, silent):
        sender.send_checkpoint([2], 1, state, SOON)
    metadata, proxy = wire(silent)
    passed = 0

    def count(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        if passed > 2 << 20:
            proxy.faults.silent.set()
        return data

    proxy.faults.spoil = count
    receiver = start(
        patience=timedelta(seconds=2)
    )  # the good peer may have to wait for a processor
    assert_same(receiver.recv_from([metadata, good.metadata()], 1, SOON), state)
    assert receiver.received is not None and receiver.received.retried > 0


def test_a_silent_peer_alone_is_a_timeout(start: Start, wire: Wire) -> None:
    sender, receiver = start(), start()
    sender.send_checkpoint([1], 1, state_of(4), SOON)
    metadata, proxy = wire(sender)
    proxy.faults.silent.set()
    began = time.monotonic()
    with pytest.raises((TimeoutError, Unavailable)):
        receiver.recv_checkpoint(0, metadata, 1, timedelta(seconds=0.5))
    assert time.monotonic() - began < 5


def test_a_peer_that_sends_a_byte_now_and_then_is_too_slow(start: Start) -> None:
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n" + bytes(32)
    with stranger(lambda connection: drip(connection, slow)) as (metadata, _):
        began = time.monotonic()
        with pytest.raises((TimeoutError, Unavailable)):
            start(patience=IMPATIENT).recv_checkpoint(0, metadata, 1, timedelta(seconds=2))
        assert time.monotonic() - began < 10


@contextmanager
def answered(deadline: Deadline, nbytes: int, drips: bytes) -> Iterator[Connection]:
    """A connection that was told of a chunk of `nbytes`, of which `drips` come, slowly."""
    route = Route(Invitation("1" * 32, "s3cret" * 10, ()), "transfer", IMPATIENT.total_seconds())
    ours, theirs = socket.socketpair()

    def answer() -> None:
        theirs.recv(4096)
        theirs.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {nbytes}\r\n\r\n".encode())
        drip(theirs, drips)

    answering = threading.Thread(target=answer)
    answering.start()
    with ours, theirs:
        connection = Connection(ours, route, deadline)
        connection.ask_chunks(1, [bytes(32)], nbytes)
        yield connection
        ours.shutdown(socket.SHUT_RDWR)
        answering.join()


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_a_chunk_that_comes_a_byte_now_and_then_is_too_slow(nbytes: int) -> None:
    began = time.monotonic()
    with (
        answered(Deadline(30, ""), nbytes, b"x" * 50) as connection,
        pytest.raises(PeerFailed, match=rf"sent (nothing|[1-9] of {nbytes} bytes) in 0\.3 s"),
    ):
        connection.read_into(memoryview(bytearray(nbytes)))
    assert 0.3 <= time.monotonic() - began < 5
    with (
        answered(Deadline(0.1, "no chunk"), nbytes, b"x") as connection,
        pytest.raises(TimeoutError, match=r"timed out after 0\.1 s: no chunk"),
    ):
        connection.read_into(memoryview(bytearray(nbytes)))


def test_a_moment_before_the_deadline_nobody_waits_for_ever() -> None:
    """A timeout of 0 would mean no limit to the kernel."""

    class Last(Deadline):
        moment = 5.0

        def left(self) -> float:
            return self.moment

    with answered(deadline := Last(30, ""), 1 << 20, b"") as connection:
        deadline.moment = 1e-7
        with pytest.raises(PeerFailed, match="sent nothing"):
            connection.read_into(memoryview(bytearray(1 << 20)))


def test_who_is_still_receiving_when_time_is_up_is_cut_off_and_the_memory_is_free(
    start: Start, wire: Wire
) -> None:
    sender = start(timeout=timedelta(seconds=0.3), staging_bytes=8 << 20)
    sender.send_checkpoint([1], 1, state_of(8), SOON)
    metadata, proxy = wire(sender)
    stuck = threading.Event()

    def stop(data: bytes) -> bytes:
        if len(data) > 20_000 and not stuck.is_set():
            stuck.set()
            proxy.faults.silent.set()
        return data

    proxy.faults.spoil = stop
    failed: list[BaseException] = []

    def receive() -> None:
        try:
            start(patience=timedelta(seconds=5)).recv_checkpoint(
                0, metadata, 1, timedelta(seconds=5)
            )
        except CkptStoreError as error:
            failed.append(error)

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert stuck.wait(30)
    sender.disallow_checkpoint()
    sender.send_checkpoint([1], 2, state_of(8, seed=2), SOON)
    proxy.heal()
    receiving.join()
    assert isinstance(failed[0], Conflict)  # step 1 is no longer served
    assert_same(start().recv_checkpoint(0, sender.metadata(), 2, SOON), state_of(8, seed=2))


def test_a_transfer_under_way_is_finished_before_the_state_is_withdrawn(
    start: Start, wire: Wire
) -> None:
    state = state_of(16)
    sender, receiver = start(), start(connections=1)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)
    begun, got = threading.Event(), []

    def note(data: bytes) -> bytes:
        if len(data) > 20_000:
            begun.set()
        return data

    proxy.faults.spoil = note
    receiving = threading.Thread(
        target=lambda: got.append(receiver.recv_checkpoint(0, metadata, 1, SOON))
    )
    receiving.start()
    assert begun.wait(30)
    sender.disallow_checkpoint()
    receiving.join()
    assert_same(got[0], state)


def drip(connection: socket.socket, some: bytes) -> None:
    """One byte at a time, slower than any timeout."""
    with suppress(OSError):
        for byte in some:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
