"""Peers that lie, disconnect, are slow, dead or strangers are refused or passed over; never a wrong
tensor.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from ckptstore.errors import CkptStoreError, Conflict, Corrupt, Unavailable
from ckptstore.interop.torchft import server
from ckptstore.interop.torchft.connection import Connection, Deadline, PeerFailed, Route
from ckptstore.interop.torchft.server import CONNECTIONS_MAX
from ckptstore.interop.torchft.wire import (
    Invitation,
    decode_invitation,
    encode_invitation,
)
from tests.interop.torchft.conftest import (
    SOON,
    Start,
    Wire,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)

IMPATIENT = timedelta(milliseconds=300)


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


def test_what_came_before_a_failure_is_not_asked_for_by_the_next_call(
    start: Start, wire: Wire
) -> None:
    state = state_of(24)
    sender, receiver = start(), start(connections=1)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, proxy = wire(sender)

    def die(data: bytes) -> bytes:
        proxy.faults.refuse = True
        proxy.drop()
        return data

    passed = 0

    def count(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        return die(data) if passed > 20 << 20 else data

    proxy.faults.spoil = count
    with pytest.raises(Unavailable):
        receiver.recv_checkpoint(0, metadata, 1, SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), state)
    assert receiver.received is not None
    assert (
        receiver.received.fetched_chunks < receiver.received.chunks
    )  # the last were in buffers when the peer died


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


def test_a_stranger_at_the_peers_address_is_not_told_the_token(start: Start) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n" + b"0" * 32)

    with (
        stranger(answer) as (metadata, heard),
        pytest.raises(Unavailable, match="no transport of this id"),
    ):
        start(patience=IMPATIENT).recv_checkpoint(0, metadata, 1, SOON)
    assert heard and decode_invitation(metadata).token.encode() not in b"".join(heard)


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


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /ckptstore/1/state/1 HTTP/1.1\r\n\r\n", 401),
        (b"GET /ckptstore/1/state/1 HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n", 401),
        (b"POST /ckptstore/1/chunks/1 HTTP/1.1\r\nContent-Length: 32\r\n\r\n" + bytes(32), 401),
        (b"GET /etc/passwd HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n", 404),
        (b"GET /ckptstore/1/state/1 HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n", 503),
        (b"GET /ckptstore/1/state/../1 HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n", 404),
        (
            b"POST /ckptstore/1/chunks/1 HTTP/1.1\r\nAuthorization: Bearer "
            b"TOKEN\r\nContent-Length: 33\r\n\r\n" + bytes(33),
            400,
        ),
        (
            b"POST /ckptstore/1/chunks/1 HTTP/1.1\r\nAuthorization: Bearer "
            b"TOKEN\r\nContent-Length: 99999999\r\n\r\n",
            400,
        ),
        (b"POST /ckptstore/1/chunks/1 HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n", 400),
        (b"PUT /ckptstore/1/state/1 HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n", 501),
        (b"rubbish\r\n\r\n", 400),
    ],
)
def test_the_server_refuses_what_is_no_request_of_a_peer(
    start: Start, request_bytes: bytes, status: int
) -> None:
    invitation = decode_invitation(start().metadata())
    with socket.create_connection(
        ("127.0.0.1", invitation.addresses[0][1]), timeout=20
    ) as connection:
        connection.sendall(request_bytes.replace(b"TOKEN", invitation.token.encode()))
        answer = connection.recv(4096)
    assert str(status).encode() in answer.split(b"\r\n")[0]
    assert invitation.token.encode() not in answer


def test_more_peers_than_the_server_has_room_for_are_told_to_come_again(start: Start) -> None:
    sender = start()
    sender.send_checkpoint([1], 1, {"x": 1}, SOON)
    invitation = decode_invitation(sender.metadata())
    port = invitation.addresses[0][1]
    crowd = [
        socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(CONNECTIONS_MAX)
    ]
    try:
        for connection in crowd:
            connection.sendall(
                "GET /ckptstore/1/state/1 HTTP/1.1\r\nAuthorization: Bearer "
                f"{invitation.token}\r\nCkptstore-Wait-Ms: 9000\r\n\r\n".encode()
            )
            assert b"200" in connection.recv(100)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one_more:
            assert b"503" in one_more.recv(100)
    finally:
        for connection in crowd:
            connection.close()
    assert start().recv_checkpoint(0, sender.metadata(), 1, SOON) == {"x": 1}


def test_connections_that_never_show_the_token_keep_no_peer_out(start: Start) -> None:
    """Slowloris: endless heads, slow bytes and repeated hellos, on as many connections as there are
    slots.
    """
    sender = start()
    sender.send_checkpoint([1], 1, {"x": 1}, SOON)
    port = decode_invitation(sender.metadata()).addresses[0][1]
    crowd = [
        socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(CONNECTIONS_MAX)
    ]
    try:
        for number, connection in enumerate(crowd):
            connection.sendall(b"GET /ckptstore/1/hello HTTP/1.1\r\n" + b"\r\n" * (number % 2))
        assert start().recv_checkpoint(0, sender.metadata(), 1, SOON) == {"x": 1}
    finally:
        for connection in crowd:
            connection.close()


@pytest.mark.parametrize("said", [b"y", b"\r\nGET /ckptstore/1/hello HTTP/1.1\r\n"])
def test_a_head_that_trickles_is_ended_at_its_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Regardless of the pauses, and of the request without the token."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.5)
    port = decode_invitation(start().metadata()).addresses[0][1]
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
        connection.sendall(b"GET /ckptstore/1/hello HTTP/1.1\r\n")
        end = time.monotonic() + 20
        with suppress(ConnectionError):
            while time.monotonic() < end:
                with suppress(TimeoutError):
                    connection.sendall(said)
                    if not connection.recv(4096):
                        return
            pytest.fail("a stranger keeps a connection for as long as it likes")


def drip(connection: socket.socket, some: bytes) -> None:
    """One byte at a time, slower than any timeout."""
    with suppress(OSError):
        for byte in some:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)


@contextmanager
def stranger(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, list[bytes]]]:
    """Another server at a peer's address: the metadata that leads there, and the bytes it
    receives.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        heard.append(connection.recv(65536))
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield (
            encode_invitation(Invitation("1" * 32, "s3cret" * 10, (listener.getsockname(),))),
            heard,
        )
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
