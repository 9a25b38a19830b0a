"""Hosts joined to a server, and to each other, by cables of their own, each in a network namespace:
a cable can be unplugged. Root only.

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

CABLE = "cable"
"""The network interface of a host."""

_SERVER_ADDRESS = "198.18.0.1"

_NEW_NETWORK = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A host's namespace, the server's address as it sees it, and its own as others do."""

    name: str
    server_address: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs `words` there."""
        return ["ip", "netns", "exec", self.name, *words]

    def unplug(self) -> None:
        _ip("-n", self.name, "link", "set", CABLE, "down")

    def plug(self) -> None:
        _ip("-n", self.name, "link", "set", CABLE, "up")


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
        _ip("-n", server, "link", "add", "switch", "type", "bridge")
        _up(server, "switch", _SERVER_ADDRESS)
        yield Site(
            Host(server, "127.0.0.1", _SERVER_ADDRESS),
            tuple(_join(server, name, i) for i, name in enumerate(names)),
        )
    finally:
        for name in made:
            _ip("netns", "del", name)


@contextmanager
def within(namespace: str) -> Iterator[None]:
    """Within, what this thread opens, and the threads and processes that it starts, are on that
    host's network."""
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
    socket, address = f"{CABLE}{number}", f"198.18.0.{number + 2}"
    _ip("-n", host, "link", "add", CABLE, "type", "veth", "peer", "name", socket, "netns", server)
    _ip("-n", server, "link", "set", socket, "master", "switch")
    _ip("-n", server, "link", "set", socket, "up")
    _up(host, CABLE, address)
    return Host(host, _SERVER_ADDRESS, address)


def _up(namespace: str, link: str, address: str) -> None:
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", link)
    _ip("-n", namespace, "link", "set", link, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
