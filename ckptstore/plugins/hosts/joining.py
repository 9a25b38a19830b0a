"""How do the hosts of a job make one store of their directories?

All ranks call `join`; the first rank of each host acts for it. Each step ends in a round, so all
hosts have done it or none goes on:

1. each host starts its agent, if none answers, and tells what it has; the first rank chooses whose
   log holds (`plan.choose_log`);
2. each host enters the job (`members.enter`): from then on no older job changes it;
3. each host replaces damaged entries and documents, then takes those that it lacks, and drops
   entries that were not acknowledged;
4. packs that lie on too few hosts are copied, so that what the next commit refers to survives the
   next lost host, and a replaced host has what the lost one had;
5. each host adds this job to its lineage; then its store may be opened.

What a process changes on its host it changes within `in_job`: it may belong to a job that was given
up. `tests/hosts/model.py` explores the orders in which all this can happen.
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    Unavailable,
)
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.plugin.addresses import listen, own_addresses
from ckptstore.plugin.handles import StoreHandle, read_config
from ckptstore.plugin.model import CONFIG_KEY, log_key, pack_key
from ckptstore.plugin.ranks import collective_of
from ckptstore.plugin.storage import Storage, ensure_reserve, open_storage
from ckptstore.plugins.hosts.agent import ENTRY
from ckptstore.plugins.hosts.members import (
    Members,
    before,
    enter,
    go_on,
    in_job,
    invitation,
    read_agent,
    read_members,
    write_agent,
)
from ckptstore.plugins.hosts.peer import Peer
from ckptstore.plugins.hosts.plan import (
    LINEAGE,
    HostFacts,
    choose_log,
    missing_copies,
    partners,
)
from ckptstore.plugins.hosts.storage import SCHEME, check_intact, file_of, peers_of

if TYPE_CHECKING:
    from ckptstore.plugin.ranks import Collective

logger = logging.getLogger("ckptstore")

Taking: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Around each change of this host by the job."""

AGENT = "ckptstore.plugins.hosts"
START_S = 60.0
TIMEOUT_S = 300.0
HOST_VARIABLE, DOMAIN_VARIABLE = "CKPTSTORE_HOST", "CKPTSTORE_DOMAIN"


