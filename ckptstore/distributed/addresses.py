"""How do processes of many hosts find each other?

A host cannot know which of its networks a peer shares. So it sends all its addresses, and the peer
tries them in parallel. A listener must prove its identity before any secret is sent: the same
address may belong to another process on the peer's own network.
"""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

Address: TypeAlias = tuple[str, int]
"""An IPv4 or IPv6 address in digits, and a port."""

_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation addresses: a route to them is the default route. Nothing is sent."""

_LOOPBACK = ("127.0.0.1", "::1")
_LINK_LOCAL = ("169.254.", "fe80:", "0.")
"""Addresses that have another meaning, or none, on another host."""

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"
_INTERFACES6 = Path("/proc/net/if_inet6")


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A socket for IPv4 and IPv6, whichever the host has, or for one address."""
    dualstack = not host and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if dualstack or ":" in host else socket.AF_INET,
        dualstack_ipv6=dualstack,
        backlog=socket.SOMAXCONN,
    )


def own_addresses(port: int, host: str = "") -> tuple[Address, ...]:
    """Addresses of a server on `port`, the likeliest first; only `host` if the server is bound to
    it.
    """
    if host:
        return ((host, port),)
    found = [*_by_default_route(), *_of_interfaces(), *_of_interfaces6()] or [*_by_name()]
    usable = [
        address
        for address in dict.fromkeys([*found, *_LOOPBACK])
        if not address.startswith(_LINK_LOCAL)
    ]
    return tuple((address, port) for address in usable)


def reach(
    addresses: Sequence[Address],
    wait_s: float,
    is_peer: Callable[[socket.socket], bool],
    refused: Callable[[int], object] = int,
) -> tuple[socket.socket, Address] | None:
    """Connect to the first of `addresses` that answers within `wait_s` and passes `is_peer`. All
    addresses are tried in parallel.

    `refused` receives the error number of each address that cannot be reached.
    """
    end = time.monotonic() + wait_s
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for address in addresses:
            if connecting := _begin(address):
                stack.callback(connecting.close)
                selector.register(connecting, selectors.EVENT_WRITE, address)
        while selector.get_map():
            ready = selector.select(max(end - time.monotonic(), 0))
            for key, _ in ready:
                selector.unregister(key.fileobj)
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    refused(error)
                elif is_peer(connection):
                    # `detach` keeps this socket open when the stack closes the others.
                    return socket.socket(fileno=connection.detach()), key.data
            if not ready:
                return None
    return None


def _begin(address: Address) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    connection.setblocking(False)
    try:
        connection.connect_ex(address)
    except (OSError, OverflowError):
        connection.close()
        return None
    return connection


def _by_default_route() -> Iterator[str]:
    for family, far in _FAR_AWAY:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            yield probe.getsockname()[0]


def _of_interfaces() -> Iterator[str]:
    try:
        import fcntl

        names = [name for _, name in socket.if_nameindex()]
    except (ImportError, OSError):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with suppress(OSError):
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                yield socket.inet_ntoa(answer[20:24])


def _of_interfaces6() -> Iterator[str]:
    with suppress(OSError):
        for line in _INTERFACES6.read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL_SCOPE:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _by_name() -> Iterator[str]:
    with suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(where[0])


def cut_off(connection: socket.socket) -> None:
    """End a connection, also while another thread waits on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
