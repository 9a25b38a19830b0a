"""Hosts joined to a server by cables of their own, each in a network namespace: a cable can be unplugged. Root only.

All addresses are in namespaces that are made here, and go with them.
"""

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "198.18.0.0/24"
"""Of the addresses that are set aside for measurements (RFC 2544)."""

_NEW_NETWORK = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A host's namespace, and the server's address as it sees it."""

    name: str
    server_address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs `words` there."""
        return ["ip", "netns", "exec", self.name, *words]

    def unplug(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "down")

    def plug(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "up")


@dataclass(frozen=True, slots=True)
class Site:
    """The server, and the hosts that reach it."""

    server: Host
    hosts: tuple[Host, ...]


def problem() -> str:
    """Why there can be no hosts, or nothing."""
    if os.getuid():
        return "only root makes network namespaces"
    if shutil.which("ip") is None:
        return "the program `ip` is not installed"
    name = f"ckptstore-{secrets.token_hex(4)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    _ip("netns", "del", name)
    return ""


@contextmanager
def hosts_joined(count: int) -> Iterator[Site]:
    """A server's namespace and `count` hosts, for the time of the block."""
    tag = f"ckptstore-{secrets.token_hex(4)}"
    server, names = f"{tag}-server", [f"{tag}-{i}" for i in range(count)]
    made = []
    try:
        for name in (server, *names):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        yield Site(Host(server, "127.0.0.1"), tuple(_join(server, name, i) for i, name in enumerate(names)))
    finally:
        for name in made:
            _ip("netns", "del", name)


@contextmanager
def within(namespace: str) -> Iterator[None]:
    """Within, what this thread opens, and the threads and processes that it starts, are on that host's network."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(Path("/run/netns", namespace), os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def _join(server: str, host: str, number: int) -> Host:
    ours, theirs = (f"198.18.0.{4 * number + i}" for i in (1, 2))
    _ip("-n", host, "link", "add", "cable", "type", "veth", "peer", "name", f"cable{number}", "netns", server)
    for namespace, link, address in ((server, f"cable{number}", ours), (host, "cable", theirs)):
        _ip("-n", namespace, "addr", "add", f"{address}/30", "dev", link)
        _ip("-n", namespace, "link", "set", link, "up")
    return Host(host, ours)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
