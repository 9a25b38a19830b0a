"""Where no thread can be started, as at a container's limit of processes: everything is done all
the same, or refused in words.

The limit here is a real one: a stack that no address space has room for.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.core.forks import Condition
from ckptstore.core.process import Pool
from ckptstore.errors import Unavailable
from ckptstore.log import sessions
from ckptstore.storage import open_storage
from tests.support.interrupts import interrupting

CHUNK = 1 << 16


@contextmanager
def no_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)


def state(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {"m": {name: torch.rand(300_000, generator=generator) for name in "abc"}}


def assert_restored(store: ckptstore.Store, step: int) -> None:
    wanted = state(step)["m"]
    found = store.checkout(step).state_dict()["m"]
    assert all(found[name].equal(wanted[name]) for name in wanted)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}/store"
    )


def test_a_store_is_used_as_ever(place: str) -> None:
    with no_threads():
        with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK)) as store:
            for step in range(3):
                store.commit(state(step), step=step)
            store.commit_async(state(3), step=3).wait()
            store.commit_async(state(4), step=4).wait()
            for step in range(5):
                assert_restored(store, step)
            store.gc()
            assert not store.fsck(read_data="100%").findings
        with ckptstore.open(place) as store:
            assert_restored(store, 4)


def test_what_many_commits_gather_does_not_fail_the_last_one(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some entries of a log come with a checkpoint or a segment of it, so that others read less of
    the log."""
    monkeypatch.setattr("ckptstore.log.log.CHECKPOINT_EVERY", 60)
    with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK)) as store:
        for step in range(130):
            with no_threads():
                store.commit({"n": step}, step=step)
    with no_threads(), ckptstore.open(place) as store:
        assert len(store.log()) == 130


def test_threads_that_run_out_while_a_store_is_open_are_done_without(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK)) as store:
        store.commit(state(1), step=1)
        with no_threads():
            store.commit_async(state(2), step=2).wait()
            store.commit(state(3), step=3)
        store.commit(state(4), step=4)
        for step in (1, 2, 3, 4):
            assert_restored(store, step)


def test_a_session_that_could_not_beat_beats_with_the_next_one_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(sessions, "_heart", sessions._Heart())
    storage = open_storage(tmp_path, fsync=False)
    with no_threads():
        first = sessions.open_session(storage, "commit")
    assert "can't start new thread" in caplog.text
    with sessions.open_session(storage, "commit"):
        before = counter(storage, first)
        until(lambda: counter(storage, first) > before)
    first.end()
    assert not list(sessions.read_sessions(storage))


def test_a_heartbeat_outlives_whatever_a_beat_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(sessions, "_heart", sessions._Heart())
    storage, away = (
        open_storage(tmp_path / "here", fsync=False),
        open_storage(tmp_path / "away", fsync=False),
    )
    failed = threading.Event()

    def fail(key: str, data: bytes, *, durable: bool = True) -> None:
        failed.set()
        raise OSError(24, "too many open files")

    with sessions.open_session(away, "commit"), sessions.open_session(storage, "commit") as session:
        monkeypatch.setattr(away, "put", fail)
        assert failed.wait(20)
        before = counter(storage, session)
        until(lambda: counter(storage, session) > before + 2)
        monkeypatch.undo()


def test_a_transport_without_threads_is_unavailable_and_a_serving_one_refuses() -> None:
    pytest.importorskip("torchft")
    from ckptstore.interop.torchft import StoreTransport

    soon = timedelta(seconds=20)
    with (
        no_threads(),
        pytest.raises(Unavailable, match="no thread can be started that serves this transport"),
    ):
        StoreTransport(soon)
    sender, receiver = StoreTransport(soon), StoreTransport(soon)
    try:
        with no_threads():
            sender.send_checkpoint([1], 1, state(1), soon)
            with pytest.raises(
                TimeoutError
            ):  # each of its connections is told that there is no room, and to come again
                receiver.recv_checkpoint(0, sender.metadata(), 1, timedelta(seconds=1))
        got = receiver.recv_checkpoint(0, sender.metadata(), 1, soon)
        assert got["m"]["a"].equal(state(1)["m"]["a"])
    finally:
        with no_threads():
            receiver.shutdown(wait=False)
        sender.shutdown()


@pytest.mark.parametrize("started", [0, 1, 8])
def test_a_pool_runs_everything_whatever_number_of_threads_it_gets(started: int) -> None:
    gate = threading.Barrier(started + 1)
    with Pool(8) as pool:
        waiting = [pool.submit(gate.wait, 20) for _ in range(started)]
        with no_threads():
            found = [pool.submit(lambda n=n: n * n) for n in range(50)]
            gate.wait(20)
            assert [each.result(20) for each in found] == [n * n for n in range(50)]
            with pytest.raises(ZeroDivisionError):
                pool.submit(lambda: 1 // 0).result(20)
        assert len([each.result(20) for each in waiting]) == started


def counter(storage: object, session: sessions.Session) -> int:
    return next(info.counter for info in sessions.read_sessions(storage) if info.id == session.id)  # type: ignore[arg-type]


def until(holds: Callable[[], bool]) -> None:
    """Fails by its own time-out; what is waited for comes within milliseconds."""
    gate = threading.Event()
    for _ in range(2000):
        if holds():
            return
        gate.wait(0.01)
    pytest.fail("it never came")


def test_an_interrupt_leaves_no_condition_held() -> None:
    """Wherever it comes. It comes at the beginning of functions in Python: threading's own
    condition has one to enter it and one to leave it."""
    calls = due = 0
    free: list[bool] = []

    def interrupt(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "call" and calls == due:
            raise KeyboardInterrupt

    for due in range(1, 6):
        condition, calls = Condition(), 0
        with suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            try:
                with condition:
                    pass
            finally:
                sys.setprofile(None)
        take = partial(condition.acquire, timeout=2)
        thread = threading.Thread(target=lambda take=take: free.append(take()))
        thread.start()
        thread.join()
        assert free.pop(), f"held after an interrupt at call {due}"


@pytest.mark.parametrize("after", range(1, 8))
def test_who_waits_is_woken_although_an_earlier_call_for_it_was_interrupted(after: int) -> None:
    condition, wanted, seen = Condition(), 0, 0

    def follow() -> None:
        nonlocal seen
        with condition:
            while seen < 2:
                condition.wait()
                seen = wanted

    def say(number: int) -> None:
        nonlocal wanted
        with condition:
            wanted = number
            condition.notify()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    while not condition._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    with suppress(KeyboardInterrupt), interrupting(frozenset({threading.__file__}), [after]):
        say(1)
    time.sleep(0.02)
    say(2)
    thread.join(5)
    assert not thread.is_alive()


def test_only_conditions_are_used_that_interrupts_leave_free() -> None:
    package = Path(ckptstore.__file__).parent
    users = [path for path in package.rglob("*.py") if "threading.Condition" in path.read_text()]
    assert users == [package / "core" / "forks.py"]
