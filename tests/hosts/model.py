"""Does any order of joins, appends, lost answers and lost hosts lose an acknowledged entry? Random
orders are explored, with the product's own choice of the log (`plan.choose_log`).

A *job* is one start of a training. Its hosts tell what they have, enter the job, take the chosen
log, and write the job into their lineage; each step ends in a round. A job that died may go on
wherever it stood: its processes may live on hosts that a later job has entered. `Rules` are the
checks of the product; without any one of them the exploration finds a loss.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from random import Random

from ckptstore.errors import Conflict
from ckptstore.plugins.hosts.plan import HostFacts, choose_log


@dataclass(frozen=True)
class Rules:
    fences: bool = True
    """A host takes nothing from a job other than the one that it has entered last."""
    enters_once: bool = True
    """A host enters a job only if it has gone on with none since it told what it has."""
    spreads: bool = True
    """An append whose name is taken brings what is there to all hosts before it answers."""
    completes: bool = True
    """A reader brings the last entry to all hosts before it acts on it."""
    checks_heads: bool = True
    """A host takes no log that is shorter than its host told."""
    looks_for_config: bool = True
    """A host that has lost its ckptstore.json serves nothing, and its log counts for nothing."""
    compares_lineages: bool = True
    """Of two hosts, the one whose jobs include the other's last one has the log that holds."""
    opens_last: bool = True
    """Nobody appends on a host before all hosts of its job have the job in their lineage."""


@dataclass
class Host:
    log: list[str] = field(default_factory=list)
    lineage: tuple[str, ...] = ()
    job: str = ""
    config: bool = False
    given_up: tuple[str, ...] = ()
    """Jobs that it entered and left before it had them in its lineage."""


@dataclass
class World:
    rules: Rules
    hosts: list[Host]
    acknowledged: dict[str, set[int]] = field(default_factory=dict)
    """By entry, the hosts that have it for good, and were not lost since."""
    lost: list[str] = field(default_factory=list)

    def may(self, host: int, job: str) -> bool:
        return self.hosts[host].job == job or not self.rules.fences

    def serves(self, host: int, job: str) -> bool:
        """Whether the agent of a host takes an entry for `job`."""
        at = self.hosts[host]
        return self.may(host, job) and (at.config or not self.rules.looks_for_config)

    def acknowledge(self, entry: str, hosts: tuple[int, ...]) -> None:
        having = (h for h in hosts if entry in self.hosts[h].log and self.hosts[h].config)
        self.acknowledged.setdefault(entry, set()).update(having)

    def lose(self, host: int, *, emptied: bool) -> None:
        """A host is replaced, or its directory is emptied, and what lies beside it stays."""
        at = self.hosts[host]
        self.hosts[host] = Host([], at.lineage, at.job, given_up=at.given_up) if emptied else Host()
        for having in self.acknowledged.values():
            having.discard(host)


def chosen_of(world: World, hosts: tuple[int, ...]) -> int | None:
    facts = []
    for h in hosts:
        at = world.hosts[h]
        has = at.config or (at.log and not world.rules.looks_for_config)
        lineage, left = (at.lineage, left_by(at)) if has else ((), ())
        facts.append(HostFacts(str(h), "store" if has else "", lineage, len(at.log), left))
    if not world.rules.compares_lineages:
        having = [h for h in hosts if world.hosts[h].config]
        return max(having, key=lambda h: len(world.hosts[h].log), default=None)
    found = choose_log(facts)
    return hosts[found] if found is not None else None


def left_by(at: Host) -> tuple[str, ...]:
    return at.given_up if at.job in at.lineage else (*at.given_up, at.job)


