"""A cable to another host of a given rate: a network namespace at the end of a pair of virtual
interfaces, shaped by `tc`. Root only."""

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST = "4mb"
LATENCY = "50ms"
"""What the shaper sends at once, and how long a packet may wait in it: enough to keep a fast link
full."""

_NEW_NETWORK = 0x40000000


class NoLink(Exception):
    """No cable can be laid here; the message says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """The other host's namespace, and the address at which this one reaches it."""

    name: str
    address: str

    def enter(self) -> None:
        """Move the calling thread there, and whatever threads it will start."""
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if library.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")


@contextmanager
def link(rate: str) -> Iterator[Link]:
    """A cable of `rate`, as `tc` writes it (`10gbit`), to a host of its own. Raises `NoLink`."""
    if os.getuid() or not all(map(shutil.which, ("ip", "tc"))):
        raise NoLink("a link between two hosts takes root, `ip` and `tc`")
    name = f"ckptstore-{secrets.token_hex(3)}"
    cable, network = name[-6:], f"198.18.{secrets.randbelow(256)}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", name)
        _run("ip", "addr", "add", f"{network}.1/24", "dev", cable)
        _run("ip", "-n", name, "addr", "add", f"{network}.2/24", "dev", "cable")
        for where, interface in (((), cable), (("-n", name), "cable")):
            _run("ip", *where, "link", "set", interface, "up")
            _run(
                "tc",
                *where,
                "qdisc",
                "add",
                "dev",
                interface,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                BURST,
                "latency",
                LATENCY,
            )
        yield Link(name, f"{network}.2")
    finally:
        if Path(f"/run/netns/{name}").exists():
            _run(
                "ip", "netns", "del", name
            )  # its end of the cable goes with it, and so does the other


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"`{' '.join(words)}` says: {done.stderr.strip()}")
