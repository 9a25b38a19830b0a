"""Hosts with a cable of a given rate each: network namespaces on one switch, shaped by `tc`. Root
only."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers.hosts import CABLE, Host, hosts_joined, problem

BURST = "4mb"
LATENCY = "50ms"
"""What the shaper sends at once, and how long a packet may wait in it: enough to keep a fast link
full."""


class NoLink(Exception):
    """No cable can be laid here; the message says why."""


@contextmanager
def network(*rates: str) -> Iterator[tuple[Host, ...]]:
    """A host for each of `rates`, as `tc` writes them (`10gbit`). Raises `NoLink`."""
    if why := problem() or ("" if shutil.which("tc") else "the program `tc` is not installed"):
        raise NoLink(f"no link between hosts: {why}")
    with hosts_joined(len(rates)) as site:
        for number, (host, rate) in enumerate(zip(site.hosts, rates, strict=True)):
            _shape(host.name, CABLE, rate)
            _shape(site.server.name, f"{CABLE}{number}", rate)
        yield site.hosts


def _shape(namespace: str, interface: str, rate: str) -> None:
    """What is sent through an interface gets `rate`."""
    shaper = ["root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", interface, *shaper]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"`{' '.join(command)}` says: {done.stderr.strip()}")
