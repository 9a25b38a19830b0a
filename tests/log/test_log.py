"""The log loses nothing and never forks: with many writers, with lost answers."""

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from ckptstore.core.ids import log_key
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.log import log as log_module
from ckptstore.log.admission import Code, tags_free
from ckptstore.log.entries import Entry, Forget, Over, Settings, Tag
from ckptstore.log.log import Log, Refused
from ckptstore.log.log_backend import Met, pause_s
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.log.builders import (
    STORE,
    Wrapped,
    commit,
    commit_id,
    fresh_commit,
    just,
    open_log,
    packs,
    session,
)

Create = Callable[[str, bytes], bool]


def test_appended_entries_are_replayed_by_every_process(storage: Storage) -> None:
    log = open_log(storage)
    appended = [log.append(commit(i)) for i in range(1, 41)]
    log.append(Tag("best", commit_id(7), frozenset({7})))
    other = open_log(storage)
    assert other.state.n == 0
    assert other.replay() == log.state == other.state
    assert list(other.read_entries())[:40] == appended
    assert dict(log.state.tags) == {"best": commit_id(7)}


def test_an_entry_is_refused_before_anything_is_written(storage: Storage) -> None:
    log = open_log(storage)
    log.append(commit(1))
    with pytest.raises(Refused) as caught:
        log.append(Forget((commit_id(2),), ""))
    assert isinstance(caught.value, Conflict)
    assert caught.value.refusal.code is Code.NO_SUCH_COMMIT
    assert not log.head_after(1)
    assert log.append(commit(2)).n == 2


def test_a_body_without_a_decodable_encoding_is_refused(storage: Storage) -> None:
    log = open_log(storage)
    for body in (commit(1, run="a/../b"), commit(1, leaves=-1), Settings((("a", 2**60),))):
        with pytest.raises(InvalidInput):
            log.append(body)
    assert not log.head_after(0)


def test_a_writer_that_lags_applies_what_others_appended_and_checks_again(storage: Storage) -> None:
    mine, theirs = open_log(storage), open_log(storage)
    mine.append(commit(1))
    theirs.replay()
    mine.append(Over((session(2),)))
    with pytest.raises(Refused, match="declared over"):
        theirs.append(commit(2))
    entry = theirs.append(commit(3, packs=packs(3, 2)))
    assert isinstance(entry.body, type(commit(3)))
    assert [p.number for p in entry.body.packs] == [2, 3]


def test_the_race_for_one_number_has_one_winner_and_the_loser_takes_the_next(
    storage: Storage,
) -> None:
    rival = open_log(storage)

    def late(create: Create, key: str, data: bytes) -> bool:
        if key == log_key(1):
            rival.append(commit(1, packs=packs(1, 3)))
        return create(key, data)

    entry = open_log(Wrapped(storage, late)).append(commit(2))
    assert (entry.n, entry.body.packs[0].number) == (2, 4)  # type: ignore[union-attr]  # a Commit
    assert [e.n for e in open_log(storage).read_entries()] == [1, 2]


def test_a_demand_is_made_of_the_state_behind_a_lost_race(storage: Storage) -> None:
    rival = open_log(storage)
    for i in (1, 2):
        rival.append(commit(i))
    raced: list[str] = []

    def late(create: Create, key: str, data: bytes) -> bool:
        if not raced:
            raced.append(key)
            rival.append(Tag("a", commit_id(1), just()))
        return create(key, data)

    log = open_log(Wrapped(storage, late))
    demand = tags_free(("a", "b"), commit_id(2))
    with pytest.raises(Refused, match="tag 'a'") as refused:
        log.append(Tag("a", commit_id(2), just()), demand=demand)
    assert refused.value.refusal.code is Code.TAG_TAKEN
    assert log.replay().tags.get("a") == commit_id(1)
    log.append(Tag("b", commit_id(2), just()), demand=tags_free(("b",), commit_id(2)))


# -- answers that get lost


