"""A replica that is one step behind receives what differs: where the sender's store has a chunk as
a patch, and its base is here, the patch travels alone. Whatever a peer says, only verified bytes
arrive."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.interop.torchft import offer
from ckptstore.interop.torchft.wire import ServedPatch, decode_description, name_of
from ckptstore.store import Store
from tests.interop.torchft.conftest import SOON, Start, assert_same, copy_of, state_of, weights_of

CHUNKS = 6
STATE_BYTES = CHUNKS << 20


def stepped(state: Any, seed: int) -> Any:
    """The state with a hundredth of the elements of its first tensor changed."""
    state, generator = copy_of(state), torch.Generator().manual_seed(seed)
    flat = weights_of(state)["a"].view(-1)
    flat[torch.randperm(len(flat), generator=generator)[: len(flat) // 100]] += 1e-3
    return state


class Run:
    """A sender that commits each step, and the states of three steps."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.states = [state_of(CHUNKS)]
        for step in (1, 2):
            self.states.append(stepped(self.states[-1], step))
        for state in self.states:
            store.commit({"any key": weights_of(state)})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ckptstore.open(tmp_path / "store") as store:
        yield Run(store)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_replica_that_is_one_step_behind_takes_patches(
    start: Start, run: Run, in_place: bool
) -> None:
    live = copy_of(run.states[1])
    sender, receiver = start(run.store), start(state_dict=lambda: live, in_place=in_place)
    sender.send_checkpoint([1], 2, run.states[2], SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), run.states[2])
    received = receiver.received
    assert received and received.patched_chunks == CHUNKS // 2
    assert received.fetched_bytes < STATE_BYTES / 50
    if in_place:
        assert_same(live, run.states[2])


def test_the_base_may_be_in_the_receivers_store(start: Start, run: Run, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "other") as other:
        other.commit({"any key": weights_of(run.states[1])})
        sender, receiver = start(run.store), start(other)
        sender.send_checkpoint([1], 2, run.states[2], SOON)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), run.states[2])
        assert receiver.received and receiver.received.patched_chunks == CHUNKS // 2
        assert receiver.received.fetched_bytes < STATE_BYTES / 50


@pytest.mark.parametrize("behind", [2, None])
def test_a_replica_that_lacks_the_base_takes_whole_chunks(
    behind: int | None, start: Start, run: Run
) -> None:
    live = copy_of(run.states[2 - behind]) if behind else {}
    sender, receiver = start(run.store), start(state_dict=lambda: live)
    sender.send_checkpoint([1], 2, run.states[2], SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), run.states[2])
    assert receiver.received and receiver.received.patched_chunks == 0
    assert receiver.received.fetched_bytes >= STATE_BYTES // 2


def test_peers_that_have_no_patches_are_asked_for_the_rest(start: Start, run: Run) -> None:
    """One has committed, the other has not; whoever describes the state first."""
    live = copy_of(run.states[1])
    weights_of(live)["b"].zero_()
    senders = [start(run.store), start()]
    for sender in senders:
        sender.send_checkpoint([1], 2, run.states[2], SOON)
    for order in (1, -1):
        receiver = start(state_dict=lambda: live)
        sources = [sender.metadata() for sender in senders[::order]]
        assert_same(receiver.recv_from(sources, 2, SOON), run.states[2])
        assert receiver.received and receiver.received.retried == 0


def forged(kind: str, honest: list[tuple[ServedPatch, memoryview]]) -> Iterator[Any]:
    """What a hostile sender says of its patches."""
    for i, (patch, stored) in enumerate(honest):
        match kind:
            case "noise":
                data = os.urandom(len(stored))
                yield patch._replace(patch=name_of(data), nbytes=len(data)), memoryview(data)
            case "patches of other chunks":
                other, data = honest[(i + 1) % len(honest)]
                yield other._replace(chunk=patch.chunk, base=patch.base), data
            case "other bytes than named":
                yield patch, memoryview(os.urandom(len(stored)))
            case "gigabytes":
                yield patch._replace(nbytes=(1 << 32) - 1), stored
            case "nothing served":
                yield patch._replace(patch=os.urandom(32)), stored
            case "bases of itself":
                yield patch._replace(base=patch.chunk), stored
            case "one patch a thousand times":
                yield from [(patch, stored)] * 1000
            case "one patch twice":
                yield from [(patch, stored)] * 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "noise",
        "patches of other chunks",
        "other bytes than named",
        "gigabytes",
        "nothing served",
        "bases of itself",
        "one patch a thousand times",
        "one patch twice",
    ],
)
def test_a_forged_patch_costs_bytes_alone(
    kind: str, in_place: bool, start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = offer.Stored.patches

    def forging(self: offer.Stored) -> Iterator[Any]:
        return forged(kind, list(patches(self)))

    monkeypatch.setattr(offer.Stored, "patches", forging)
    live = copy_of(run.states[1])
    sender, receiver = start(run.store), start(state_dict=lambda: live, in_place=in_place)
    sender.send_checkpoint([1], 2, run.states[2], SOON)
    assert_same(receiver.recv_checkpoint(0, sender.metadata(), 2, SOON), run.states[2])
    received = receiver.received
    assert received and (received.patched_chunks > 0) == (kind == "one patch twice")
    assert received.fetched_bytes < STATE_BYTES


def test_a_peer_that_falls_silent_over_its_patches_is_passed_over_for_another(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, ended = copy_of(run.states[1]), threading.Event()
    sender, other = start(run.store), start()
    spans = offer.ServedState.spans

    def silent(self: offer.ServedState, names: Any, **options: Any) -> Any:
        if self.stored and set(names) - set(metadata):
            ended.wait(SOON.total_seconds())
        return spans(self, names, **options)

    sender.send_checkpoint([1], 2, run.states[2], SOON)
    served = sender._server._offer
    assert served is not None
    metadata = [name for name, _ in decode_description(served.description).metadata]
    monkeypatch.setattr(offer.ServedState, "spans", silent)
    late = threading.Timer(0.3, other.send_checkpoint, ([1], 2, run.states[2], SOON))
    late.start()
    receiver = start(state_dict=lambda: live, patience=SOON / 30)
    try:
        sources = [sender.metadata(), other.metadata()]
        assert_same(receiver.recv_from(sources, 2, SOON), run.states[2])
    finally:
        ended.set()
        late.join()
    assert receiver.received and receiver.received.patched_chunks == 0
