"""Asynchronous commits as training code uses them: order, parents, waiting, cancelling."""

import asyncio
import io
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Busy, Cancelled, InvalidInput, Unavailable
from ckptstore.commit import pending as in_flight
from ckptstore.repository.thread_pool import ASIDE_NICE, ThreadPool
from ckptstore.storage.direct_io_file import BLOCK_BYTES, DIRECT_FROM
from ckptstore.store import internals_of
from tests.commit.states import Gate, held_commit
from tests.storage.test_direct_io import address_of, cached, takes_direct_writes

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        yield store


def state(value: float = 0.0, count: int = 1000) -> dict[str, torch.Tensor]:
    return {"t": torch.full((count,), float(value))}


def break_storage(store: ckptstore.Store) -> None:
    """No session can be opened any more."""
    sessions = Path(store.url, "sessions")
    shutil.rmtree(sessions, ignore_errors=True)
    sessions.touch()


def mend_storage(store: ckptstore.Store) -> None:
    Path(store.url, "sessions").unlink()


def leave_committing(store: ckptstore.Store) -> None:
    with store.committing():
        pass


# -- order --


def test_the_call_returns_while_the_commit_goes_on(store: ckptstore.Store) -> None:
    pending, go_on = held_commit(store, state(), step=1)
    assert pending.staged() and not pending.done()
    with ckptstore.open(store.url) as another:
        assert another.log() == []
    with pytest.raises(TimeoutError, match="hashed"):
        pending.wait(timeout_s=0.01)
    go_on()
    assert pending.wait().step == 1
    assert pending.done() and pending.exception() is None


def test_commits_are_made_in_the_order_of_the_calls_each_the_parent_of_the_next(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store", background=ckptstore.Async(max_in_flight=3)) as store:
        first, go_on = held_commit(store, state(0), step=0)
        others = [store.commit_async(state(step), step=step) for step in (1, 2)]
        assert not any(pending.done() for pending in others)
        go_on()
        last = store.commit(state(3), step=3)
        ids = [first.wait().id, *(pending.wait().id for pending in others), last.id]
        assert [info.id for info in reversed(store.log())] == ids
        assert [store.checkout(id).parents for id in ids] == [(), *((id,) for id in ids[:-1])]


def test_the_parent_of_a_commit_is_the_commit_restored_since_the_last_call(
    store: ckptstore.Store,
) -> None:
    first = store.commit(state(1))
    second, go_on = held_commit(store, state(2))
    store.checkout(first.id).restore(state())
    go_on()
    third = store.commit_async(state(3)).wait()
    assert second.wait().parents == (first.id,)
    assert third.parents == (first.id,)


def test_at_most_one_commit_is_in_flight_and_the_next_call_waits_for_it(
    store: ckptstore.Store,
) -> None:
    first, go_on = held_commit(store, state(1))
    threading.Timer(0.05, go_on).start()
    second = store.commit_async(state(2))
    assert first.done()
    assert second.wait().parents == (first.wait().id,)
    assert (second.timings.held_s or 0) > 0


def test_a_commit_that_would_wait_can_be_skipped_instead(store: ckptstore.Store) -> None:
    first, go_on = held_commit(store, state(1), step=1)
    skipped = store.commit_async(state(2), step=2, background=ckptstore.Async(overlap="skip"))
    assert skipped.done()
    with pytest.raises(Busy, match=r"step 2 was skipped.*in flight"):
        skipped.wait()
    go_on()
    third = store.commit_async(
        state(3), background=ckptstore.Async(overlap="skip" if first.wait() else "wait")
    )
    assert third.wait().parents == (first.wait().id,)


def test_one_that_finds_no_staging_memory_can_be_skipped_too(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(max_in_flight=2, staging_bytes=2 * MIB)
    ) as store:
        first, go_on = held_commit(store, state(1))
        with pytest.raises(Busy, match="staging memory"):
            store.commit_async(state(2), background=ckptstore.Async(overlap="skip")).wait()
        threading.Timer(0.05, go_on).start()
        assert store.commit_async(state(2)).wait().parents == (first.wait().id,)


def test_staging_memory_is_used_again(store: ckptstore.Store) -> None:
    large = {"t": torch.zeros(3 * MIB, dtype=torch.uint8)}
    for step in range(20):
        large["t"].fill_(step)
        store.commit_async(large, step=step)
    store.commit_async(large).wait()
    assert store.staging.held_bytes == 4 * MIB


@pytest.mark.parametrize("overlap", ["never", None])
def test_an_unknown_way_to_overlap_is_refused(store: ckptstore.Store, overlap: str) -> None:
    with pytest.raises(InvalidInput, match="'wait' or 'skip'"):
        store.commit_async(state(), background=ckptstore.Async(overlap=overlap))  # type: ignore[arg-type]


# -- waiting --


def test_milestones_are_told_in_order_and_a_callback_that_fails_stops_nothing(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, int | None, int]] = []

    def on_progress(progress: ckptstore.CommitProgress) -> None:
        seen.append((progress.milestone, progress.step, progress.state_bytes))
        raise RuntimeError("not my day")

    with caplog.at_level(logging.ERROR, "ckptstore"):
        pending = store.commit_async(
            state(), step=4, background=ckptstore.Async(on_progress=on_progress)
        )
        pending.wait()
    assert [name for name, *_ in seen if name != "held"] == [
        "staged",
        "hashed",
        "written",
        "durable",
    ]
    assert all(rest == (4, 4000) for _, *rest in map(tuple, seen) for rest in [tuple(rest)])
    assert "not my day" in caplog.text
    timings = pending.timings
    assert None not in (
        timings.held_s,
        timings.staged_s,
        timings.hashed_s,
        timings.written_s,
        timings.durable_s,
    )
    # not None
    assert timings.staged_s <= timings.hashed_s <= timings.written_s <= timings.durable_s  # type: ignore[operator]


