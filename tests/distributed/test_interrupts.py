"""A rank that is interrupted wherever it is stays in step with the others."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch

import ckptstore
from ckptstore import Async, Ranks, internals
from ckptstore.commit import async_commit, pending
from ckptstore.distributed import collective, commit, coordinator, gloo, rank_worker, restore
from ckptstore.repository import thread_pool
from ckptstore.store import Store
from tests.distributed.layouts import full, group_of, layout, meet
from tests.distributed.pool import Pool
from tests.support.interrupts import interrupting

N = 3
OURS = frozenset(
    str(module.__file__)
    for module in (
        async_commit,
        collective,
        commit,
        coordinator,
        gloo,
        internals,
        pending,
        rank_worker,
        restore,
        thread_pool,
    )
)


Call: TypeAlias = Callable[[Store, int], object]


def now(store: Store, step: int) -> None:
    store.commit(state_of(step), ranks=ranks())


def behind(store: Store, step: int) -> ckptstore.PendingCommit:
    return store.commit_async(state_of(step), ranks=ranks())


def awaited(store: Store, step: int) -> None:
    behind(store, step).wait()


def back(store: Store, step: int) -> None:
    store.resume(state_of(0), ranks=ranks())


def ranks() -> Ranks:
    return Ranks(process_group=group_of(N), timeout_s=10)


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"rows": layout("rows", full() + step, N)}, "at": step}


@contextmanager
def signalled(after_s: float) -> Iterator[None]:
    """A handler raises once, wherever this process is then in a call of the store."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame and frame.f_code.co_filename not in OURS:
            frame = frame.f_back
        if frame:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 1e-4)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one may be on its way
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt_one(rank: int, path: Path, seed: int, call: Call, heal: Call, times: int) -> int:
    """How often a call went well during which one of the ranks was to be interrupted. After it,
    all ranks commit again until that goes well."""
    meet(4)
    meet(N)
    if rank >= N:
        return 0
    random, made = Random(seed), 0
    with ckptstore.open(path, background=Async(max_in_flight=2)) as store:
        for step in range(0, 2 * times, 2):
            victim, after = random.randrange(N), int(10 ** random.uniform(0, 2.8))
            again = random.choice(([], [], [1], [3], [7, 1]))
            how = random.choice((interrupting(OURS, [after, *again]), signalled(after / 1e4)))
            try:
                with how if rank == victim else nullcontext():
                    call(store, step)
                made += 1
            except (KeyboardInterrupt, ckptstore.CkptStoreError):
                pass
            for tries in range(2):
                try:
                    heal(store, step + 1)
                    break
                except ckptstore.CkptStoreError:
                    assert not tries, (step, victim, after, again)
            assert store.checkout().read("at") == step + 1
    return made


@pytest.mark.parametrize(
    ("call", "heal"),
    [(now, now), (behind, awaited), pytest.param(back, now, marks=pytest.mark.soak)],
)
def test_a_rank_that_is_interrupted_anywhere_stays_in_step(
    pool: Pool, tmp_path: Path, seed: int, call: Call, heal: Call
) -> None:
    pool.run(interrupt_one, tmp_path / "store", seed, call, heal, 12)
    with ckptstore.open(tmp_path / "store") as store:
        for info in store.log():
            snapshot = store.checkout(info.id)
            rows, at = snapshot.read("model/rows"), snapshot.read("at")
            assert torch.equal(rows, full() + at)
