"""`dedup_first`: what the store has is not copied, and the commit is right also when that is
collected meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Conflict, InvalidInput
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import leaves_of
from ckptstore.state.staging import LookedUp, plan_staging
from ckptstore.state.staging_buffers import Place
from ckptstore.store import internals_of
from tests.commit.states import assert_committed, attack, frozen_copy, training

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store", chunk_bytes=64 * KIB) as store:
        yield store


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(3 * MIB), "b": torch.randn(2000)}


def test_only_chunks_that_the_store_lacks_are_copied(store: ckptstore.Store) -> None:
    state = weights()
    first = store.commit(state)
    state["w"][1_000_000] += 1
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    pending = store.commit_async(state, dedup_first=True)
    state["w"].zero_()
    snapshot = pending.wait()
    assert store.staging.held_bytes <= 2 * MIB < state["w"].nbytes
    assert snapshot.stats and snapshot.stats.new_chunks == 1
    assert snapshot.content_id != first.content_id
    assert {name: torch.equal(snapshot.read(name), tensor) for name, tensor in wanted.items()} == {
        "w": True,
        "b": True,
    }


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_commit_is_the_state_as_of_the_call(tmp_path: Path, executor: Any) -> None:
    state = training()
    with ckptstore.open(tmp_path / "store", chunk_bytes=64 * KIB, executor=executor) as store:
        for step in range(4):
            wanted = frozen_copy(state)
            if step % 2:  # most of the state is there already
                store.commit(state)
            pending = store.commit_async(state, step=step, dedup_first=True)
            with attack(state):
                snapshot = pending.wait()
            assert_committed(snapshot, wanted)
        assert not store.fsck(read_data="100%").damaged


def collected_meanwhile(
    store: ckptstore.Store, state: dict[str, torch.Tensor], *, force: bool
) -> ckptstore.PendingCommit:
    """A commit of a state whose chunks a gc condemned, and with `force` deleted, after the call and
    before the rest began."""
    first = store.commit(state, step=1)
    for step in (2, 3):  # the two newest of a run cannot be forgotten
        store.commit({"other": step}, step=step)
    with internals_of(store)._lock:  # the background takes it before it opens a session
        pending = store.commit_async(state, step=4, dedup_first=True)
        with ckptstore.open(store.url) as other:
            other.forget([first.id])
            freed = other.gc(max_unused=0.0, force=force).freed_bytes
        assert (freed > MIB) == force
    return pending


def test_chunks_condemned_meanwhile_are_read_back(store: ckptstore.Store) -> None:
    state = weights()
    wanted = state["w"].clone()
    pending = collected_meanwhile(store, state, force=False)
    state["w"].zero_()
    snapshot = pending.wait()
    assert torch.equal(snapshot.read("w"), wanted)
    store.gc(max_unused=0.0)
    assert not store.fsck(read_data="100%").damaged


def test_chunks_deleted_meanwhile_fail_only_this_commit(
    store: ckptstore.Store,
) -> None:
    state = weights()
    pending = collected_meanwhile(store, state, force=True)
    with pytest.raises(Conflict, match="gc has deleted"):
        pending.wait()
    assert [info.step for info in store.log()] == [3, 2]
    again = store.commit_async(state, step=5, dedup_first=True).wait()
    assert torch.equal(again.read("w"), state["w"])
    assert not store.fsck(read_data="100%").damaged


def test_the_session_protecting_found_chunks_ends_with_the_commit(
    store: ckptstore.Store,
) -> None:
    sessions = Path(store.url, "sessions")
    store.commit_async(weights(), dedup_first=True).wait()
    assert not list(sessions.iterdir())
    with pytest.raises(InvalidInput):
        store.commit_async({"x": object()}, dedup_first=True)
    assert not list(sessions.iterdir())


def test_it_is_refused_where_nothing_may_be_read_within_the_call(store: ckptstore.Store) -> None:
    with pytest.raises(InvalidInput, match="choose one"):
        store.commit_async(weights(), dedup_first=True, staging="lazy")


@pytest.mark.parametrize(
    ("missing", "parts", "copied"),
    [
        ([[], []], [(), ()], 0),
        ([[(0, 8192)], []], [(Place(0, 8192, 0),), (Place(0, 4096, 4096),)], 8192),
        ([[], [(0, 4096)]], [(Place(4096, 8192, 0),), (Place(0, 4096, 0),)], 4096),
        (
            [[(0, 4096)], [(4096, 8192)]],
            [(Place(0, 4096, 0), Place(8192, 12288, 4096)), (Place(4096, 8192, 4096),)],
            8192,
        ),
    ],
)
def test_memory_that_leaves_share_is_copied_where_any_of_them_lacks_it(
    missing: list[list[tuple[int, int]]], parts: list[tuple[Place, ...]], copied: int
) -> None:
    base = torch.arange(4096, dtype=torch.float32)
    sources = leaves_of(flatten({"s": [base, base[1024:]]}))
    plan = plan_staging(
        sources, MIB, looked_up={n: LookedUp(b"", tuple(spans)) for n, spans in enumerate(missing)}
    )
    assert [plan.places[n] for n in (0, 1)] == parts
    assert sum(copy.nbytes for task in plan.tasks for copy in task) == copied


ELSEWHERE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_noncontiguous_tensors_are_looked_up_too(store: ckptstore.Store, kind: str) -> None:
    state = {"t": ELSEWHERE[kind](torch.randn(400, 600))}
    store.commit(state)
    wanted = state["t"].clone()
    pending = store.commit_async(state, dedup_first=True)
    state["t"].zero_()
    assert torch.equal(pending.wait().read("t"), wanted.resolve_conj())
