"""How do the workers of ranks exchange bytes, without torch and trainers?

Each worker opens a listener. The trainers collect the addresses and give all workers the list and
one secret, made for this meeting only, so that connections of an earlier one are not mistaken for
it. A rank connects to the ranks before it and accepts the ranks after it. Both ends prove that they
know the secret (`multiprocessing.connection`); it is never sent.
"""

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ckptstore.core.process import start
from ckptstore.distributed.addresses import Address, listen, own_addresses, reach
from ckptstore.distributed.collective import Transfer
from ckptstore.errors import Unavailable

SECRET_BYTES = 32

HELLO_S = 5
"""Both ends must prove themselves within this time, or another address or caller is tried."""

LOOK_S = 0.02
"""How often a listener looks whether all have called."""

_RANK = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data with which rank `rank` connects: the addresses of all ranks, and the secret."""

    rank: int
    places: Sequence[Sequence[Address]]
    secret: bytes = field(repr=False)


class Listener:
    """A socket that accepts the other ranks; closed once all are connected."""

    def __init__(self) -> None:
        self._socket = listen()
        self.addresses = own_addresses(self._socket.getsockname()[1])

    def connect(self, invitation: Invitation, timeout_s: float) -> "SocketLink":
        """Connections to all other ranks. Raises `Unavailable` naming the ranks that were missing
        after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        try:
            for rank in range(invitation.rank):
                found[rank] = _call(invitation, rank, deadline)
            _accept(self._socket, invitation, found, deadline)
            return SocketLink(found)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()


def _call(invitation: Invitation, rank: int, deadline: float) -> socket.socket:
    def is_rank(connection: socket.socket) -> bool:
        return _greeted(connection, invitation, rank) == rank

    while (left := deadline - time.monotonic()) > 0:
        if found := reach(invitation.places[rank], left, is_rank):
            return found[0]
        time.sleep(min(0.05, left))  # an address that refuses now may accept in a moment
    places = ", ".join(f"{host} port {port}" for host, port in invitation.places[rank])
    raise Unavailable(
        f"the worker of rank {rank} could not be reached at {places}: do firewalls let workers of "
        "one job connect?"
    )


def _accept(
    listener: socket.socket,
    invitation: Invitation,
    found: dict[int, socket.socket],
    deadline: float,
) -> None:
    """Add the connections of all later ranks to `found`. Each caller is greeted by a thread: a
    silent stranger delays nobody.
    """
    missing = set(range(invitation.rank + 1, len(invitation.places)))
    lock = threading.Lock()

    def greet(caller: socket.socket) -> None:
        rank = _greeted(caller, invitation)
        with lock:
            if rank in missing:
                missing.remove(rank)
                found[rank] = caller
                return
        caller.close()

    listener.settimeout(LOOK_S)
    try:
        while missing:
            if time.monotonic() >= deadline:
                ranks = ", ".join(map(str, sorted(missing)))
                raise Unavailable(f"the workers of ranks {ranks} never called")
            with suppress(OSError):  # nobody calls, or the caller is gone
                caller, _ = listener.accept()
                thread = threading.Thread(target=greet, args=(caller,), daemon=True)
                start(thread, "a worker cannot be greeted")
    finally:
        with lock:
            missing.clear()  # whoever is still being greeted comes too late


def _greeted(
    connection: socket.socket, invitation: Invitation, called: int | None = None
) -> int | None:
    """The rank at the other end: `called`, or the caller's; None for a stranger. A connection
    counts only after the caller has confirmed the answer, so an abandoned attempt is not taken for
    a connection.
    """
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", HELLO_S, 0))
    try:
        with Connection(os.dup(connection.fileno())) as talk:
            if called is not None:
                answer_challenge(talk, invitation.secret)
                deliver_challenge(talk, invitation.secret)
                talk.send_bytes(_RANK.pack(invitation.rank, called))
                return called
            deliver_challenge(talk, invitation.secret)
            answer_challenge(talk, invitation.secret)
            rank, to = _RANK.unpack(talk.recv_bytes(_RANK.size))
            return rank if to == invitation.rank else None
    except (AuthenticationError, AssertionError, EOFError, OSError, struct.error):
        return None  # before Python 3.12, a wrong greeting is an AssertionError


class SocketLink:
    """A `Link` over sockets. One thread moves the bytes of all connections. A connection that
    breaks or times out is shut down, so that the other side notices.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._ends = {rank: _End(connection) for rank, connection in connections.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ckptstore-sockets", daemon=True
        )
        start(self._thread, "workers cannot exchange bytes")

    def send(self, rank: int, lane: int, memory: memoryview) -> Transfer:
        end = self._ends[rank]
        return self._moving(end, self._send(end, memory.cast("B")))

    def receive(self, rank: int, lane: int, memory: memoryview) -> Transfer:
        end = self._ends[rank]
        return self._moving(end, self._receive(end, memory.cast("B")))

    def _moving(self, end: "_End", work: Coroutine[Any, Any, None]) -> Transfer:
        return transfer_of(end, asyncio.run_coroutine_threadsafe(work, self._loop))

    def leave(self, name: str, data: bytes) -> None:
        """Does nothing: there is no shared place, and a rank that cannot be reached is gone."""

    def left(self, name: str, timeout_s: float) -> bytes | None:
        return None

    def close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(HELLO_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        moving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        for end in self._ends.values():
            end.connection.close()

    async def _send(self, end: "_End", memory: memoryview) -> None:
        async with end.sending:
            await self._loop.sock_sendall(end.connection, memory)

    async def _receive(self, end: "_End", memory: memoryview) -> None:
        async with end.receiving:
            while memory:
                count = await self._loop.sock_recv_into(end.connection, memory)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                memory = memory[count:]


class _End:
    """This end of a connection. Transfers of one direction take turns, in order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connection = connection
        self.sending, self.receiving = asyncio.Lock(), asyncio.Lock()

    def shut_down(self) -> None:
        with suppress(OSError):  # the other side was faster
            self.connection.shutdown(socket.SHUT_RDWR)


def transfer_of(end: _End, moved: "Future[None]") -> Transfer:
    """A transfer over a socket; it is complete when `moved` is."""

    def wait(timeout_s: float) -> None:
        try:
            moved.result(timeout_s)
        except (TimeoutError, OSError) as error:
            end.shut_down()
            raise RuntimeError(str(error) or f"silent for {timeout_s:g} s") from error

    return wait
