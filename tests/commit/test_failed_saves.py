"""With `Async(on_error="warn")`, a training goes on where storage fails or hangs: each outage is
said once, what is acknowledged is there, and a limit ends what lasts too long."""

import inspect
import logging
import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Async, errors
from ckptstore.commit.outages import PASSES, Health, passes
from ckptstore.distributed import worker_client, worker_process
from ckptstore.distributed.worker_process import Message
from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NoSpace,
    Unavailable,
)
from ckptstore.log.entries import Entry
from ckptstore.store import Store
from tests.support.faults import KINDS, Fate, Faults, LostAnswers, assert_made_once, assert_one_line

WARN = Async(on_error="warn", retry_s=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(tmp_path / "store", background=WARN) as opened:
        yield opened


@pytest.fixture
def faults(store: Store, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(store, monkeypatch)


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3_000,), float(step))}}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and "durable" in record.message
    ]


def ended(pending: ckptstore.PendingCommit) -> None:
    assert pending.ended(60)


def test_every_public_error_is_classified() -> None:
    public = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, CkptStoreError)
    }
    assert PASSES.keys() == public
    assert all(map(passes, [Unavailable(), NoSpace(), errors.ReadOnly()]))
    wrong = [Conflict(), Corrupt(), InvalidInput(), TypeError(), OSError(), MemoryError()]
    assert not any(map(passes, [*wrong, KeyboardInterrupt(), SystemExit(), CkptStoreError()]))


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_and_each_outage_is_said_once(
    kind: type[CkptStoreError],
    store: Store,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for outage in range(2):
        first = 10 * outage
        ended(store.commit_async(state(first), step=first))
        faults.error = kind("the storage had a bad moment")
        for step in range(first + 1, first + 4):
            ended(store.commit_async(state(step), step=step))
        health = store.health()
        assert (health.failures, health.last_step, health.unsaved_steps) == (3, first, 3)
        assert (health.last_error or "").startswith("the storage had a bad moment")
        assert health.failing_since
        assert len(said(caplog)) == 2 * outage + 1 and "bad moment" in said(caplog)[-1]
        faults.error = None
        made = store.commit_async(state(first + 4), step=first + 4)
        ended(made)
        assert len(said(caplog)) == 2 * outage + 2
        assert f"the commit of step {first + 1}, " in said(caplog)[-1]
        assert store.health() == Health(made.wait().id, first + 4)
    assert [info.step for info in store.log()] == [14, 10, 4, 0]


def test_nothing_changes_for_who_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        faults = Faults(store, monkeypatch)
        faults.error = NoSpace("the disk is full")
        ended(store.commit_async(state(1), step=1))
        assert store.health().failures == 1 and not said(caplog)
        faults.error = None
        with pytest.raises(NoSpace, match="the disk is full"):
            store.commit_async(state(2), step=2)
    assert not said(caplog)


@pytest.mark.parametrize("kind", [Conflict, Corrupt, InvalidInput])
def test_what_must_be_decided_is_raised(
    kind: type[CkptStoreError], store: Store, faults: Faults
) -> None:
    faults.error = kind("look at it")
    ended(store.commit_async(state(1), step=1))
    faults.error = None
    with pytest.raises(kind, match="look at it"):
        store.commit_async(state(2), step=2)


def test_a_state_that_cannot_be_stored_is_raised(store: Store) -> None:
    with pytest.raises(InvalidInput):
        store.commit_async({"model": {"odd": object()}}, step=1)


@pytest.mark.parametrize("named", [True, False], ids=["steps", "commits"])
def test_a_limit_ends_what_lasts_too_long(named: bool, store: Store, faults: Faults) -> None:
    """The call that raises has begun its commit all the same."""
    limited = Async(on_error="warn", retry_s=0, max_unsaved_steps=3)

    def commit(step: int) -> None:
        at = step if named else None
        ended(store.commit_async(state(step), step=at, tag=f"at{step}", background=limited))

    commit(1)
    faults.error = NoSpace("the disk is full")
    for step in (2, 3, 4):
        commit(step)
    if not named:
        commit(5)
    with pytest.raises(Unavailable, match=r"for 4 steps and .*is 3; .*the disk is full"):
        commit(5)
    faults.error = None
    store.commit(state(6), step=6)
    assert store.health().failing_since is None


def test_who_asks_for_the_outcome_gets_it(store: Store, faults: Faults) -> None:
    """A tag after a commit that failed would name another state, and the end of a training must not
    hide that its last state is missing."""
    faults.error = NoSpace("the disk is full")
    with pytest.raises(NoSpace):
        store.commit_async(state(1), step=1).wait()
    ended(store.commit_async(state(2), step=2))
    with pytest.raises(NoSpace, match="the disk is full"):
        store.tag("good")
    ended(store.commit_async(state(3), step=3))
    with pytest.raises(NoSpace, match="the disk is full"):
        store.close()


def test_a_later_commit_that_waits_supersedes_a_failure(store: Store, faults: Faults) -> None:
    faults.error = NoSpace("the disk is full")
    ended(store.commit_async(state(1), step=1))
    faults.error = None
    assert store.commit(state(2), step=2).parents == ()


def test_a_failed_commit_is_tried_again(
    store: Store, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error = Unavailable("the bucket had a bad moment")
    again = Async(on_error="warn", retry_s=60)
    pending = store.commit_async(state(1), step=1, background=again)
    while not said(caplog):
        pending.ended(0.01)
    faults.error = None
    assert pending.wait().step == 1 and faults.failed == 1
    assert len(said(caplog)) == 2 and "none is missing" in said(caplog)[-1]


def test_a_newer_commit_ends_the_tries_of_an_older_one(
    store: Store, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error = Unavailable("the bucket had a bad moment")
    again = Async(on_error="warn", retry_s=6_000)
    older = store.commit_async(state(1), step=1, background=again)
    while not said(caplog):
        older.ended(0.01)
    faults.error = None
    newer = store.commit_async(state(2), step=2, background=again)
    assert newer.wait().parents == ()
    assert [info.step for info in store.log()] == [2]
    assert isinstance(older.exception(), Unavailable)


def test_cancel_ends_the_tries(
    store: Store, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error = Unavailable("the bucket had a bad moment")
    pending = store.commit_async(state(1), step=1, background=Async(on_error="warn", retry_s=6_000))
    while not said(caplog):
        pending.ended(0.01)
    assert pending.cancel()
    assert isinstance(pending.exception(60), errors.Cancelled)


@pytest.mark.parametrize("overlap", ["wait", "skip"])
def test_a_storage_that_hangs_holds_up_no_step(
    overlap: Any, store: Store, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """With `max_wait_s=0` a step does not wait at all; what is said, counted and limited is the
    same for any other time."""
    quick = Async(on_error="warn", max_wait_s=0, overlap=overlap, max_unsaved_steps=3)
    ended(store.commit_async(state(1), step=1))
    with faults.held():
        stuck = store.commit_async(state(2), step=2, background=quick)
        assert faults.there.wait(60)
        skipped = [store.commit_async(state(n), step=n, background=quick) for n in (3, 4)]
        assert all(pending.done() for pending in skipped) and not stuck.done()
        assert store.health().unsaved_steps == 3 and store.health().failures == 2
        assert len(said(caplog)) == 1 and "held up" in said(caplog)[0]
        with pytest.raises(Unavailable, match=r"for 4 steps .*is 3; .*held up"):
            store.commit_async(state(5), step=5, background=quick)
    assert stuck.wait().step == 2
    newest = store.commit_async(state(6), step=6)
    assert newest.wait().step == 6 and len(said(caplog)) == 2
    assert [info.step for info in store.log()] == [6, 2, 1]


def test_a_place_that_is_gone_may_come_back(store: Store, tmp_path: Path) -> None:
    """As a mount does. Nothing is written where the mount was."""
    ended(store.commit_async(state(1), step=1))
    (tmp_path / "store").rename(tmp_path / "away")
    lost = store.commit_async(state(2), step=2)
    ended(lost)
    assert isinstance(lost.failure(), Unavailable) and not (tmp_path / "store").exists()
    (tmp_path / "away").rename(tmp_path / "store")
    assert store.commit_async(state(3), step=3).wait().step == 3


def test_no_call_of_a_step_asks_a_storage_that_hangs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds any call that asks a dead mount, reads too."""
    ended(store.commit_async(state(1), step=1))
    asked, free = threading.Event(), threading.Event()
    here = threading.current_thread()

    def hang(*_: Any) -> None:
        assert threading.current_thread() is not here
        asked.set()
        assert free.wait(120)

    with monkeypatch.context() as patch:
        for name in ("check_head", "check_config", "replay"):
            patch.setattr(store._handle.log, name, hang)
        pending = store.commit_async(state(2), step=2)
        assert asked.wait(60)
    free.set()
    assert pending.wait().step == 2


def test_the_end_says_that_the_last_commit_was_skipped(store: Store, faults: Faults) -> None:
    with faults.held():
        store.commit_async(state(1), step=1)
        assert faults.there.wait(60)
        store.commit_async(state(2), step=2, background=Async(on_error="warn", max_wait_s=0))
    with pytest.raises(Unavailable, match="step 2 was skipped: the commit of step 1 is held up"):
        store.close()


def test_a_step_waits_no_longer_than_was_said(store: Store, faults: Faults) -> None:
    with faults.held():
        stuck = store.commit_async(state(1), step=1)
        assert faults.there.wait(60)
        store.commit_async(state(2), step=2, background=Async(on_error="warn", max_wait_s=0.5))
        assert stuck.age_s >= 0.5
    ended(stuck)
    store.commit(state(3), step=3)


def test_a_state_larger_than_the_staging_memory_is_given_up_while_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Async(on_error="warn", max_wait_s=1, staging_bytes=4 << 20)
    big = {"model": {str(n): torch.full((1 << 19,), float(n)) for n in range(4)}}
    with ckptstore.open(tmp_path / "store", background=small) as store:
        faults = Faults(store, monkeypatch)
        with faults.held():
            pending = store.commit_async(big, step=1)
            assert store.health().failures == 1
            for tensor in big["model"].values():
                tensor.fill_(-1)
        assert isinstance(pending.exception(60), errors.Cancelled) and not store.log()
        assert store.commit(big, step=2).step == 2


def test_a_schedule_by_cost_tells_of_a_commit_that_hangs(store: Store, faults: Faults) -> None:
    quick = Async(on_error="warn", max_wait_s=0, max_unsaved_steps=1)
    with store.every("auto", mtbf_s=1e-9) as every, faults.held():
        every._background = quick
        every(state(1), step=1, background=quick)
        assert faults.there.wait(60)
        every(state(2), step=2, background=quick)
        raised = None
        for step in range(3, 100):
            try:
                every(state(step), step=step, background=quick)
            except Unavailable as error:
                raised = error
                break
        assert "held up" in str(raised)
    store.commit(state(100), step=100)


@pytest.mark.parametrize(
    "wrong",
    [{"on_error": "ignore"}, {"max_unsaved_steps": 0}, {"retry_s": -1}, {"max_wait_s": -1}],
    ids=str,
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Async(**wrong)


def faults_in_a_loop(place: Path, count: int, seed: int, caplog: Any, monkeypatch: Any) -> None:
    """A training whose commits fail at random, until so many have."""
    random, begun = Random(seed), list[ckptstore.PendingCommit]()
    with ckptstore.open(place, background=WARN) as store:
        faults = Faults(store, monkeypatch)
        while count > 0:
            step = len(begun) + 1
            faults.draw(random, 0.6)
            begun.append(store.commit_async(state(step), step=step))
            if random.random() < 0.7 or faults.error:
                ended(begun[-1])
            faults.error = None
            count -= begun[-1].failure() is not None
        ended(store.commit_async(state(step + 1), step=step + 1))
        assert store.health().failures == 0
        failed = [pending.failure() is not None for pending in begun]
        outages = sum(now and not before for before, now in pairwise([False, *failed]))
        acknowledged = {each.step: each.wait().id for each in begun if each.failure() is None}
        log = {info.step: info.id for info in store.log()}
        assert acknowledged.items() <= log.items()
        for at in random.sample(sorted(acknowledged), min(20, len(acknowledged))):
            assert torch.equal(store.checkout(at).read("model/w"), state(at)["model"]["w"])
    warned = [text for text in said(caplog) if "training goes on" in text]
    assert len(warned) == outages and len(said(caplog)) == 2 * outages


def test_no_training_ends_by_random_faults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_in_a_loop(tmp_path / "store", 30, 1, caplog, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_500_random_faults(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_in_a_loop(tmp_path / "store", 500, seed, caplog, monkeypatch)


def test_health_is_known_while_a_commit_hangs(store: Store, faults: Faults) -> None:
    with faults.held():
        store.commit_async(state(1), step=1)
        assert faults.there.wait(60)
        found: list[Health] = []
        thread = threading.Thread(target=lambda: found.append(store.health()))
        thread.start()
        thread.join(60)
        assert found == [Health()]


def test_a_commit_whose_answer_was_lost_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(seed)
    again = Async(on_error="warn", retry_s=3)
    with ckptstore.open(tmp_path / "store", background=again) as store:
        answers = LostAnswers(store, monkeypatch)
        for step in range(6):
            answers.left = random.choices(list(Fate), k=random.randrange(4))
            made = store.commit_async(state(step), step=step).wait(60)
            assert torch.equal(made.read("model/w"), torch.full((3_000,), float(step)))
        assert_made_once(store, range(6))


def test_a_durable_commit_succeeds_although_its_statistics_cannot_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise Unavailable("the bucket had a bad moment")

    def in_background(*args: Any, **options: Any) -> ckptstore.Snapshot:
        return store.commit_async(*args, **options).wait()

    append = store._handle.log.append

    def then_fail(*args: Any, **options: Any) -> Entry:
        entry = append(*args, **options)
        monkeypatch.setattr(store._handle.storage, "read_into", refuse)
        return entry

    for step, commit in enumerate((store.commit, in_background)):
        monkeypatch.setattr(store._handle.log, "append", then_fail)
        made = commit(state(step), step=step, stats=True)
        monkeypatch.undo()
        assert made.stats and made.stats.tensors is None
        assert "the bucket had a bad moment" in caplog.records[-1].message
    assert store.health().failures == 0
    assert_made_once(store, range(2))


def test_a_commit_follows_the_one_before_although_that_said_it_had_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Those that were made all the same are there once, and no other training made them."""
    random, begun = Random(seed), list[ckptstore.PendingCommit]()
    answers = LostAnswers(store, monkeypatch)
    for step in range(30):
        answers.left = [drawn] if (drawn := random.choice([*Fate, None])) else []
        begun.append(store.commit_async(state(step), step=step))
        ended(begun[-1])
    store.commit(state(30), step=30)
    assert_one_line(store, {*(each.step for each in begun if not each.failure()), 30})
    assert "somebody else" not in caplog.text


@pytest.mark.parametrize("error", [Unavailable, KeyboardInterrupt])
def test_a_commit_follows_one_that_was_made_although_its_call_raised(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(5):
            with pytest.MonkeyPatch.context() as patch:
                if step % 2:
                    answers = LostAnswers(store, patch)
                    answers.left, answers.error = [Fate.MADE], error
                    with pytest.raises(error):
                        store.commit(state(step), step=step)
                elif step == 2:
                    store.commit_async(state(step), step=step).wait()
                else:
                    store.commit(state(step), step=step)
        assert_made_once(store, range(5))
    assert "somebody else" not in caplog.text


def test_a_commit_is_made_once_although_its_worker_dies_before_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, lost = Async(on_error="warn", retry_s=3, executor="process"), [True]

    def receive(connection: Any) -> Message | None:
        message = worker_process.receive(connection)
        if message and "done" in message and lost and lost.pop():
            assert store.worker_pid
            os.kill(store.worker_pid, signal.SIGKILL)
            return None
        return message

    monkeypatch.setattr(worker_client, "receive", receive)
    with ckptstore.open(tmp_path / "store", background=again) as store:
        for step in range(2):
            assert store.commit_async(state(step), step=step).wait(60).step == step
        assert not lost
        assert_made_once(store, range(2))
