"""A state that is staged again: what did not change is compared with what the buffer has, and
neither copied nor hashed. What is committed is what the state was, whatever happened before."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Async, Storage, Store
from ckptstore.commit import write
from ckptstore.commit.hints import DedupHints
from ckptstore.commit.transaction import Transaction
from ckptstore.core.options import CommitProgress, Milestone
from ckptstore.errors import Unavailable
from ckptstore.repository.dedup import ChunkTable
from tests.state.carrying import assert_same

Tensors = dict[str, torch.Tensor]
SMALL_CHUNKS = Storage(chunk_bytes=65536)


def drawn(rng: random.Random) -> Tensors:
    """Tensors around the sizes that are compared and hashed at a time, two of them in one
    memory, some equal."""
    sizes = (rng.choice([70_000, 262_144, 300_000, 1_000_003]) for _ in range(4))
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    return {**tensors, "view": tensors["t0"][1000:70_000], "turned": torch.rand(200, 300).t()}


def one_byte(rng: random.Random, tensors: Tensors) -> None:
    tensor = tensors[rng.choice(["t0", "t1", "t2", "t3"])]
    tensor[rng.randrange(len(tensor))] = rng.randrange(256)


def a_range(rng: random.Random, tensors: Tensors) -> None:
    tensor = tensors[rng.choice(["t0", "t1", "t2", "t3"])]
    start = rng.randrange(len(tensor))
    tensor[start : start + 100_000] = rng.randrange(256)


def two_exchanged(rng: random.Random, tensors: Tensors) -> None:
    a, b = rng.sample(["t0", "t1", "t2", "t3"], 2)
    tensors[a], tensors[b] = tensors[b], tensors[a]


def one_anew(rng: random.Random, tensors: Tensors) -> None:
    name = rng.choice(list(tensors))
    tensors[name] = tensors[name].clone()


def back_to_zeros(rng: random.Random, tensors: Tensors) -> None:
    tensors[rng.choice(["t0", "t1", "t2", "t3"])].zero_()


def another_state(rng: random.Random, tensors: Tensors) -> None:
    tensors.update(drawn(rng))


def nothing(rng: random.Random, tensors: Tensors) -> None:
    pass


EDITS: list[Callable[[random.Random, Tensors], None]] = [
    *(one_byte, a_range, two_exchanged, one_anew, back_to_zeros, another_state, nothing, nothing)
]


FAILING = [(write.ChunkWriter, "_changed"), (Transaction, "publish"), (Transaction, "append")]
"""Where a commit may end: before it has hashed all, with no metadata written, before its entry."""


def failed(store: Store, state: dict[str, Any], place: tuple[type, str]) -> None:
    """A commit that stages `state`, and fails."""

    def fail(*args: Any, **options: Any) -> None:
        raise Unavailable("the disk is gone; try again")

    store.log()  # no other is in flight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, fail)
        assert isinstance(store.commit_async(state, step=1000).exception(), Unavailable)


OPTIONS: list[dict[str, Any]] = [
    *[{}] * 5,
    {"background": Async(staging="lazy")},
    {"cast": {"**/turned": torch.bfloat16}},
]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_is_committed_is_what_the_state_was(
    number: int, in_flight: int, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{seed} {number} {in_flight}")
    tensors, wanted = drawn(rng), dict[int, Tensors]()
    behind = Async(max_in_flight=in_flight)
    with ckptstore.open(tmp_path / "store", storage=SMALL_CHUNKS, background=behind) as store:
        for step in range(12):
            for _ in range(rng.randrange(3)):
                rng.choice(EDITS)(rng, tensors)
            if rng.random() < 0.1:
                store.commit({"m": tensors}, step=100 + step)
            if rng.random() < 0.2:
                failed(store, {"m": tensors}, rng.choice(FAILING))
                rng.choice(EDITS)(rng, tensors)
            options = rng.choice(OPTIONS)
            pending = store.commit_async({"m": tensors}, step=step, **options)
            wanted[step] = {name: tensor.clone() for name, tensor in tensors.items()}
            if "cast" in options:
                wanted[step]["turned"] = wanted[step]["turned"].to(torch.bfloat16)
            if rng.random() < 0.5:
                pending.wait()
            if rng.random() < 0.1:
                store.forget(ckptstore.KeepLast(1))
                wanted = {step: wanted[step]}
                store.gc(force=True)
        for step, kept in wanted.items():
            assert_same(store.checkout(step).state_dict("m"), kept)
        assert {found.kind for found in store.fsck("data").findings} <= {"orphan"}


def test_what_did_not_change_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[int]()

    def counted(memory: memoryview, checksum: Callable[[Any], bytes] = write.checksum) -> bytes:
        hashed.append(len(memory))
        return checksum(memory)

    monkeypatch.setattr(write, "checksum", counted)
    state = {"m": {f"w{i}": torch.rand(100_000) for i in range(3)}}
    with ckptstore.open(tmp_path / "store", storage=SMALL_CHUNKS) as store:
        store.commit_async(state, step=1).wait()
        hashed.clear()
        store.commit_async(state, step=2).wait()
        assert hashed == []
        state["m"]["w1"][50_000] = 0.5
        store.commit_async(state, step=3).wait()
        assert 0 < sum(hashed) < 400_000 * 2
        assert_same(store.checkout(3).state_dict("m"), state["m"])


@pytest.mark.parametrize("place", FAILING)
def test_a_commit_that_failed_between_leaves_nothing_wrong(
    place: tuple[type, str], tmp_path: Path
) -> None:
    state = {"m": {"w": torch.rand(200_000)}}
    with ckptstore.open(tmp_path / "store", storage=SMALL_CHUNKS) as store:
        for step in range(3):
            store.commit_async(state, step=step).wait()
            kept = state["m"]["w"].clone()
            state["m"]["w"].add_(1)
            failed(store, state, place)
            state["m"]["w"].copy_(kept)
        assert_same(store.checkout(2).state_dict("m"), state["m"])


def test_a_state_that_comes_back_to_the_buffer_it_was_in_is_that_state(tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait(progress: CommitProgress) -> None:
        if progress.milestone is Milestone.WRITTEN:
            go_on.wait(30)

    state = {"m": {"w": torch.zeros(200_000)}}
    behind = Async(max_in_flight=2)
    with ckptstore.open(tmp_path / "store", storage=SMALL_CHUNKS, background=behind) as store:
        for step in range(0, 6, 2):  # two buffers: each number is in its own
            go_on.clear()
            state["m"]["w"].fill_(1)
            store.commit_async(state, step=step, background=Async(on_progress=wait))
            state["m"]["w"].fill_(2)
            store.commit_async(state, step=step + 1)
            go_on.set()
            for back in (step, step + 1):
                wanted = torch.full((200_000,), float(1 + back % 2))
                assert_same(store.checkout(back).state_dict("m")["w"], wanted)
        for step in range(6, 9):
            state["m"]["w"].fill_(1 + step % 2)
            store.commit_async(state, step=step).wait()
            assert_same(store.checkout(step).state_dict("m"), state["m"])


def test_a_buffer_was_hashed_by_its_own_commit_whatever_another_leaves_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads may commit states of one plan at once: what is remembered of the last commit is
    then that of the other."""
    states = [{"t": torch.full((300_000,), value, dtype=torch.uint8)} for value in (1, 2)]
    others: list[ChunkTable | None] = []
    write_chunks = Transaction.write

    def beside(self: Transaction, *args: Any, hints: DedupHints, **options: Any) -> Any:
        found = write_chunks(self, *args, hints=hints, **options)
        others.append(hints.last)
        hints.last = others[0]  # the first state's
        return found

    with ckptstore.open(tmp_path / "store", storage=SMALL_CHUNKS) as store:
        monkeypatch.setattr(Transaction, "write", beside)
        store.commit({"model": states[0]}, step=0)
        for step in (1, 2):
            store.commit_async({"model": states[1]}, step=step).wait()
        monkeypatch.undo()
        for step, wanted in enumerate((states[0], states[1], states[1])):
            assert_same(store.checkout(step).state_dict("model"), wanted)
