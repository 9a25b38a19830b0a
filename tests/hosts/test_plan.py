"""Whose log holds, and who has copies: drawn at random, nothing acknowledged is dropped."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import Conflict, Corrupt
from ckptstore.plugins.hosts.plan import Copy, HostFacts, choose_log, missing_copies, partners


class Host:
    """A host's log and lineage."""

    def __init__(self, name: str) -> None:
        self.name, self.log, self.lineage, self.store = name, list[str](), tuple[str, ...](), ""

    @property
    def facts(self) -> HostFacts:
        return HostFacts(self.name, self.store, self.lineage, len(self.log))


def joined(hosts: Sequence[Host], job: str) -> None:
    """What `join` does: all take the chosen log, and then all the lineage."""
    chosen = choose_log([host.facts for host in hosts])
    source = hosts[chosen] if chosen is not None else hosts[0]
    source.store = source.store or f"store of {job}"
    log, lineage = list(source.log), (*source.lineage, job)
    for host in hosts:
        host.log, host.lineage, host.store = list(log), lineage, source.store


@given(st.data())
def test_what_all_hosts_of_a_job_had_stays_until_all_of_them_are_gone(drawn: st.DataObject) -> None:
    """Jobs of random hosts append; the last entry may reach some hosts only. Hosts lose all."""
    hosts = [Host(str(i)) for i in range(4)]
    acknowledged: dict[str, set[str]] = {}  # by entry, the hosts that have it
    for job in range(drawn.draw(st.integers(1, 6))):
        members = drawn.draw(st.lists(st.sampled_from(hosts), min_size=1, unique=True))
        before = {host.name: list(host.log) for host in members}
        try:
            joined(members, f"job {job}")
        except Conflict:
            assert all(before[host.name] == host.log for host in members), "nothing was changed"
            continue
        log = members[0].log
        for entry, having in acknowledged.items():
            if any(entry in before[host.name] for host in members):
                assert entry in log, f"{entry} was acknowledged, and {having} had it"
                having |= {host.name for host in members}
        for n in range(drawn.draw(st.integers(0, 3))):
            entry = f"{job}.{n}"
            for host in members:
                host.log.append(entry)
            acknowledged[entry] = {host.name for host in members}
        reached = drawn.draw(st.integers(0, len(members) - 1))
        for host in members[:reached]:  # the job dies while it appends this one
            host.log.append(f"{job}.torn")
        if drawn.draw(st.booleans()):
            lost = drawn.draw(st.sampled_from(hosts))
            lost.__init__(lost.name)  # type: ignore[misc]


def test_hosts_that_went_on_separately_are_not_joined() -> None:
    both = ("1",)
    a, b = HostFacts("a", "s", (*both, "2"), 5), HostFacts("b", "s", (*both, "3"), 9)
    with pytest.raises(Conflict, match="gone on separately"):
        choose_log([a, b])
    with pytest.raises(Conflict, match="has store"):
        choose_log([a, HostFacts("c", "t", ("4",), 1)])
    assert choose_log([HostFacts("new"), a, HostFacts("old", "s", both, 7)]) == 1
    assert choose_log([HostFacts("new")]) is None


def test_a_job_that_a_host_left_before_it_joined_does_not_divide_hosts() -> None:
    last = HostFacts("last", "s", ("1", "2"), 5)  # "2" died when only this host had joined
    alone = HostFacts("alone", "s", ("1", "3"), 7)
    with pytest.raises(Conflict, match="gone on separately"):
        choose_log([last, alone])
    assert choose_log([last, replace(alone, given_up=("2",))]) == 1
    with pytest.raises(Conflict, match="gone on separately"):
        choose_log([last, replace(alone, lineage=("4", "3"), given_up=("2",))])


def test_a_host_with_a_damaged_configuration_gets_that_of_the_others() -> None:
    a, bad = HostFacts("a", "s", ("1", "2"), 5), HostFacts("bad", lineage=("1",), damaged="bits")
    assert choose_log([bad, a]) == 1
    with pytest.raises(Corrupt, match="bits"):
        choose_log([bad, HostFacts("new")])
    with pytest.raises(Conflict, match="gone on separately"):
        choose_log([replace(bad, lineage=("3",)), a])


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 3))
def test_copies_are_shared_out_evenly_and_go_to_other_domains(
    domains: list[str], copies: int
) -> None:
    takers = partners(domains, copies)
    count = min(copies, len(domains) - 1)
    assert all(len(set(takes)) == count and host not in takes for host, takes in takers.items())
    taken = [host for takes in takers.values() for host in takes]
    assert all(taken.count(host) == count for host in range(len(domains)))
    if count and len({domains.count(domain) for domain in domains}) == 1 < len(set(domains)):
        assert all(domains[takes[0]] != domains[host] for host, takes in takers.items())


def test_a_pack_with_too_few_copies_gets_them() -> None:
    takers = {0: (1,), 1: (2,), 2: (0,)}
    have = {"alone": [2], "whole": [0, 1], "elsewhere": [1, 0], "odd": [0, 2]}
    assert missing_copies(have, takers) == [Copy("alone", 2, 1)], "the one that has fewest"
    assert not missing_copies({"alone": [0]}, {0: ()})
    left = {"a": [0], "b": [0], "c": [0, 2], "d": [2]}  # host 1 is new; it took from 0, 2 from it
    assert missing_copies(left, takers) == [Copy("a", 0, 1), Copy("b", 0, 1), Copy("d", 2, 1)]


@given(st.integers(1, 5), st.integers(0, 5), st.data())
def test_every_pack_gets_all_its_copies_at_once(
    hosts: int, copies: int, drawn: st.DataObject
) -> None:
    takers = partners([str(i) for i in range(hosts)], copies)
    some = st.lists(st.integers(0, hosts - 1), min_size=1, unique=True)
    have = drawn.draw(st.dictionaries(st.sampled_from("abcd"), some))
    having = {key: {*there} for key, there in have.items()}
    for copy in missing_copies(have, takers):
        assert copy.source in have[copy.key] and copy.taker not in having[copy.key]
        having[copy.key].add(copy.taker)
    assert all(len(there) >= min(copies, hosts - 1) + 1 for there in having.values())
