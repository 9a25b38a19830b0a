"""Sessions write heartbeats while their writer lives, stop when it ends, and handle forks."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckptstore.core.ids import session_key
from ckptstore.errors import Unavailable
from ckptstore.log import sessions
from ckptstore.log.sessions import (
    SessionInfo,
    decode_session,
    encode_session,
    is_gone,
    open_session,
    read_sessions,
)
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.log.builders import Wrapped, session


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path, fsync=False)


@pytest.fixture(autouse=True)
def _own_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test beats fast and by itself."""
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(sessions, "_heart", sessions._Heart())


def only(storage: Storage) -> SessionInfo:
    (info,) = read_sessions(storage)
    return info


class Beats(Wrapped):
    """A backend that counts what is put and may fail to."""

    def __init__(self, storage: Storage, failures: int = 0) -> None:
        super().__init__(storage, lambda create, key, data: create(key, data))
        self.changed = threading.Condition()
        self.puts = 0
        self.failures = failures

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        with self.changed:
            self.puts += 1
            self.changed.notify_all()
            if self.puts > 1 and self.failures:
                self.failures -= 1
                raise Unavailable("no answer")
        self._storage.put(key, data, durable=durable)

    def wait_for(self, puts: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.puts >= puts, timeout=60)


def test_a_session_file_names_its_host_process_and_work(storage: Storage) -> None:
    opened = open_session(storage, "commit")
    info = only(storage)
    assert (info.id, info.what, info.pid, info.host) == (
        opened.id,
        "commit",
        os.getpid(),
        os.uname().nodename,
    )
    assert info.boot
    assert info.pid_namespace
    assert info.start > 0
    assert not is_gone(info)


def test_the_counter_of_a_living_session_moves(storage: Storage) -> None:
    beats = Beats(storage)
    opened = open_session(beats, "commit")
    beats.wait_for(4)
    opened.end()
    assert list(read_sessions(storage)) == []
    opened.end()


def test_a_beat_that_fails_is_repeated_by_the_next(storage: Storage) -> None:
    beats = Beats(storage, failures=2)
    with open_session(beats, "commit") as opened:
        beats.wait_for(6)
        assert only(storage).id == opened.id
        assert only(storage).counter > 0


def test_one_thread_beats_for_all_sessions_of_the_process(storage: Storage) -> None:
    opened = [open_session(storage, "commit") for _ in range(5)]
    assert len({s.id for s in opened}) == 5
    beating = sessions._heart._thread
    for one in opened:
        one.end()
    open_session(storage, "commit").end()
    assert beating and beating.is_alive() and sessions._heart._thread is beating


def test_an_ended_session_leaves_no_file_and_a_failed_one_leaves_it_to_gc(storage: Storage) -> None:
    with open_session(storage, "commit"):
        pass
    assert list(read_sessions(storage)) == []
    with pytest.raises(ZeroDivisionError), open_session(storage, "commit") as failed:
        raise ZeroDivisionError
    before = only(storage)
    failed.beat()
    assert only(storage) == before
    failed.end()
    assert only(storage) == before


def test_a_beat_never_brings_back_the_file_of_an_ended_session(storage: Storage) -> None:
    opened = open_session(storage, "commit")
    opened.end()
    opened.beat()
    assert list(read_sessions(storage)) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_ends_nor_beats_for_its_parents_sessions_and_has_its_own(
    storage: Storage,
) -> None:
    opened = open_session(storage, "parent")
    pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            opened.end()
            assert not sessions._heart._sessions
            beats = Beats(storage)
            own = open_session(beats, "child")
            beats.wait_for(3)
            assert own.id != opened.id
            own.end()
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitpid(pid, 0)[1] == 0
    assert only(storage).id == opened.id
    opened.end()
    assert list(read_sessions(storage)) == []


def test_a_process_that_was_killed_is_gone(storage: Storage) -> None:
    code = (
        "import sys; from tests.log.test_sessions import wait_as_writer; "
        f"wait_as_writer({str(storage.capabilities.local_root)!r})"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"open\n"
    info = only(storage)
    assert not is_gone(info)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert is_gone(info)


def wait_as_writer(root: str) -> None:
    open_session(open_storage(root), "commit")
    print("open", flush=True)
    sys.stdin.read()


def test_only_what_certainly_runs_no_more_is_gone(storage: Storage) -> None:
    open_session(storage, "commit")
    info = only(storage)
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    pid = process.pid
    process.join()
    assert pid is not None
    cases = [
        (replace(info, start=info.start - 1), True),
        (replace(info, pid=pid), True),
        (replace(info, pid=pid, boot="another boot"), False),
        (replace(info, pid=pid, pid_namespace="another namespace"), False),
        (replace(info, pid=pid, boot=""), False),
        (replace(info, pid=1), True),
        (SessionInfo(info.id), False),
    ]
    for case, gone in cases:
        assert is_gone(case) is gone, case


def test_a_session_file_reads_back_and_a_damaged_one_gives_no_more_than_its_id() -> None:
    info = SessionInfo(
        session(1), "gc", "host", "boot", "pid:[1]", 42, 77, 1_700_000_000_000_000_000, 3
    )
    data = encode_session(info)
    assert decode_session(session(1), data) == info
    for damaged in (
        b"",
        data[:-1],
        b"[]",
        b"{}",
        data.replace(b"42", b'"x"'),
        data.replace(b"42", b"-1"),
    ):
        assert decode_session(session(1), damaged) == SessionInfo(session(1))


def test_files_that_are_no_sessions_are_left_alone(storage: Storage) -> None:
    storage.put("sessions/README", b"hello", durable=False)
    storage.put(session_key(session(1)), b"torn", durable=False)
    assert list(read_sessions(storage)) == [SessionInfo(session(1))]
