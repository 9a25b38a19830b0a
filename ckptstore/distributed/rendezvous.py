"""How do processes that know each other's addresses connect, each with each?

They need no store and none of the trainers. Each process opens a listener. The trainers collect the
addresses and give all processes the list and one secret, made for this rendezvous only, so that
connections of an earlier one are not mistaken for it. A rank connects to the ranks before it and
accepts the ranks after it. The secret is never sent: both ends prove that they know it.
"""

import hashlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckptstore.distributed.addresses import Address, own_addresses, reach
from ckptstore.distributed.collective import DATA, ROUND
from ckptstore.distributed.tcp import Lane, SocketLink
from ckptstore.errors import Unavailable

SECRET_BYTES = 32

HELLO_S = 5.0
"""A listener must prove within this time that it is the right one, or another address is tried."""

_CALL = struct.Struct("<6sIIB")
_MAGIC = b"ckpt\0\1"
_PROOF_BYTES = 32
_HELLO_BYTES = _CALL.size + _PROOF_BYTES
_THERE = b"!"


@dataclass(frozen=True, slots=True)
class Invitation:
    """What rank `rank` needs to connect: the addresses of all ranks, and the secret."""

    rank: int
    places: Sequence[Sequence[Address]]
    secret: bytes = field(repr=False)

    @property
    def callers(self) -> frozenset[Lane]:
        """The ranks that will connect to this one."""
        return frozenset(
            (rank, lane)
            for rank in range(self.rank + 1, len(self.places))
            for lane in _lanes(self.rank)
        )


class Listener:
    """A socket that accepts the other ranks; closed once all are connected."""

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
        else:
            self._socket = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self.addresses = own_addresses(self._socket.getsockname()[1])

    def connect(self, invitation: Invitation, timeout_s: float) -> SocketLink:
        """Connections to all other ranks. Raises `Unavailable` naming the ranks that were missing
        after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[Lane, socket.socket] = {}
        try:
            for rank in range(invitation.rank):
                for lane in _lanes(rank):
                    found[rank, lane] = _call(invitation, rank, lane, deadline)
            found.update(_Callers(self._socket, invitation).wait(deadline))
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            self.close()
        return SocketLink(found)

    def close(self) -> None:
        self._socket.close()


def _lanes(rank: int) -> tuple[int, ...]:
    """The lanes between `rank` and a later one; the first carries rounds."""
    return (DATA,) if rank else (ROUND, DATA)


def _call(invitation: Invitation, rank: int, lane: int, deadline: float) -> socket.socket:
    def is_rank(connection: socket.socket) -> bool:
        return _greeted(
            connection, invitation, rank, lane, min(HELLO_S, deadline - time.monotonic())
        )

    while (left := deadline - time.monotonic()) > 0:
        if found := reach(invitation.places[rank], left, is_rank):
            return found[0]
        time.sleep(min(0.05, left))  # an address that refuses now may accept in a moment
    places = ", ".join(f"{host} port {port}" for host, port in invitation.places[rank])
    raise Unavailable(
        f"the worker of rank {rank} could not be reached at {places}: do firewalls let workers of "
        "one job connect?"
    )


def _greeted(
    connection: socket.socket, invitation: Invitation, rank: int, lane: int, wait_s: float
) -> bool:
    """Whether the other side has proved to be `rank`."""
    call = _CALL.pack(_MAGIC, invitation.rank, rank, lane)
    answer = bytearray()
    try:
        connection.settimeout(max(wait_s, 0.001))
        connection.sendall(call + _proof(invitation, b"call", call))
        while len(answer) < _PROOF_BYTES:
            if not (more := connection.recv(_PROOF_BYTES - len(answer))):
                return False
            answer += more
        if not hmac.compare_digest(answer, _proof(invitation, b"answer", call)):
            return False
        connection.sendall(_THERE)
    except OSError:
        return False
    return True


def _proof(invitation: Invitation, of: bytes, call: bytes) -> bytes:
    return hmac.new(invitation.secret, of + call, hashlib.sha256).digest()


class _Callers:
    """Incoming connections, greeted in parallel: a silent stranger delays nobody."""

    def __init__(self, listener: socket.socket, invitation: Invitation) -> None:
        self._listener, self._invitation = listener, invitation
        self._waiting: dict[socket.socket, _Caller] = {}
        self._came: dict[Lane, socket.socket] = {}

    def wait(self, deadline: float) -> Mapping[Lane, socket.socket]:
        """The connections of all invited ranks; others are closed."""
        self._listener.setblocking(False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while missing := self._invitation.callers - self._came.keys():
                    ready = selector.select(max(deadline - time.monotonic(), 0))
                    if not ready and time.monotonic() >= deadline:
                        ranks = ", ".join(
                            str(rank) for rank in sorted({rank for rank, _ in missing})
                        )
                        raise Unavailable(f"the workers of ranks {ranks} never called")
                    for key, _ in ready:
                        # only sockets are registered
                        self._serve(key.fileobj, selector)  # type: ignore[arg-type]
        except BaseException:
            for connection in self._came.values():
                connection.close()
            raise
        finally:
            for connection in self._waiting:
                connection.close()
        return self._came

    def _serve(self, ready: socket.socket, selector: selectors.BaseSelector) -> None:
        if ready is self._listener:
            with suppress(OSError):  # the caller is gone
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._waiting[connection] = _Caller()
                selector.register(connection, selectors.EVENT_READ)
            return
        caller = self._waiting[ready]
        try:
            more = ready.recv(caller.wanted)
            lane = caller.heard(more, ready, self._invitation)
        except OSError:
            more, lane = b"", None
        if lane is None and more:
            return
        selector.unregister(ready)
        del self._waiting[ready]
        if lane is None or lane in self._came:
            ready.close()
        else:
            self._came[lane] = ready


class _Caller:
    """An incoming connection, and the bytes of its greeting so far."""

    def __init__(self) -> None:
        self._said = b""

    @property
    def wanted(self) -> int:
        """Bytes still to come: a greeting, and after the answer one more byte that shows that the
        caller is still there.
        """
        return (
            _HELLO_BYTES + len(_THERE) - len(self._said)
            if len(self._said) >= _HELLO_BYTES
            else _HELLO_BYTES - len(self._said)
        )

    def heard(self, more: bytes, connection: socket.socket, invitation: Invitation) -> Lane | None:
        """The caller's rank and lane, once its greeting is complete. Raises `ConnectionError` for a
        stranger.
        """
        self._said += more
        if len(self._said) < _HELLO_BYTES:
            return None
        call = self._said[: _CALL.size]
        magic, rank, to, lane = _CALL.unpack(call)
        if len(self._said) > _HELLO_BYTES:
            return rank, lane
        known = hmac.compare_digest(self._said[_CALL.size :], _proof(invitation, b"call", call))
        if (
            not known
            or magic != _MAGIC
            or to != invitation.rank
            or (rank, lane) not in invitation.callers
        ):
            raise ConnectionError("a stranger")
        connection.sendall(_proof(invitation, b"answer", call))
        return None
