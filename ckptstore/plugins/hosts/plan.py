"""Which host has whose copies, and whose log holds after hosts were lost or came back? Pure.

A *job* is one start of a training: a random id, and the hosts that take part. An entry of the log
is acknowledged when all hosts of its job have it. A host's *lineage* are the jobs in which its log
took part, from old to new: at the beginning of a job all its hosts have one log and one lineage.

So a host whose last job is in the lineage of another has nothing acknowledged that the other lacks:
when that job went on into the other's log, the other's log had all that this job acknowledged. A
job that one of its hosts has left before it joined acknowledged nothing, and does not count.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptstore.errors import Conflict, Corrupt

LINEAGE = 1024
"""Jobs that a host remembers. One that was away for longer is refused."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host has: the store's id (empty without one), its lineage, and the number of the last
    entry of its log."""

    name: str
    store: str = ""
    lineage: tuple[str, ...] = ()
    head: int = 0
    given_up: tuple[str, ...] = ()
    damaged: str = ""
    """Why the configuration of its store cannot be read; it counts as a host without one."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A pack that the host `taker` is to get from `source`."""

    key: str
    source: int
    taker: int


def ring(domains: Sequence[str]) -> list[int]:
    """The hosts, by number, in an order in which neighbours lie in different failure domains as far
    as that can be."""
    seen = defaultdict[str, int](int)
    turn = []
    for host, domain in enumerate(domains):
        turn.append((seen[domain], domain, host))
        seen[domain] += 1
    return [host for _, _, host in sorted(turn)]


def partners(domains: Sequence[str], copies: int) -> dict[int, tuple[int, ...]]:
    """By host, those that take copies of what it writes: the next ones of the ring."""
    order = ring(domains)
    count = min(copies, len(order) - 1)
    return {
        host: tuple(order[(at + 1 + i) % len(order)] for i in range(count))
        for at, host in enumerate(order)
    }


def choose_log(hosts: Sequence[HostFacts]) -> int | None:
    """The number of the host whose log holds; None if none has a store.

    Raises `Conflict` if hosts have gone on separately, so that each may have acknowledged what the
    other lacks, or have different stores; `Corrupt` if no host has a configuration that is intact.
    """
    given_up = {job for host in hosts for job in host.given_up}
    hosts = [
        replace(host, lineage=tuple(job for job in host.lineage if job not in given_up))
        for host in hosts
    ]
    having = [i for i, host in enumerate(hosts) if host.store]
    if not having and (why := next((host.damaged for host in hosts if host.damaged), None)):
        raise Corrupt(f"no other host has a store: {why}")
    if not having:
        return None
    last = {hosts[i].lineage[-1] for i in having if hosts[i].lineage}
    best = max(having, key=lambda i: (len(last & {*hosts[i].lineage}), hosts[i].head, -i))
    chosen = hosts[best]
    for host in hosts:
        if host.store not in ("", chosen.store):
            raise Conflict(
                f"host {host.name} has store {host.store} and host {chosen.name} {chosen.store}; "
                "move one of them away, or name another directory"
            )
        if host.lineage and host.lineage[-1] not in chosen.lineage:
            raise Conflict(
                f"hosts {host.name} and {chosen.name} have gone on separately, and each may have "
                "commits that the other lacks; move the directory of one of them away"
            )
    return best


def missing_copies(
    have: Mapping[str, Sequence[int]], takers: Mapping[int, tuple[int, ...]]
) -> list[Copy]:
    """The copies of packs that lie on too few hosts. A neighbour in the ring takes each, so that a
    replaced host gets what the lost one had. `have` are the hosts of each key, `takers` what
    `partners` returns."""
    loads = Counter(host for hosts in have.values() for host in hosts)
    wanted = []
    for key, hosts in sorted(have.items()):
        source = min(hosts)
        near = {*takers[source], *(host for host, takes in takers.items() if source in takes)}
        takes = near - {*hosts}
        for _ in range(len(hosts), len(takers[source]) + 1):
            taker = min(takes, key=lambda host: (loads[host], host))
            takes.remove(taker)
            loads[taker] += 1
            wanted.append(Copy(key, source, taker))
    return wanted