def failing(times: int, *, created: bool) -> Callable[[Create, str, bytes], bool]:
    """The first `times` creates raise, after or without having created."""
    left = [times]

    def put_new(create: Create, key: str, data: bytes) -> bool:
        if left[0]:
            left[0] -= 1
            if created:
                create(key, data)
            raise Unavailable("no answer")
        return create(key, data)

    return put_new


@pytest.mark.parametrize("created", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_is_settled_by_repeating_the_same_create(
    storage: Storage, times: int, created: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_FIRST_PAUSE_S", 0.001)
    log = open_log(Wrapped(storage, failing(times, created=created)))
    assert log.append(commit(1)).n == 1
    assert log.append(commit(2)).n == 2
    assert [e.body for e in open_log(storage).read_entries()] == [
        e.body for e in log.read_entries()
    ]
    assert log.state.n == 2


def test_a_lost_answer_may_turn_out_to_be_a_lost_race(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_FIRST_PAUSE_S", 0.001)
    rival = open_log(storage)
    calls: list[str] = []

    def put_new(create: Create, key: str, data: bytes) -> bool:
        calls.append(key)
        if len(calls) == 1:
            rival.append(commit(1))
            raise Unavailable("no answer")
        return create(key, data)

    assert open_log(Wrapped(storage, put_new)).append(commit(2)).n == 2
    assert calls == [log_key(1), log_key(1), log_key(2)]


@pytest.mark.parametrize("created", [True, False])
def test_a_writer_that_gives_up_deletes_nothing_and_says_so(
    storage: Storage, created: bool
) -> None:
    log = open_log(Wrapped(storage, failing(9, created=created)))
    with pytest.raises(Unavailable, match="delete nothing"):
        log.append(commit(1), timeout_s=0.0)
    assert open_log(storage).replay().n == (1 if created else 0)
    assert log.replay().n == (1 if created else 0)


def test_a_local_disk_that_fails_for_good_is_not_waited_for_as_a_network_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "LOCAL_PATIENCE_S", 0.1)
    log = open_log(Wrapped(open_storage(tmp_path, fsync=False), failing(10**6, created=False)))
    started = time.monotonic()
    with pytest.raises(
        Unavailable,
        match="storage did not say whether entry 1 of the log was created: no answer; delete "
        "nothing",
    ):
        log.append(commit(1))
    assert time.monotonic() - started < log_module.APPEND_TIMEOUT_S / 2


def test_storage_that_loses_an_entry_others_have_seen_is_noticed_before_it_is_acknowledged(
    storage: Storage,
) -> None:
    """The entry at 1 vanishes after a rival built on it; a writer that never saw it takes its
    number."""
    rival = open_log(storage)
    late = open_log(storage)
    late.replay()
    rival.append(commit(1))
    rival.append(commit(2))
    storage.delete(log_key(1))
    with pytest.raises(Corrupt, match="chain is broken"):
        late.append(commit(3))


# -- many writers


def append_many(root: str, count: int, timeout_s: float) -> None:
    log = Log(open_storage(root, fsync=False), STORE, 1)
    for _ in range(count):
        log.append(fresh_commit(), timeout_s=timeout_s)


def check_whole(entries: list[Entry], count: int) -> None:
    assert [e.n for e in entries] == list(range(1, count + 1))
    assert len({e.attempt for e in entries}) == count
    assert [number for e in entries for number in (p.number for p in e.body.packs)] == list(
        range(1, count + 1)
    )  # type: ignore[union-attr]  # commits


def test_processes_that_append_at_once_lose_and_fork_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=append_many, args=(str(tmp_path), 60, 60.0)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    log = open_log(tmp_path)
    assert len(log.replay().commits) == 180
    check_whole(list(log.read_entries()), 180)


def test_threads_that_share_a_log_lose_nothing(storage: Storage) -> None:
    log = open_log(storage)
    threads = [
        threading.Thread(target=lambda: [log.append(fresh_commit()) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_whole(list(open_log(storage).read_entries()), 80)


# -- looking again


def test_a_name_that_a_network_filesystem_believes_absent_is_looked_up_again(
    tmp_path: Path,
) -> None:
    """An NFS client that saw entry 1 absent goes on saying so until something changes in the
    directory."""
    storage = open_storage(tmp_path / "store", fsync=False)
    rival = open_log(storage)

    class Stale(Wrapped):
        absent = True

        def read(self, key: str) -> bytes:
            if self.absent and key == log_key(1):
                raise NotFound(key)
            return self._storage.read(key)

        def put(self, key: str, data: bytes, *, durable: bool) -> None:
            self.absent = False
            self._storage.put(key, data, durable=durable)

    rival.append(commit(1))
    stale = Stale(storage, lambda create, key, data: create(key, data))
    assert open_log(stale).append(commit(2)).n == 2


def test_an_append_to_a_bucket_reads_an_entry_of_others_once() -> None:
    """Where many append at once, each attempt is a race: no request is made that tells nothing
    new."""
    read: list[str] = []

    class Counting(Wrapped):
        def read(self, key: str) -> bytes:
            read.append(key)
            return self._storage.read(key)

    storage = open_storage(f"memory://{uuid4()}")
    mine = open_log(Counting(storage, lambda create, key, data: create(key, data)))
    mine.append(commit(1))
    open_log(storage).append(commit(2))
    read.clear()
    assert mine.append(commit(3)).n == 3
    assert read.count(log_key(1)) == 0 and read.count(log_key(2)) == 1
    read.clear()
    mine.append(commit(4))
    assert read.count(log_key(3)) == 1, "it may be gone since"


def test_the_loser_of_a_race_reads_the_winner_once_and_looks_up_the_next_once() -> None:
    storage = open_storage(f"memory://{uuid4()}")
    rival, done = open_log(storage), list[tuple[str, str]]()

    def late(create: Create, key: str, data: bytes) -> bool:
        if key == log_key(1):
            rival.append(commit(1))
        done.append(("create", key))
        return create(key, data)

    class Counting(Wrapped):
        def read(self, key: str) -> bytes:
            done.append(("read", key))
            return self._storage.read(key)

    mine = open_log(Counting(storage, late))
    mine.replay()
    done.clear()
    drawn = random.getstate()
    assert mine.append(commit(2)).n == 2
    assert random.getstate() == drawn, (
        "a trainer's random numbers do not depend on who else appended"
    )
    first, second, third = map(log_key, (1, 2, 3))
    assert done == [
        ("read", first),
        ("create", first),
        ("read", first),
        ("read", second),
        ("create", second),
        ("read", third),
    ]


def test_a_writer_passed_more_often_waits_less_and_no_wait_is_long() -> None:
    waits_s = [pause_s(0.1, passed, 1.0) for passed in range(100)]
    assert waits_s == sorted(waits_s, reverse=True)
    assert waits_s[0] <= 8 * 0.1 and waits_s[31] < 2 * 0.1 and waits_s[-1] > 0.0
    assert pause_s(0.1, 5, 0.0) == 0.0
    assert max(pause_s(60.0, passed, 1.0) for passed in range(100)) <= 2.0


def test_only_a_writer_that_returns_at_once_waits_for_those_that_passed_it() -> None:
    crowded = Met(passed=20, attempt_s=0.1, ended_s=100.0)
    assert crowded.pause_s(100.0, 1.0) == pytest.approx(1.0)
    assert crowded.pause_s(102.5, 1.0) == 0.0, "they are through"
    assert (
        Met(passed=1, attempt_s=0.1, ended_s=100.0).pause_s(100.0, 1.0)
        == Met().pause_s(0.0, 1.0)
        == 0.0
    )
    assert Met(passed=1000, attempt_s=10.0, ended_s=100.0).pause_s(100.0, 1.0) <= 2.0