def job(world: World, name: str, hosts: tuple[int, ...], random: Random) -> Iterator[None]:
    """One job; each `next` is a step that nothing divides. It ends early where it is refused."""
    at, rules = world.hosts, world.rules
    told, began = {h: (at[h].job, at[h].lineage) for h in hosts}, {h: at[h] for h in hosts}
    having = {entry for entry, there in world.acknowledged.items() if there.intersection(hosts)}
    try:
        found = chosen_of(world, hosts)
    except Conflict:
        return
    chosen = hosts[0] if found is None else found
    lineage = (*(() if found is None else at[chosen].lineage), name)
    head = len(at[chosen].log)
    yield
    for h in random.sample(hosts, len(hosts)):
        if rules.enters_once and (at[h].job, at[h].lineage) != told[h]:
            return
        at[h].given_up = left_by(at[h])
        at[h].job, at[h].lineage = name, at[h].lineage if at[h].config else ()
        yield
    for h in random.sample(hosts, len(hosts)):
        while True:
            if not (world.may(h, name) and world.may(chosen, name)):
                return
            if rules.checks_heads and len(at[chosen].log) < head:  # it has lost its disk
                return
            if at[h].log == at[chosen].log:
                at[h].config = at[chosen].config
                break
            mine, theirs = at[h].log, at[chosen].log
            if mine != theirs[: len(mine)]:
                mine.pop()
            else:
                mine.append(theirs[len(mine)])
            yield
    writers = list[Iterator[None]]()
    for h in random.sample(hosts, len(hosts)):
        if not world.may(h, name):
            return
        at[h].lineage = lineage
        if found is None and at[h] is began[h]:
            at[h].config = True  # of the new store
        if not rules.opens_last:
            writers.append(writer(world, name, len(writers) + 10, hosts, random, own=h))
        yield from some(writers, random, steps=random.randrange(9))
    if all(at[h].job == name for h in hosts):
        kept = [h for h in hosts if at[h] is began[h]]  # the others were emptied meanwhile
        world.lost += [entry for entry in having if any(entry not in at[h].log for h in kept)]
        for entry in having:
            world.acknowledge(entry, hosts)
    writers += [writer(world, name, n, hosts, random) for n in range(random.randint(1, 3))]
    yield from some(writers, random)


def some(
    writers: list[Iterator[None]], random: Random, steps: int | None = None
) -> Generator[None, None, None]:
    """So many steps of some writers, or all."""
    yield
    while writers and steps != 0:
        one = random.choice(writers)
        if next(one, "ended") == "ended":
            writers.remove(one)
        steps = steps and steps - 1
        yield


def writer(
    world: World,
    name: str,
    number: int,
    hosts: tuple[int, ...],
    random: Random,
    own: int | None = None,
) -> Iterator[None]:
    """A process of a job on one of its hosts, which appends an entry."""
    own = random.choice(hosts) if own is None else own
    for attempt in range(3):
        entry, view = f"{name}.{number}.{attempt}", list(world.hosts[own].log)
        completes = view and world.rules.completes
        if completes and not (yield from spread(world, name, view, hosts, own)):
            return
        if view:
            world.acknowledge(view[-1], hosts)  # it acts on what it has read
        if not (world.may if own == hosts[0] else world.serves)(hosts[0], name):
            return
        first = world.hosts[hosts[0]].log
        if len(first) < len(view):
            return
        taken = len(first) > len(view)
        if not taken:
            first.append(entry)
            yield
            if random.random() < 0.3:  # the answer is lost, and the next attempt finds it there
                taken = True
        there = first[len(view)] if len(first) > len(view) else ""
        log, spreads = [*view, there], not taken or world.rules.spreads
        if spreads and not (yield from spread(world, name, log, hosts, own)):
            return
        if there == entry:
            world.acknowledge(entry, hosts)
            return


def spread(
    world: World, name: str, log: list[str], hosts: tuple[int, ...], own: int
) -> Generator[None, None, bool]:
    for h in hosts:
        there, may = world.hosts[h].log, world.may if h == own else world.serves
        while len(there) < len(log):
            if not may(h, name):
                return False
            there.append(log[len(there)])
            yield
        if there[: len(log)] != log or not may(h, name):
            return False
    return True


def explore(rules: Rules, seeds: range, hosts: int = 3, jobs: int = 4) -> str | None:
    """The first entry that was lost, with its seed; None if there is none."""
    for seed in seeds:
        world = walk(rules, Random(seed), hosts, jobs)
        if world.lost:
            return f"seed {seed}: {world.lost}"
    return None


def walk(rules: Rules, random: Random, hosts: int, jobs: int) -> World:
    world = World(rules, [Host() for _ in range(hosts)])
    begun: list[Iterator[None]] = []
    number = 0
    while number < jobs or random.random() < 0.97:
        if number < jobs and (not begun or random.random() < 0.04):
            members = tuple(sorted(random.sample(range(hosts), random.randint(1, hosts))))
            begun.append(job(world, f"job{number}", members, random))
            number += 1
        elif random.random() < 0.02:
            world.lose(random.randrange(hosts), emptied=random.random() < 0.5)
        elif begun:
            # Usually the newest; a job that died may still have processes.
            one = begun[-1] if random.random() < 0.8 else random.choice(begun)
            if next(one, "ended") == "ended":
                begun.remove(one)
    return world
