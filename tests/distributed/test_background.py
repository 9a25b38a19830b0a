"""Many ranks commit in the background: one commit, whatever training does meanwhile, and a failure
on one rank fails all.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptstore
from ckptstore.commit import async_commit as copies
from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.distributed import coordinator, rank_worker
from ckptstore.distributed.commit import _Publication
from ckptstore.distributed.coordinator import Coordinator, head_of
from ckptstore.distributed.rank_worker import RankWorker
from ckptstore.state import staging
from ckptstore.state.staging import PIECE_BYTES
from tests.commit.states import HANGS_S, Gate
from tests.distributed.layouts import full, group_of, layout, meet
from tests.distributed.pool import Pool
from tests.distributed.test_failures import Refusing
from tests.support.torch_release import FSDP2

KIB = 1 << 10
PIECES = 3


def a_state(rank: int, n: int, step: float) -> dict[str, Any]:
    tensors = {
        "rows": layout("rows", full() + step, n),
        "columns": layout("columns", full() - step, n),
        "whole": full() * step,
    }
    return {"model": tensors, "own": {"rank": rank, "noise": torch.full((3000,), rank + step)}}


def commit_while_training(rank: int, path: Path) -> list[str]:
    """Three commits, each overwritten as soon as the call returns, with collectives of the training
    group in parallel.
    """
    n = 4
    meet(n)
    ids = []
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=64 * KIB)) as store:
        for step in range(3):
            state = a_state(rank, n, step)
            pending = store.commit_async(state, step=step, ranks=ckptstore.Ranks(private=["own/*"]))
            state["model"]["rows"]._local_tensor.fill_(-7)
            state["model"]["whole"].fill_(-7)
            state["own"]["noise"].fill_(-7)
            for _ in range(20):
                dist.all_reduce(torch.ones(100))
            ids.append(pending)
        snapshots = [pending.wait() for pending in ids]
        assert [snapshot.parents for snapshot in snapshots[1:]] == [
            (snapshot.id,) for snapshot in snapshots[:-1]
        ]
        again = store.commit(a_state(rank, n, 2), ranks=ckptstore.Ranks(private=["own/*"]))
        assert again.content_id == snapshots[-1].content_id and again.parents == (snapshots[-1].id,)
        last = ids[-1].timings
        assert None not in (
            last.held_s,
            last.staged_s,
            last.hashed_s,
            last.written_s,
            last.durable_s,
        )
    return [snapshot.id for snapshot in snapshots]


def test_a_commit_is_the_state_of_all_ranks_as_of_the_call(pool: Pool, tmp_path: Path) -> None:
    ids = pool.run(commit_while_training, tmp_path / "store")
    assert ids == ids[:1] * 4
    with ckptstore.open(tmp_path / "store") as store:
        for step, commit in enumerate(ids[0]):
            snapshot = store.checkout(commit)
            assert torch.equal(snapshot.read("model/rows"), full() + step)
            assert torch.equal(snapshot.read("model/whole"), full() * step)
            assert torch.equal(snapshot.read("own/noise/3"), torch.full((3000,), 3.0 + step))


def fail_and_go_on(rank: int, path: Path) -> None:
    n = 4
    meet(n)
    good = a_state(rank, n, 1)
    with ckptstore.open(path) as store:
        with pytest.raises(ckptstore.CkptStoreError, match="rank 2: ValueError: no state today"):
            store.commit_async({"model": Refusing(2, 2)} if rank == 2 else good)
        with pytest.raises(ckptstore.InvalidInput, match="leave out"):
            store.commit_async(good, background=ckptstore.Async(trust_version=True))
        with pytest.raises(ckptstore.Conflict, match="rank 3 commits step 7"):
            store.commit_async(good, step=7 if rank == 3 else 1).wait()
        pending = store.commit_async(
            {"x": {"a": torch.full((5000,), float(rank))}},
            ranks=ckptstore.Ranks(replicated=["x/*"]),
        )  # unequal
        with pytest.raises(ckptstore.Conflict, match=r"all 4 ranks: (?s:.*)x/a is one tensor"):
            store.commit(good)  # an unseen failure is raised by the next call
        assert pending.done() and store.log() == []
        store.commit_async(good, step=1).wait()


def test_what_fails_on_one_rank_fails_on_all_and_the_next_commit_works(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(fail_and_go_on, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [1]


class Given:
    """An object whose state is asked for with `asked`, as the call of another commit is under
    way."""

    def __init__(self, asked: Callable[[], object]) -> None:
        self.asked = asked

    def state_dict(self) -> dict[str, Any]:
        self.asked()
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"at": 1}


def raise_together(rank: int, path: Path) -> None:
    """A commit fails while one rank is within the call of the next one; and one rank alone has seen
    a failure."""
    meet(2)
    if rank >= 2:
        return
    ranks, failing = ckptstore.Ranks(process_group=group_of(2), timeout_s=60), threading.Event()
    two = ckptstore.Async(max_in_flight=2)
    with ckptstore.open(path, background=two) as store, pytest.MonkeyPatch.context() as patch:

        def commit(step: int, asked: Callable[[], object] = int) -> ckptstore.PendingCommit:
            return store.commit_async({"x": Given(asked)}, step=step, ranks=ranks)

        def report(*_: Any) -> None:
            assert failing.wait(HANGS_S)
            raise ckptstore.NoSpace("no room")

        def failed_meanwhile() -> None:
            failing.set()
            assert first.ended(HANGS_S)

        store.commit({"x": Given(int)}, step=0, ranks=ranks)
        with patch.context() as full_disk:
            full_disk.setattr(RankWorker, "report", report)
            first = commit(1)
            second = commit(2, failed_meanwhile if rank else failing.set)
            assert second.ended(HANGS_S)
        with pytest.raises(ckptstore.NoSpace, match="raised by the next commit, which did not"):
            commit(3)
        assert isinstance(second.exception() if rank else second.failure(), ckptstore.NoSpace)
        with pytest.raises(ckptstore.NoSpace, match="raised by the next call, which did nothing"):
            store.resume({"x": Given(int)}, ranks=ranks)
        found = store.resume({"x": Given(int)}, ranks=ranks)
        assert found and found.step == 0


def test_ranks_raise_a_failure_together_whenever_it_came_and_whoever_has_seen_it(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(raise_together, tmp_path / "store")


def interrupt_one_call(rank: int, path: Path) -> str:
    """One rank is interrupted when all have begun: what the others hear."""
    meet(4)
    state = a_state(rank, 4, 1)
    with ckptstore.open(path) as store, pytest.MonkeyPatch.context() as patch:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        if rank == 1:
            patch.setattr(copies.AsyncCommits, "_let_go", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit_async(state, step=1)
            patch.undo()
            error: BaseException | None = None
        else:
            error = store.commit_async(state, step=1).exception(HANGS_S)
            assert isinstance(error, ckptstore.Cancelled)
        store.commit_async(state, step=2).wait()
    return str(error)


def test_a_call_that_is_interrupted_on_one_rank_fails_on_all_and_the_next_one_works(
    pool: Pool, tmp_path: Path
) -> None:
    errors = pool.run(interrupt_one_call, tmp_path / "store")
    assert all("or the call that began it interrupted" in errors[rank] for rank in (0, 2, 3))
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [2]


def test_parts_of_two_calls_never_become_one_commit() -> None:
    label = CommitMetadata("main", turn=3)
    heads = [head_of(label), head_of(replace(label, turn=4))]
    with pytest.raises(ckptstore.Conflict, match="of another call of commit_async than rank 0"):
        coordinator._check_labels(heads, label)


def skip_and_call_off(rank: int, path: Path) -> None:
    n = 4
    meet(n)
    gate = Gate("hashed")
    with ckptstore.open(path) as store:
        pending = store.commit_async(
            a_state(rank, n, 1),
            step=1,
            background=ckptstore.Async(on_progress=gate if rank == 1 else None),
        )
        skipped = store.commit_async(
            a_state(rank, n, 2), step=2, background=ckptstore.Async(overlap="skip")
        )
        assert isinstance(
            skipped.exception(), ckptstore.Busy
        )  # also on ranks that finished their own part
        if rank == 1:
            gate.there.wait()
            assert pending.cancel()
            gate.opened.set()
        assert isinstance(pending.exception(), ckptstore.Cancelled)
        store.commit_async(a_state(rank, n, 3), step=3).wait()


def test_ranks_skip_together_and_one_calls_off_for_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(skip_and_call_off, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [3]


def commit_on_schedule(rank: int, path: Path) -> list[int]:
    """A clock that is right on rank 0 only, and a signal that only rank 2 gets."""
    n = 4
    meet(n)
    begun, ended = [], threading.Event()
    handler = signal.getsignal(signal.SIGUSR1)
    with (
        ckptstore.open(path) as store,
        store.every(seconds=1e-9 if rank == 0 else 1e9, on_signal=signal.SIGUSR1) as every,
    ):
        for step in range(100):
            if step == 3 and rank == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            if every(a_state(rank, n, step), step=step):
                begun.append(step)
            if every.stopped:
                ended.set()
                break
    assert ended.is_set() and signal.getsignal(signal.SIGUSR1) == handler
    return begun


def test_ranks_commit_at_the_same_steps_and_stop_together(pool: Pool, tmp_path: Path) -> None:
    begun = pool.run(commit_on_schedule, tmp_path / "store")
    assert begun == [[0, 1, 2, 3]] * 4
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [3, 2, 1, 0]


def train_sharded(rank: int, path: Path) -> None:
    """FSDP2 with lazy staging: steps go on while the shards are copied."""
    from torch.distributed.fsdp import fully_shard

    n = 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 64))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (n,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    step()
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=64 * KIB)) as store:
        for number in range(3):
            wanted = store.commit(state).content_id
            pending = store.commit_async(
                state, step=number, background=ckptstore.Async(staging="lazy")
            )
            step()
            assert pending.staged()
            assert pending.wait().content_id == wanted


@FSDP2
def test_shards_are_staged_lazily_and_steps_wait(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_sharded, tmp_path / "store")


def die_in_the_background(
    rank: int, path: Path, victim: int, survivors: list[int], phase: str
) -> str | None:
    group = dist.new_group(sorted([victim, *survivors]), use_local_synchronization=True)
    state = {"w": {"x": torch.arange(200_000.0)}}
    store = ckptstore.open(path)
    before = len(store.log())
    if rank == victim:
        owners = {"publish": Coordinator, "report": RankWorker, "_receipt": _Publication}
        owner: Any = owners[phase]
        setattr(owner, phase, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    pending = store.commit_async(state, ranks=ckptstore.Ranks(process_group=group, timeout_s=20))
    with pytest.raises(ckptstore.Unavailable):
        pending.wait()
    assert len(store.log()) == before
    with pytest.raises(ckptstore.Unavailable):
        store.commit_async(state, ranks=ckptstore.Ranks(process_group=group, timeout_s=20)).wait()
    left = dist.new_group(survivors, use_local_synchronization=True)
    made = (
        store.commit_async(state, ranks=ckptstore.Ranks(process_group=left, timeout_s=20)).wait().id
    )
    with suppress(ckptstore.Unavailable):
        store.close()
    return made


@pytest.fixture
def doomed() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.close()


def hash_what_has_arrived(rank: int, path: Path, how: Any) -> int:
    """Two ranks deliver a piece only after the earlier ones have been hashed; host memory stands
    for a device's.
    """
    group = group_of(2)
    if rank > 1:
        return 0
    hashed, copied, changed = list[int](), list[int](), threading.Condition()
    model = nn.ParameterDict(
        {"w": nn.Parameter(torch.arange(PIECES * PIECE_BYTES // 8) + rank, requires_grad=False)}
    )
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    checksum, copy = rank_worker.checksum, copies.copy_task

    def noted_checksum(data: memoryview) -> bytes:
        found = checksum(data)
        with changed:
            hashed.append(len(data))
            changed.notify_all()
        return found

    def copy_task(task: Any, arena: Any) -> None:
        piece = task[0].offset // PIECE_BYTES
        with changed:
            assert changed.wait_for(lambda: sum(hashed) >= piece * PIECE_BYTES, HANGS_S), (
                f"piece {piece}: only {sum(hashed)} bytes"
            )
        copied.append(piece)
        copy(task, arena)

    with pytest.MonkeyPatch.context() as patch, ckptstore.open(path) as store:
        patch.setattr(rank_worker, "checksum", noted_checksum)
        patch.setattr(copies, "copy_task", copy_task)
        patch.setattr(staging, "AWAY", frozenset(["cpu"]))
        pending = store.commit_async(
            state,
            ranks=ckptstore.Ranks(process_group=group, private=["model/*"]),
            background=ckptstore.Async(staging=how),
        )
        pending.wait_staged()
        model["w"].data.zero_()
        pending.wait()
    return len(copied)


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_each_rank_hashes_a_piece_before_the_next_one_arrives(
    pool: Pool, tmp_path: Path, how: str
) -> None:
    assert pool.run(hash_what_has_arrived, tmp_path / "store", how) == [PIECES, PIECES, 0, 0]
    with ckptstore.open(tmp_path / "store") as store:
        for rank in range(2):
            assert torch.equal(
                store.checkout().read(f"model/w/{rank}"),
                torch.arange(PIECES * PIECE_BYTES // 8) + rank,
            )


@pytest.mark.soak
def test_survivors_of_a_rank_killed_in_the_background_raise_and_go_on_without_it(
    doomed: Pool, tmp_path: Path
) -> None:
    alive = [0, 1, 2]
    for victim, phase in ((2, "_receipt"), (0, "publish")):
        survivors = [rank for rank in alive if rank != victim]
        results = doomed.run(
            die_in_the_background, tmp_path / "store", victim, survivors, phase, ranks=alive
        )
        ids = [result for rank, result in zip(alive, results, strict=True) if rank != victim]
        assert len(set(ids)) == 1 and isinstance(ids[0], str)
        alive = survivors
    with ckptstore.open(tmp_path / "store") as store:
        assert len(store.log()) == 2
        assert not store.fsck(read_data="100%").damaged
