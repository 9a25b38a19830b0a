"""A pack goes to its taker as it is written. What ends early there is no object, and what broke off
is sent again."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ckptstore.core.ids import SessionId
from ckptstore.errors import Conflict, NoSpace
from ckptstore.plugins.hosts.members import read_members
from ckptstore.plugins.hosts.peer import Peer
from ckptstore.plugins.hosts.storage import HostsStorage, peers_of
from tests.hosts.joined import Joined

KEY = "packs/aa/one"
SESSION = SessionId("5" * 24)
BYTES = bytes(range(256)) * (12 << 10)
"""3 MiB, in three buffers."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Joined]:
    with ExitStack() as stack:
        yield Joined(tmp_path, stack)


@pytest.fixture
def storage(site: Joined) -> Iterator[HostsStorage]:
    with closing(HostsStorage(site.roots[0])) as storage:
        yield storage


def buffers() -> Iterator[memoryview]:
    for start in range(0, len(BYTES), 1 << 20):
        yield memoryview(BYTES)[start : start + (1 << 20)]


def test_a_taker_has_the_bytes_before_the_object_is_finished(
    site: Joined, storage: HostsStorage
) -> None:
    writer = storage.create(KEY, session=SESSION)
    for buffer in buffers():
        writer.append((buffer, memoryview(b"")))
    assert site.files(KEY) == [False] * 3
    assert writer.finish()
    assert site.files(KEY) == [True, True, False]
    assert (site.roots[1] / KEY).read_bytes() == BYTES


@pytest.mark.parametrize("after", [0, 2])
def test_an_upload_that_breaks_off_is_sent_again(
    site: Joined, storage: HostsStorage, after: int
) -> None:
    writer = storage.create(KEY, session=SESSION)
    for number, buffer in enumerate(buffers()):
        if number == after:
            (upload,) = writer._uploads  # type: ignore[attr-defined]
            upload._connection.sock.shutdown(socket.SHUT_RDWR)
        writer.append((buffer,))
    assert writer.finish()
    assert (site.roots[1] / KEY).read_bytes() == BYTES
    assert not [*(site.roots[1] / "tmp").iterdir()]


def test_an_upload_that_is_discarded_leaves_nothing(site: Joined, storage: HostsStorage) -> None:
    writer = storage.create(KEY, session=SESSION)
    for buffer in buffers():
        writer.append((buffer,))
    writer.discard()
    site.servers[1].close()  # its threads have ended
    assert site.files(KEY) == [False] * 3


def test_a_full_taker_is_said_to_be_full(
    site: Joined, storage: HostsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoSpace("this host is full")

    monkeypatch.setattr(site.servers[1].storage, "create", full)
    writer = storage.create(KEY, session=SESSION)
    for buffer in buffers():
        writer.append((buffer,))
    with pytest.raises(NoSpace, match="this host is full"):
        writer.finish()
    assert site.files(KEY) == [False] * 3


def test_another_object_of_that_name_is_found_by_its_size(
    site: Joined, storage: HostsStorage
) -> None:
    site.put(1, KEY, b"other")
    writer = storage.create(KEY, session=SESSION)
    writer.append((memoryview(BYTES),))
    with pytest.raises(Conflict, match="other bytes"):
        writer.finish()


@pytest.mark.parametrize(
    "rest",
    [
        "\r\n",
        "Content-Length: 9999999999\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nx\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        "Transfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        "Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nxyz\r\n",
        "Transfer-Encoding: gzip\r\n\r\n",
    ],
)
def test_a_body_whose_end_is_unknown_makes_no_object(site: Joined, rest: str) -> None:
    token = f"token-{site.roots[0].name}"
    head = (
        f"PUT /ckptstore/1/objects/{KEY} HTTP/1.1\r\nHost: a\r\nCkptstore-Job: job-1\r\n"
        f"Authorization: Bearer {token}\r\nCkptstore-New: 1\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.servers[0].port), 5) as asking:
        asking.sendall(f"{head}{rest}".encode())
        assert b" 400 " in asking.recv(1000)
    assert site.files(KEY) == [False] * 3


def test_a_size_is_told_without_the_bytes(site: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    peer: Peer = peers_of(read_members(site.roots[1]))[0]
    assert peer.put_new("commits/x", b"document")

    def read(*_: object) -> None:
        raise AssertionError("nobody asked for the bytes")

    monkeypatch.setattr(site.servers[0].storage, "read", read)
    assert peer.size("commits/x") == 8
    peer.close()
