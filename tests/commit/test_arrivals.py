"""A copy that goes on while a commit reads what has arrived: from a device, or lazily. A device is
played by the processor's own memory."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Async, Unavailable
from ckptstore.commit import async_commit as copies
from ckptstore.commit.async_commit import PendingWatch
from ckptstore.commit.plan import ChunkRun
from ckptstore.state import staging
from ckptstore.state.staging import PIECE_BYTES
from ckptstore.state.staging_buffers import Copy, CopyProgress
from tests.commit.states import HANGS_S, assert_committed, attack, frozen_copy, training
from tests.commit.test_commits import break_storage, mend_storage

PIECES = 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's memory counts as a device's."""
    monkeypatch.setattr(staging, "AWAY", frozenset(["cpu"]))


def pieces() -> torch.Tensor:
    return torch.arange(PIECES * PIECE_BYTES // 8)


def copying(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Have `before` called with the number of the piece ahead of each copy that goes on after the
    call has handed the commit over."""
    original = copies.copy_task

    def copy_task(task: Sequence[Any], arena: Any) -> None:
        before(task[0].offset // PIECE_BYTES)
        original(task, arena)

    monkeypatch.setattr(copies, "copy_task", copy_task)


# -- what has arrived --


def test_a_reader_waits_only_for_the_bytes_it_needs() -> None:
    arrivals = CopyProgress([(Copy(0, 100, 1), Copy(300, 50, 1)), (Copy(100, 100, 1),)])
    with ThreadPoolExecutor(3) as threads:
        first, second, both = (
            threads.submit(arrivals.wait, *span) for span in ((320, 330), (199, 200), (99, 101))
        )
        arrivals.wait(200, 300)  # nothing is copied there
        assert not arrivals.arrived(0)
        first.result(HANGS_S)
        assert not second.done() and not both.done()
        assert arrivals.arrived(1)
        second.result(HANGS_S)
        both.result(HANGS_S)


def test_a_reader_of_a_failed_copy_gets_its_error() -> None:
    arrivals = CopyProgress([(Copy(0, 100, 1),), (Copy(100, 100, 1),)])
    arrivals.arrived(0, OSError("no bus"))
    arrivals.arrived(1)
    arrivals.wait(100, 200)
    with pytest.raises(OSError, match="no bus"):
        arrivals.wait(50, 150)


# -- the commit --


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_each_piece_is_written_before_the_next_one_arrives(
    store: ckptstore.Store, away: None, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    written, copied, changed = set[int](), list[int](), threading.Condition()

    def worked(self: PendingWatch, batch: Sequence[ChunkRun]) -> None:
        with changed:
            written.update(run.cuts[0] // PIECE_BYTES for run in batch)
            changed.notify_all()

    def before(piece: int) -> None:
        with changed:
            assert changed.wait_for(lambda: written >= set(range(piece)), HANGS_S), (
                f"piece {piece}: only {written} were written"
            )
        copied.append(piece)

    monkeypatch.setattr(PendingWatch, "worked", worked)
    copying(monkeypatch, before)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(pieces(), requires_grad=False)})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    pending = store.commit_async(state, background=Async(staging=how))
    pending.wait_staged()
    model["w"].zero_()
    assert sorted(copied) == list(range(PIECES)) and written >= set(range(PIECES - 1))
    assert torch.equal(pending.wait().read("model/w"), pieces())


def test_a_call_from_a_device_returns_when_everything_has_arrived(
    store: ckptstore.Store, away: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Event()
    copying(monkeypatch, lambda piece: begin.wait(HANGS_S) and None)
    threading.Timer(0.05, begin.set).start()
    tensor = pieces()
    pending = store.commit_async({"t": tensor})
    assert pending.staged()
    tensor.zero_()
    assert torch.equal(pending.wait().read("t"), pieces())


@pytest.mark.parametrize(
    "how", [Async(), Async(executor="process"), Async(staging_bytes=2 << 20)], ids=str
)
def test_a_commit_from_a_device_is_the_state_as_of_the_call(
    tmp_path: Path, away: None, how: Async
) -> None:
    state = training()
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=65536), background=how
    ) as store:
        for step in range(3):
            wanted = frozen_copy(state)
            pending = store.commit_async(state, step=step)
            with attack(state):
                snapshot = pending.wait()
            assert_committed(snapshot, wanted)


# -- failing --


def test_a_copy_that_fails_fails_the_commit(
    store: ckptstore.Store, away: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(piece: int) -> None:
        if piece == 2:
            raise OSError("no bus")

    with monkeypatch.context() as patch:
        copying(patch, before)
        pending = store.commit_async({"t": pieces()})
        with pytest.raises(OSError, match="no bus"):
            pending.wait()
    assert store.log() == []
    assert torch.equal(store.commit_async({"t": pieces()}).wait().read("t"), pieces())


def test_staging_memory_is_nobody_elses_before_the_copy_has_ended(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Event()
    copying(monkeypatch, lambda piece: begin.wait(HANGS_S) and None)
    break_storage(store)  # the commit fails at once
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(pieces(), requires_grad=False)})
    pending = store.commit_async(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters())},
        background=Async(staging="lazy"),
    )
    with pytest.raises(TimeoutError):
        pending.wait(timeout_s=0.3)
    begin.set()
    assert isinstance(pending.exception(), Unavailable)
    mend_storage(store)


def test_interrupting_the_call_cancels_the_commit(
    store: ckptstore.Store, away: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not been copied then is the caller's to write to."""

    def interrupted(self: copies.LazyCopy) -> None:
        raise KeyboardInterrupt

    go_on = threading.Event()
    copying(monkeypatch, lambda piece: go_on.wait(HANGS_S) and None)
    monkeypatch.setattr(copies.LazyCopy, "hold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.commit_async({"t": pieces()})
    go_on.set()
    with store.committing():
        pass
    assert store.log() == []