def test_a_coroutine_can_await_a_commit(store: ckptstore.Store) -> None:
    async def main() -> int | None:
        return (await store.commit_async(state(), step=7)).step

    assert asyncio.run(main()) == 7


def test_committing_waits_also_when_the_block_raises(store: ckptstore.Store) -> None:
    pending = []

    def train() -> None:
        with store.committing():
            pending.append(store.commit_async(state(count=100_000), step=1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert pending[0].done()
    assert store.checkout(1).id == pending[0].wait().id


def test_close_waits_and_says_so(store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, go_on = held_commit(store, state(), step=3)

    class Told(io.StringIO):
        """The commit goes on once something was said."""

        def write(self, text: str) -> int:
            go_on()
            return super().write(text)

    monkeypatch.setattr(in_flight, "NOTICE_S", 0.02)
    monkeypatch.setattr(sys, "stderr", told := Told())
    store.close()
    assert pending.wait().step == 3
    assert "waiting for the commit of step 3" in told.getvalue()


# -- calling off --


def test_a_cancelled_commit_is_not_made(store: ckptstore.Store) -> None:
    first = store.commit(state(1))
    pending, go_on = held_commit(store, state(2), step=2)
    assert pending.cancel()
    go_on()
    with pytest.raises(Cancelled, match="step 2"):
        pending.wait()
    assert [info.id for info in store.log()] == [first.id]
    assert store.commit_async(state(3)).wait().parents == (first.id,)


def test_a_queued_commit_can_be_cancelled(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", background=ckptstore.Async(max_in_flight=2)) as store:
        first, go_on = held_commit(store, state(1))
        second = store.commit_async(state(2))
        assert second.cancel()
        go_on()
        assert isinstance(second.exception(), Cancelled)
        assert len(store.log()) == 1 and first.done()


def test_a_callback_that_exits_ends_neither_the_commit_nor_the_next(
    store: ckptstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    pending, go_on = held_commit(store, state(1), step=1)
    pending.then(lambda ended: sys.exit(3))
    go_on()
    pending.wait()
    assert store.commit_async(state(2), step=2).wait(timeout_s=60.0).step == 2
    assert "a callback raised at the end of the commit of step 1" in caplog.text


def test_a_durable_commit_cannot_be_cancelled(store: ckptstore.Store) -> None:
    gate = Gate("durable")
    pending = store.commit_async(state(), background=ckptstore.Async(on_progress=gate))
    gate.there.wait()
    assert not pending.cancel()
    gate.opened.set()
    pending.wait()
    assert not pending.cancel()
    assert len(store.log()) == 1


def test_background_threads_run_at_low_priority(store: ckptstore.Store) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = priority()
    low = min(own + ASIDE_NICE, 19)
    seen: dict[str, int] = {}
    store.commit(state(1))
    pending = store.commit_async(
        state(2, 3_000_000),
        background=ckptstore.Async(
            on_progress=lambda progress: seen.update({progress.milestone: priority()})
        ),
    )
    pending.wait()
    assert {milestone: seen[milestone] for milestone in ("staged", "hashed", "durable")} == {
        "staged": own,
        "hashed": low,
        "durable": low,
    }
    assert priority() == own
    pool, started_by_it = ThreadPool(1, aside=True), ThreadPool(1, aside=True)
    assert pool.submit(priority).result() == low
    assert pool.submit(lambda: started_by_it.submit(priority)).result().result() == low
    started_by_it.close()
    pool.close()


@pytest.mark.parametrize(
    ("executor", "direct_io", "in_cache"),
    [
        ("thread", None, [True, False]),
        ("process", None, [True, False]),
        ("thread", True, [False, False]),
        ("process", False, [True, True]),
    ],
)
def test_background_commits_bypass_the_page_cache(
    tmp_path: Path, executor: Any, direct_io: bool | None, in_cache: list[bool]
) -> None:
    (tmp_path / "file").touch()
    if not takes_direct_writes(tmp_path / "file"):
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    found, seen = [], set()
    with ckptstore.open(
        tmp_path / "store",
        threads=1,
        background=ckptstore.Async(executor=executor),
        storage=ckptstore.Storage(direct_io=direct_io),
    ) as store:
        for commit in (store.commit, lambda state: store.commit_async(state).wait()):
            snapshot = commit({"t": torch.randint(1 << 62, (DIRECT_FROM // 4,))})
            (pack,) = {
                pack
                for pack in Path(store.url, "packs").glob("*/*")
                if pack.stat().st_size > DIRECT_FROM
            } - seen
            seen.add(pack)
            found.append(cached(pack, DIRECT_FROM + BLOCK_BYTES))
            snapshot.verify()
    assert found == in_cache


def test_copies_are_written_directly_even_if_chunks_end_within_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    if not takes_direct_writes(tmp_path / "file"):
        pytest.skip("the filesystem of the temporary directory refuses O_DIRECT")
    written: list[tuple[int, int]] = []
    pwritev = os.pwritev

    def seen(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written.extend((address_of(buffer), len(buffer)) for buffer in buffers if len(buffer))
        return pwritev(fd, buffers, offset)

    tensor = torch.rand(6000, 1001)  # chunks end with rows, of 4,004 bytes
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        monkeypatch.setattr(os, "pwritev", seen)
        store.commit_async({"t": tensor}).wait().verify()
        (arena,) = internals_of(store).async_commits.pool._free
    elsewhere = sum(
        nbytes
        for address, nbytes in written
        if not arena.address <= address < arena.address + arena.nbytes
    )
    assert elsewhere < MIB


def test_without_threads_the_caller_makes_the_commit(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "LINGER_S", 0.0)
    store.commit_async(state(1), step=1)
    leave_committing(
        store
    )  # the store has its other threads, and the one that made the commit has ended

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(in_flight.threading, "Thread", NoThread)
        assert store.commit_async(state(2), step=2).done()
    assert [info.step for info in store.log()] == [2, 1]
    assert store.commit_async(state(3), step=3).wait().step == 3


# -- failing --


def test_a_failure_is_raised_by_wait(store: ckptstore.Store) -> None:
    break_storage(store)
    pending = store.commit_async(state(), step=1)
    with pytest.raises(Unavailable) as caught:
        pending.wait()
    assert any("step 1" in note for note in caught.value.__notes__)
    mend_storage(store)
    store.commit(state())


@pytest.mark.parametrize("call", ["commit", "commit_async", "close", "committing"])
def test_a_failure_that_nobody_has_seen_is_raised_by_the_next_call_once(
    store: ckptstore.Store, call: str
) -> None:
    kept = store.commit(state(1))
    break_storage(store)
    pending = store.commit_async(state(2))
    calls = {
        "commit": lambda: store.commit(state(3)),
        "commit_async": lambda: store.commit_async(state(3)),
        "close": store.close,
        "committing": lambda: leave_committing(store),
    }
    while not pending.done():
        time.sleep(0.01)
    mend_storage(store)
    with pytest.raises(Unavailable):
        calls[call]()
    assert pending.done()
    if call != "close":
        leave_committing(store)
    made = call in ("commit", "commit_async")
    with ckptstore.open(store.url) as again:
        last, *before = [info.id for info in again.log()]
        assert before == [kept.id] * made and again.checkout(last).parents == (kept.id,) * made
    if call != "close":
        assert store.commit_async(state(3)).wait().parents == (last,)


def test_an_error_tells_of_an_earlier_failure_that_nobody_has_seen(store: ckptstore.Store) -> None:
    store.commit(state(1))
    break_storage(store)
    store.commit_async(state(2), step=2)
    with pytest.raises(Unavailable) as raised:
        store.commit(state(3))
    assert any("before, the commit of step 2" in note for note in raised.value.__notes__)
    mend_storage(store)
    store.commit(state(4))


def test_a_state_that_cannot_be_stored_is_refused_by_the_call(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match="object"):
        store.commit_async({"a": object()})
    store.commit_async(state()).wait()


def test_a_failure_after_leaves_were_borrowed_reaches_the_call(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(staging_bytes=2 * MIB)
    ) as store:
        large = {"t": torch.zeros(5 * MIB, dtype=torch.uint8)}
        break_storage(store)
        with pytest.raises(Unavailable):
            store.commit_async(large)
        mend_storage(store)
        assert store.commit_async(large).wait().logical_bytes == 5 * MIB


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_open_the_store_itself(store: ckptstore.Store) -> None:
    pending, go_on = held_commit(store, state(1), step=1)
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that waits for its parent's commit ends, too
        try:
            store.commit_async(state(2), step=2)
        except InvalidInput as error:
            os._exit(7 if "forked" in str(error) else 1)
        finally:
            os._exit(1)
    go_on()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pending.wait().id == store.log()[0].id
