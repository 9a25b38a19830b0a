"""Objects that lie on several hosts are one storage; what one host lacks or is silent about is not
said to be absent."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from ckptstore.core.ids import SessionId, log_key
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NoSpace, NotFound, Unavailable
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.log.entries import Entry, Settings, decode_entry, encode_entry, origin
from ckptstore.plugins.hosts import peer
from ckptstore.plugins.hosts.joining import replace_damaged
from ckptstore.plugins.hosts.members import (
    AGENT_NAME,
    Members,
    before,
    beside,
    enter,
    go_on,
    in_job,
    read_agent,
    read_members,
    write_agent,
    write_members,
)
from ckptstore.plugins.hosts.storage import HostsStorage, peers_of
from ckptstore.storage import open_storage
from ckptstore.storage.contract import COPY, Storage
from ckptstore.storage.reserve import RESERVE_KEY, ensure_reserve, with_room
from tests.hosts.joined import Joined
from tests.log.model.world import STORE
from tests.storage.test_backend import BackendContract
from tests.support.mounts import leave_free, small_disk, small_disk_problem

SESSION = SessionId("5" * 24)


def entry(n: int, time_ns: int = 0) -> bytes:
    """Entry `n` of a log."""
    before = decode_entry(entry(n - 1)).position if n > 1 else origin(STORE)
    header = (n, "0" * 32, time_ns, STORE, 1, before.hash, before.bytes)
    return encode_entry(Entry(*header, Settings(())))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Joined]:
    with ExitStack() as stack:
        yield Joined(tmp_path, stack)


@pytest.fixture
def hosts(site: Joined) -> Iterator[list[HostsStorage]]:
    with ExitStack() as stack:
        storages = [HostsStorage(root) for root in site.roots]
        for storage in storages:
            stack.callback(storage.close)
        yield storages


class TestHosts(BackendContract):
    @pytest.fixture
    def url(self, site: Joined) -> str:
        return f"hosts://{site.roots[1]}"

    def test_what_is_read_ahead_is_served_once(self, storage: Storage) -> None:
        """Nothing is read ahead: most of what is read lies here."""
        storage.put("a", b"0123456789")
        storage.read_ahead({"a": 10, "absent": 3})
        storage.put("a", b"9876543210")
        assert storage.read_tail("a", 3) == (b"210", 10)


def written(storage: HostsStorage, key: str, data: bytes) -> None:
    writer = storage.create(key, session=SESSION)
    writer.append((memoryview(data),))
    assert writer.finish()
    storage.sync_dirs((key,))


def test_a_pack_lies_on_two_hosts_and_an_entry_on_all(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    written(hosts[2], "packs/aa/one", b"pack" * 1000)
    assert site.files("packs/aa/one") == [True, False, True]
    assert hosts[1].put_new(log_key(1), entry(1)) and not hosts[0].put_new(log_key(1), entry(1, 7))
    assert site.files(log_key(1)) == [True] * 3
    hosts[0].put("sessions/x", b"1", durable=False)
    hosts[0].put("footers/000000000001", b"derived")
    assert site.files("sessions/x") == [True, False, False]
    for storage in hosts:
        assert storage.read("packs/aa/one", 4, 8) == b"pack"
        memory = bytearray(8)
        storage.read_into("packs/aa/one", 2, [memoryview(memory)[:3], memoryview(memory)[3:]])
        assert memory == b"ckpackpa" and storage.size("packs/aa/one") == 4000
        assert storage.read_tail("packs/aa/one", 2) == (b"ck", 4000)
        keys = [key for key, _ in storage.list("") if key != "footers/000000000001"]
        assert keys == [log_key(1), "packs/aa/one", "sessions/x"]
    hosts[1].delete("packs/aa/one")
    assert site.files("packs/aa/one") == [False] * 3


def test_a_host_that_lacks_entries_gets_them_before_the_next(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    for n in (1, 2, 3):
        assert hosts[0].put_new(log_key(n), entry(n))
    for n in (2, 3):  # as if the appender had died before it came to this host
        (site.roots[2] / log_key(n)).unlink()
    assert hosts[2].read(log_key(3)) == entry(3)
    assert hosts[2].put_new(log_key(4), entry(4))
    assert [site.files(log_key(n)) for n in (2, 3, 4)] == [[True] * 3] * 3


def test_a_silent_host_is_not_an_empty_one(
    site: Joined, hosts: list[HostsStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "CONNECT_S", 0.5)
    monkeypatch.setattr(peer, "PAUSE_S", 0.01)
    written(hosts[0], "packs/aa/one", b"pack")
    site.servers[0].close()
    assert hosts[2].read("packs/aa/one") == b"pack", "its taker has it"
    for ask in (
        lambda: hosts[2].read("packs/aa/two"),
        lambda: hosts[2].size("packs/aa/two"),
        lambda: list(hosts[2].list("packs/")),
        lambda: hosts[2].put_new(log_key(1), entry(1)),
    ):
        with pytest.raises(Unavailable):
            ask()
    with pytest.raises(NotFound):
        hosts[2].read("footers/000000000001")
    assert site.files(log_key(1)) == [False] * 3


def test_a_host_of_another_job_changes_nothing_for_this_one(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    site.join("job-2", but=0)
    for change in (
        lambda: hosts[0].put_new(log_key(1), entry(1)),
        lambda: written(hosts[0], "packs/aa/one", b"pack"),
        lambda: hosts[0].delete("packs/aa/two"),
    ):
        with pytest.raises(Unavailable, match="has joined another job"):
            change()
    assert site.files(log_key(1))[1:] == [False] * 2


def test_who_has_not_the_token_gets_nothing(site: Joined, hosts: list[HostsStorage]) -> None:
    written(hosts[0], "packs/aa/one", b"pack")
    known = hosts[1]._members.agents[0]
    for agent in (replace(known, token="token-host-1"), replace(known, token="")):
        stranger = peer.Peer("host-0", agent, "job-1")
        with pytest.raises(Unavailable, match="401"):
            stranger.read("packs/aa/one")
        stranger.close()
    elsewhere = peer.Peer("host-0", replace(known, instance="another"), "job-1")
    with pytest.raises(Unavailable, match="none of its addresses"):
        elsewhere.read("packs/aa/one")
    inside = peer.Peer("host-0", known, "job-1")
    with pytest.raises(Unavailable, match="400"):
        inside.read("../host-1.hosts/hosts.json")
    inside.close()


def test_an_answer_that_was_lost_is_no_acknowledgement(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    """The entry had reached the first host alone. Who finds it there brings it to the others."""
    site.put(0, log_key(1), entry(1))
    assert not hosts[1].put_new(log_key(1), entry(1))
    assert site.files(log_key(1)) == [True] * 3
    site.put(0, log_key(2), entry(2))
    assert hosts[1].read(log_key(2)) == entry(2)
    assert site.files(log_key(2)) == [True] * 3, "a reader may act on it"
    site.put(0, log_key(3), entry(3))
    site.servers[2].close()
    for ask in (
        lambda: hosts[0].put_new(log_key(3), entry(3)),
        lambda: hosts[0].read(log_key(3)),
    ):
        with pytest.raises(Unavailable):
            ask()


def test_what_is_damaged_on_a_host_is_read_from_another(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    written(hosts[0], "packs/aa/one", b"pack" * 1000)
    assert hosts[1].put_new(log_key(1), entry(1))
    site.damage(0, "packs/aa/one")
    site.damage(0, log_key(1))
    assert hosts[0].read(log_key(1)) == entry(1)
    damaged = hosts[0].read("packs/aa/one")
    assert damaged != b"pack" * 1000 == hosts[0].read("packs/aa/one" + COPY)
    assert hosts[2].read("packs/aa/one") == damaged, "from the first host that has it"
    assert hosts[2].read("packs/aa/one" + COPY) == b"pack" * 1000


def test_a_host_that_lost_its_directory_serves_nothing(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    """Empty, it would pass for a host that has an empty log."""
    written(hosts[0], "packs/aa/one", b"pack")
    rmtree(site.roots[0])
    with pytest.raises(Unavailable, match="has lost its directory"):
        hosts[2].read("packs/aa/two")
    site.roots[0].mkdir()
    with pytest.raises(Unavailable, match="has lost its directory"):
        hosts[1].put_new(log_key(1), entry(1))


def test_a_host_whose_directory_was_emptied_serves_nothing(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    assert hosts[1].put_new("ckptstore.json", b"{}") and hosts[1].put_new(log_key(1), entry(1))
    for path in site.roots[0].iterdir():
        rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(Unavailable, match="has lost its directory"):
        hosts[1].put_new(log_key(1), entry(1, 7))


def test_a_process_of_an_older_job_changes_nothing_on_its_own_host(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    hosts[0].put("ckptstore.json", b"{}")
    site.join("job-2")
    for change in (
        lambda: hosts[0].put_new(log_key(1), entry(1)),
        lambda: hosts[0].put("ckptstore.json", b"[]"),
        lambda: hosts[0].delete("ckptstore.json"),
    ):
        with pytest.raises(Unavailable, match="has joined another job"):
            change()
    assert (site.roots[0] / "ckptstore.json").read_bytes() == b"{}"
    assert site.files(log_key(1)) == [False] * 3


def test_a_job_enters_a_host_as_it_told_or_not_at_all(site: Joined) -> None:
    root = site.roots[0]
    told, job = before(root), read_members(root)
    enter(root, told, replace(job, job="job-2"))
    with pytest.raises(Conflict, match="another job has begun"):
        enter(root, told, replace(job, job="job-3"))
    with pytest.raises(Unavailable, match="has joined another job"):
        go_on(root, replace(job, joined=True))
    assert before(root) == ("job-2", ("job-1",))


def test_nobody_opens_a_store_whose_hosts_have_not_joined_yet(site: Joined) -> None:
    """Logs may still differ: a gc would delete packs of commits that this host lacks."""
    root = site.roots[0]
    job = replace(read_members(root), job="job-2", joined=False)
    enter(root, before(root), job)
    for lineage in (("job-1",), ("job-1", "job-2")):  # another host may not have this one yet
        go_on(root, replace(job, lineage=lineage))
        with pytest.raises(Unavailable, match="have not joined yet"):
            HostsStorage(root, read_only=True)
    go_on(root, replace(job, joined=True))
    HostsStorage(root).close()


def test_an_agent_is_idle_when_no_process_of_its_host_has_the_store(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    server = site.servers[1]
    server.asked_at -= 100
    assert not server.is_idle(50)
    hosts[1].close()
    server.asked_at -= 100
    assert server.is_idle(50) and server.is_in_place()


def test_a_damaged_entry_is_replaced_by_what_another_host_has(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    for n in (1, 2):
        assert hosts[0].put_new(log_key(n), entry(n))
    site.damage(2, log_key(1))
    asked = peers_of(read_members(site.roots[0]))[2]
    assert asked.read(log_key(1)) != entry(1)
    with closing(open_storage(site.roots[2])) as own:
        peer = peers_of(read_members(site.roots[2]))[0]
        replace_damaged(own, [peer], lambda: in_job(site.roots[2], "job-1"))
        peer.close()
    assert asked.read(log_key(1)) == entry(1), "also by an agent that has served it before"
    asked.close()


def test_a_full_host_refuses_whole_packs_and_takes_entries_that_others_have(tmp_path: Path) -> None:
    """After `NoSpace` nothing is there, so that its caller may delete what it refers to."""
    if reason := small_disk_problem():
        pytest.skip(reason)
    with small_disk(tmp_path / "host-2", size_bytes=4 << 20), ExitStack() as stack:
        site = Joined(tmp_path, stack)
        hosts = [HostsStorage(root) for root in site.roots]
        for storage in hosts:
            stack.callback(storage.close)
        ensure_reserve(hosts[0])
        assert site.files(RESERVE_KEY) == [True] * 3
        leave_free(site.roots[2], 0)
        with pytest.raises(NoSpace):
            written(hosts[1], "packs/aa/one", b"pack" * 1000)
        assert site.files("packs/aa/one") == [False] * 3
        assert hosts[0].put_new(log_key(1), entry(1)), "in the room of the reserve"
        assert (site.files(log_key(1)), site.files(RESERVE_KEY)[2]) == ([True] * 3, False)
        leave_free(site.roots[2], 0)
        with pytest.raises(Unavailable) as failed:
            hosts[0].put_new(log_key(2), entry(2))
        assert not isinstance(failed.value, NoSpace), "the first host has it"
        (site.roots[2] / "ballast").unlink()
        assert hosts[1].read(log_key(2)) == entry(2)
        assert site.files(log_key(2)) == [True] * 3


def test_a_job_begins_on_a_full_host_in_the_room_of_the_reserve(tmp_path: Path) -> None:
    if reason := small_disk_problem():
        pytest.skip(reason)
    with (
        small_disk(tmp_path / "disk", size_bytes=4 << 20) as disk,
        closing(open_storage(disk / "run")) as own,
    ):
        job = Members("job-1", 0, ("here",), (Invitation("instance", "token", ()),), ())
        ensure_reserve(own)
        leave_free(disk, 0)
        write_members(disk / "run", job)
        assert read_members(disk / "run") == job and own.size(RESERVE_KEY) is None
        assert beside(disk / "run", "hosts.json").stat().st_mode & 0o777 == 0o600
        leave_free(disk, 0)
        with pytest.raises(NoSpace, match="make room"):
            write_members(disk / "run", job)


def test_a_connection_is_kept_for_the_next_request(
    site: Joined, hosts: list[HostsStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    connected = peer.Peer._connected
    monkeypatch.setattr(peer.Peer, "_connected", lambda self: opened.append(1) or connected(self))
    asked = hosts[0]._peers[1]
    for key in ("packs/aa/one", "packs/aa/two"):
        assert asked.put_new(key, b"pack") and asked.size(key) == 4
        asked.delete(key)
        assert asked.size(key) is None
    assert len(opened) == 1


def test_a_damaged_way_to_an_agent_is_said_to_be_damaged(site: Joined) -> None:
    root = site.roots[0]
    agent = Invitation("instance", "token", (("127.0.0.1", 1),))
    write_agent(root, agent)
    assert read_agent(root) == agent
    beside(root, AGENT_NAME).write_text("{}")
    with pytest.raises(Corrupt, match="join again"):
        read_agent(root)


def test_what_others_may_write_says_nothing_of_the_hosts(site: Joined) -> None:
    root = site.roots[0]
    place = beside(root, "lock").parent
    place.chmod(0o777)
    for act in (lambda: HostsStorage(root), lambda: site.join("job-2")):
        with pytest.raises(InvalidInput, match=r"others may write to .*host-0\.hosts"):
            act()
    place.chmod(0o700)
    HostsStorage(root).close()


def test_what_was_appended_counts_although_a_host_fell_silent(
    site: Joined, hosts: list[HostsStorage]
) -> None:
    site.servers[1].close()
    assert with_room(hosts[0], lambda: "appended") == "appended"
