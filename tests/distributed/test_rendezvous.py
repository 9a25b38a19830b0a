"""Processes without torch connect by addresses and a secret, and talk in rounds: strangers are
refused, and missing ranks are named.
"""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import pytest

from ckptstore.distributed.collective import Collective, RankBytes
from ckptstore.distributed.sockets import Invitation, Listener, transfer_of
from ckptstore.errors import Unavailable

T = TypeVar("T")

SIZE = 3
TIMEOUT_S = 30.0
LARGE = 8 << 20
"""More than socket buffers hold."""


class Company:
    """`size` ranks on threads, which stand for their workers' processes."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.listeners = [Listener() for _ in range(size)]
        self.secret = os.urandom(32)

    def invitation(self, rank: int, secret: bytes | None = None) -> Invitation:
        return Invitation(
            rank, [listener.addresses for listener in self.listeners], secret or self.secret
        )

    def peers(self, rank: int, timeout_s: float = TIMEOUT_S) -> Collective:
        return Collective(
            self.listeners[rank].connect(self.invitation(rank), timeout_s),
            rank,
            self.size,
            timeout_s,
            "way out",
        )

    def each(self, work: Callable[[int], T]) -> list[T | BaseException]:
        """The result or error of `work(rank)` on each rank, in parallel."""
        with ThreadPoolExecutor(self.size) as threads:
            futures: list[Future[T]] = [threads.submit(work, rank) for rank in range(self.size)]
        return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


def close(peers: Collective) -> None:
    peers._link.close()  # type: ignore[attr-defined]  # a socket link


def test_ranks_connect_and_exchange_more_than_a_socket_buffers() -> None:
    company = Company()

    def work(rank: int) -> bytes:
        peers = company.peers(rank)
        others = [other for other in range(SIZE) if other != rank]
        incoming = [RankBytes(other, memoryview(bytearray(LARGE))) for other in others]
        for number in range(2):
            peers.exchange(
                [
                    RankBytes(other, memoryview(bytes([rank, other, number, 7]) * (LARGE // 4)))
                    for other in others
                ],
                incoming,
            )
            for part in incoming:
                assert part.memory == bytes([part.rank, rank, number, 7]) * (LARGE // 4)
        told = peers.round(
            "together",
            lambda: b"%d" % rank * LARGE,
            lambda handed: [b"".join(each[:2] for each in handed)] * SIZE,
        )
        close(peers)
        return told

    assert company.each(work) == [b"001122"] * SIZE


def test_strangers_stay_outside() -> None:
    """A silent stranger, one with other bytes, and one without the secret."""
    company = Company(2)
    port = company.listeners[0].addresses[0][1]

    def work(rank: int) -> bytes:
        peers = company.peers(rank)
        told = peers.round("together", lambda: b"%d" % rank, lambda handed: [b"".join(handed)] * 2)
        close(peers)
        return told

    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)
        ]
        strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(100))
        impostor = Listener()
        stack.callback(impostor.close)
        connecting = threading.Thread(
            target=lambda: _refused(impostor, company.invitation(1, os.urandom(32)))
        )
        connecting.start()
        assert company.each(work) == [b"01"] * 2
        connecting.join()
        strangers[1].settimeout(TIMEOUT_S)
        with suppress(ConnectionError):  # the connection was closed, perhaps with its bytes unread
            while strangers[1].recv(4096):  # a challenge, and then the end
                pass


def _refused(listener: Listener, invitation: Invitation) -> None:
    with pytest.raises(Unavailable, match="rank 0 could not be reached"):
        listener.connect(invitation, 1.0)


def test_who_never_came_is_named() -> None:
    company = Company()

    def work(rank: int) -> Any:
        return company.listeners[rank].connect(company.invitation(rank), 1.0) if rank else None

    company.listeners[0].close()
    _, first, second = company.each(work)
    assert isinstance(first, Unavailable) and "rank 0 could not be reached" in str(first)
    assert isinstance(second, Unavailable) and "rank 0 could not be reached" in str(second)
    company = Company(2)
    with pytest.raises(Unavailable, match="ranks 1 never called"):
        company.listeners[0].connect(company.invitation(0), 0.2)
    company.close()


def test_a_rank_that_is_gone_is_known_at_once_and_one_that_is_silent_in_time() -> None:
    company = Company()
    gone, silent = threading.Event(), threading.Event()

    def work(rank: int) -> Any:
        peers = company.peers(rank)
        try:
            peers.round("together", bytes, lambda handed: handed)
            if rank == 2:
                silent.wait(TIMEOUT_S)
            if rank != 0:
                return None
            gone.wait(TIMEOUT_S)
            peers.timeout_s = 2.0
            with pytest.raises(Unavailable) as caught:
                peers.round("apart", bytes, lambda handed: handed)
            with pytest.raises(Unavailable, match="rank 1, rank 2 was lost before; way out"):
                peers.round("again", bytes, lambda handed: handed)
            return dict(caught.value.causes)
        finally:
            close(peers)
            (gone if rank == 1 else silent).set()

    causes = company.each(work)[0]
    assert isinstance(causes, dict) and causes.keys() == {1, 2}, causes
    assert (
        "closed the connection" in causes[1]
        and "silent for" in causes[2]
        and "way out" in causes[1]
    )


def test_a_silence_is_named_though_the_shutdown_ends_the_transfer_at_once() -> None:
    moved: Future[None] = Future()

    class End:
        def shut_down(self) -> None:
            moved.set_exception(ConnectionResetError("it closed the connection"))

    wait = transfer_of(End(), moved)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"silent for 0\.01 s"):
        wait(0.01)
