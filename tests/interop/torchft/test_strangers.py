"""A stranger without the token learns neither token nor state, and keeps no peer out."""

import socket
import time
from contextlib import suppress

import pytest

from ckptstore.errors import Unavailable
from ckptstore.interop.torchft import server
from ckptstore.interop.torchft.server import CONNECTIONS_MAX
from ckptstore.interop.torchft.wire import (
    decode_invitation,
)
from tests.interop.torchft.conftest import (
    IMPATIENT,
    SOON,
    Start,
    stranger,
)


def test_a_stranger_at_the_peers_address_is_not_told_the_token(start: Start) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n" + b"0" * 32)

    with (
        stranger(answer) as (metadata, heard),
        pytest.raises(Unavailable, match="no transport of this id"),
    ):
        start(patience=IMPATIENT).recv_checkpoint(0, metadata, 1, SOON)
    assert heard and decode_invitation(metadata).token.encode() not in b"".join(heard)


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