def join(
    directory: str | os.PathLike[str],
    *,
    copies: int = 1,
    host: str | None = None,
    domain: str | None = None,
    process_group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Make one store of `directory` on each host, and return its place for `ckptstore.open`.

    Every rank calls this before it opens the store, and passes equal `copies`. What a host writes
    lies on so many other hosts as well before a commit is acknowledged.

    Args:
        directory: On each host's own disk, or in its memory. Made if there is none.
        copies: Other hosts that take what a host writes; fewer if there are fewer.
        host: A name that the ranks of one host share; else `$CKPTSTORE_HOST`, else the host's.
        domain: What fails together, such as a rack or a switch; else `$CKPTSTORE_DOMAIN`, else the
            host. Copies go to other domains as far as there are any.
        process_group: The ranks that take part; default: all.
        timeout_s: The longest wait for another rank.

    Raises:
        Conflict: Hosts have gone on separately, or have different stores.
        Unavailable: A host does not answer, or no agent can be started.

    Example:
        >>> store = ckptstore.open(join("/dev/shm/run"), mirror="s3://bucket/run")
    """
    if not (type(copies) is int and copies >= 0):
        raise InvalidInput(f"copies is {copies!r:.80}; wanted a number of hosts")
    root = Path(directory).absolute()
    name = host or os.environ.get(HOST_VARIABLE) or socket.gethostname()
    said = domain or os.environ.get(DOMAIN_VARIABLE) or name
    peers = collective_of(process_group, timeout_s)
    if peers is None:
        raise InvalidInput("one process has one host: open the directory itself, with mirror=")
    _Joining(peers, root, name, said, copies).run()
    return f"{SCHEME}{root}"


class _Joining:
    """This rank's part of a join."""

    def __init__(
        self, peers: "Collective", root: Path, name: str, domain: str, copies: int
    ) -> None:
        self._peers, self._root, self._name, self._domain = peers, root, name, domain
        self._copies = copies
        self._leads = False

    def run(self) -> None:
        """Join. Raises one error on all ranks."""
        names = self._peers.share("join: hosts", lambda: self._name, list)
        self._leads = names.index(self._name) == self._peers.rank
        answer = self._peers.share("join: facts", self._tell, self._choose)
        told = [Told(*each) for each in answer[0]]
        job, chosen = self._job(told, answer[2]), answer[1]
        lineage = (*(told[chosen].facts.lineage if chosen is not None else ()), job.job)[-LINEAGE:]
        head = told[chosen].facts.head if chosen is not None else 0
        self._share("join: members", lambda: self._enter(job))
        self._share("join: damage", lambda: self._replace_damaged(job, chosen))
        self._share("join: log", lambda: self._take_log(job, chosen, head))
        self._share("join: copies", lambda: self._take_copies(job))
        job = replace(job, lineage=lineage, head=head)
        self._share("join: lineage", lambda: go_on(self._root, job))
        self._share("join: open", lambda: go_on(self._root, replace(job, joined=True)))
        self._peers.share("join: end", lambda: self._end(job, chosen))

    def _share(self, what: str, act: Callable[[], object]) -> None:
        """A round in which the first rank of each host acts for it."""

        def mine() -> None:
            if self._leads:
                act()

        self._peers.share(what, mine)

    def _end(self, job: Members, chosen: int | None) -> None:
        """Check that this rank lives on the host that it named; say what is lost."""
        try:
            here = read_members(self._root).job
        except NotFound:
            here = ""
        if here != job.job:
            raise InvalidInput(
                f"{self._root} of this rank is not that of the first rank of host {self._name}: "
                f"give each host a name of its own (host= or ${HOST_VARIABLE}), and one directory"
            )
        if self._peers.leads and chosen is not None:
            warn_of_lost(self._root)

    def _tell(self) -> Any:
        """What the host of this rank has, if it acts for it."""
        if not self._leads:
            return None
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._before = before(self._root)
        agent = _agent(self._root)
        return asdict(facts_of(self._root, self._name)), self._domain, asdict(agent)

    def _choose(self, handed_in: Sequence[Any]) -> Any:
        """The first rank's answer: all that was told, whose log holds, and the job."""
        told = [each for each in handed_in if each is not None]
        chosen = choose_log([Told(*each).facts for each in told])
        return told, chosen, secrets.token_hex(12)

    def _job(self, told: "Sequence[Told]", job: str) -> Members:
        names = tuple(each.facts.name for each in told)
        me = names.index(self._name)
        self._takers = partners([each.domain for each in told], self._copies)
        agents = tuple(each.agent for each in told)
        mine = told[me].facts
        takers = self._takers[me]
        return Members(job, me, names, agents, takers, mine.lineage, given_up=mine.given_up)

    def _enter(self, job: Members) -> None:
        enter(self._root, self._before, job)
        _await_agent(self._root)

    def _replace_damaged(self, job: Members, chosen: int | None) -> None:
        if chosen is not None:
            with self._hosts(job) as (own, peers):
                others = [peers[chosen]] if chosen != job.me else [*peers.values()]
                taking = partial(in_job, self._root, job.job)
                with taking():
                    ensure_reserve(own)
                replace_damaged(own, others, taking)

    def _take_log(self, job: Members, chosen: int | None, head: int) -> None:
        if chosen is not None and chosen != job.me:
            with self._hosts(job) as (own, peers):
                take_log(
                    own,
                    peers[chosen],
                    head,
                    partial(in_job, self._root, job.job),
                    knows_jobs=bool(job.lineage),
                )

    @contextmanager
    def _hosts(self, job: Members) -> Iterator[tuple[Storage, Mapping[int, Peer]]]:
        """The objects of this host, and the agents of the others, by number."""
        with closing(open_storage(self._root)) as own, ExitStack() as stack:
            peers = peers_of(job)
            for peer in peers.values():
                stack.callback(peer.close)
            yield own, peers

    def _take_copies(self, job: Members) -> None:
        """Give other hosts the packs that lie on too few, if this one is the first that has them;
        say which packs no host has."""
        with self._hosts(job) as (own, peers):
            have = defaultdict[str, list[int]](list)
            for host in range(len(job.names)):
                source: Storage | Peer = own if host == job.me else peers[host]
                for key, _ in source.list("packs/"):
                    have[key].append(host)
            wanted = missing_copies(have, self._takers)
            mine = [copy for copy in wanted if copy.source == job.me]
            for copy in mine:
                peers[copy.taker].put_file(file_of(own, copy.key))
            if mine:
                logger.info("%s: %d copies of packs went to other hosts", self._name, len(mine))


def warn_of_lost(root: Path) -> None:
    """Say how many packs of the log lie on no host any more, unless it is in a database, of which a
    join is not told."""
    with closing(open_storage(root)) as own:
        if read_config(own).in_database:
            return
    with closing(StoreHandle(f"{SCHEME}{root}", read_only=True)) as store:
        there = {key for key, _ in store.storage.list("packs/")}
        listed = [pack_key(pack.id) for pack in store.log.replay().packs.values()]
        if lost := sum(key not in there for key in listed):
            logger.warning(
                "%d of %d packs lie on no host any more: their chunks come from the mirror, and a "
                "commit that the mirror lacks gives way to an older one",
                lost,
                len(listed),
            )


class Told(NamedTuple):
    """What a host told, as it came in a message."""

    has: Mapping[str, Any]
    domain: str
    at: Mapping[str, Any]

    @property
    def facts(self) -> HostFacts:
        tuples = {name: tuple(self.has[name]) for name in ("lineage", "given_up")}
        return HostFacts(**{**self.has, **tuples})

    @property
    def agent(self) -> Invitation:
        return invitation(self.at)


def facts_of(root: Path, name: str) -> HostFacts:
    """What the directory `root` of this host has. What lies beside it counts as absent if it is
    damaged."""
    try:
        members = read_members(root)
        lineage, left = members.lineage, members.given_up
        if members.job not in lineage:
            left = (*left, members.job)[-LINEAGE:]
    except (Corrupt, NotFound):
        lineage = left = ()
    with closing(open_storage(root)) as own:
        heads = [int(key[len("log/") :]) for key in _log_of(own)]
        try:
            return HostFacts(name, read_config(own).store, lineage, max(heads, default=0), left)
        except NotFound:
            return HostFacts(name)
        except (Corrupt, InvalidInput) as error:
            return HostFacts(name, lineage=lineage, given_up=left, damaged=str(error))


def replace_damaged(own: Storage, others: Sequence[Peer], taking: Taking) -> None:
    """Replace what `check_intact` finds damaged on this host, if another one has it intact."""
    config, documents = own.list(CONFIG_KEY), own.list("commits/")
    for key in [*(key for key, _ in config), *_log_of(own), *(key for key, _ in documents)]:
        try:
            check_intact(key, own.read(key))
            continue
        except Corrupt as error:
            logger.warning("%s on this host is damaged: %s", key, error)
        for peer in others:
            with suppress(Corrupt, NotFound):
                data = peer.read(key)
                check_intact(key, data)
                with taking():
                    own.put(key, data)
                break


def take_log(own: Storage, source: Peer, head: int, taking: Taking, *, knows_jobs: bool) -> None:
    """Make the log of this host that of `source`, and take its documents.

    Entries that `source` lacks, or has otherwise, were not acknowledged: its job went on without
    them. Raises `Unavailable` if `source` has fewer entries than the `head` that it told.
    """
    theirs = _log_of(source)
    if theirs[-1:] < [log_key(head)] and head:
        raise Unavailable(f"host {source.name} has lost its log meanwhile; start the job again")
    mine = _log_of(own)
    dropped = False
    while mine and (mine[-1] not in theirs or own.read(mine[-1]) != source.read(mine[-1])):
        if not knows_jobs:
            raise Conflict(
                f"this host has entries that host {source.name} lacks, and does not know any more "
                "which jobs it took part in; move the directory of one of them away"
            )
        with taking():
            own.delete(mine.pop())
        dropped = True
    if dropped:
        for key, _ in [*own.list("log/"), *own.list("footers/")]:
            if not key[4:].isdecimal():
                with taking():
                    own.delete(key)
    if own.size(CONFIG_KEY) is None:
        _take(own, source, CONFIG_KEY, taking)
    for prefix in ("commits/", "signatures/"):
        here = {key for key, _ in own.list(prefix)}
        for key, _ in source.list(prefix):
            if key not in here:
                _take(own, source, key, taking)
    for key in sorted({*theirs} - {*mine}):
        _take(own, source, key, taking)


def _take(own: Storage, source: Peer, key: str, taking: Taking) -> None:
    data = source.read(key)
    check_intact(key, data)
    with taking():
        own.put_new(key, data)


def _log_of(host: Storage | Peer) -> list[str]:
    """The keys of the entries that a host has."""
    return sorted(key for key, _ in host.list("log/") if ENTRY.fullmatch(key))


def _agent(root: Path) -> Invitation:
    """The agent of this host. It is started if none answers, and may be asked at once: its socket
    listens, and it answers when it is there."""
    with suppress(CkptStoreError):
        known = read_agent(root)
        if _answers(known):
            return known
    with listen() as listening:
        addresses = own_addresses(listening.getsockname()[1])
        agent = Invitation(secrets.token_hex(16), secrets.token_hex(32), addresses)
        write_agent(root, agent)
        # The shell ends at once, so that the agent is nobody's child.
        command = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-m", AGENT, str(root)]
        nothing, descriptor = subprocess.DEVNULL, listening.fileno()
        subprocess.run(
            [*command, str(descriptor)],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
            pass_fds=(descriptor,),
            check=True,
        )
    return agent


def _answers(agent: Invitation) -> bool:
    return Peer("this one", agent, "").answers()


def _await_agent(root: Path) -> None:
    """Return when the agent of this host is there."""
    until = time.monotonic() + START_S
    while not _answers(read_agent(root)):
        if time.monotonic() > until:
            raise Unavailable(f"no agent for {root} came up within {START_S:.0f} s")
        time.sleep(0.02)
