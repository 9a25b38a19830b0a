"""Ports for servers of tests that are started later, or killed and started again."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port on which nobody listens now, and which the system gives to no client: what another
    test connects from cannot take it while its server is away."""
    draw = random.SystemRandom()  # the seed is the same in all workers
    first = int(_CLIENTS.read_text(encoding="ascii").split()[0])
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", draw.randrange(first // 2, first))) as free,
        ):
            return int(free.getsockname()[1])
