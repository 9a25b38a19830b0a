"""Ports for servers of tests that are started later, or killed and started again."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port for a server that sets `SO_REUSEADDR`. While this process lives nobody else gets it:
    the system gives it to no client, and a socket that never listens keeps other tests away."""
    draw = random.SystemRandom()  # the seed is the same in all workers
    first = int(_CLIENTS.read_text(encoding="ascii").split()[0])
    while True:
        kept = socket.socket()
        with suppress(OSError):
            kept.bind(("", draw.randrange(first // 2, first)))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = int(kept.getsockname()[1])
            kept.detach()  # it stays open until this process ends
            return port
        kept.close()
