"""Random states, changes, absences and upkeep: a follower always holds exactly one commit."""

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckptstore
from tests.follow.states import bits, blank, change, made, tensors_in
from tests.support.fixtures import scratch

__all__ = ["scratch"]

CHUNK_BYTES = 1 << 16
STEPS = 12


def _walk(place: Path, random: Random) -> None:
    options = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    codec = random.choice(("raw", "zstd"))
    if codec != "raw":
        options = ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=codec)
    state = made(random)
    # A copy shares memory as the state does, and torch counts the writes to it by tensor.
    shares = random.random() < 0.4
    target = deepcopy(state) if shares else blank(state)
    committed: dict[int, Any] = {}
    upkeep: list[Callable[[ckptstore.Store], object]] = [
        lambda store: store.compact(ckptstore.CompactPolicy(newest=0, every=2)),
        lambda store: store.forget(ckptstore.KeepLast(1)),
        lambda store: store.gc(max_unused=0.0, grace_s=0),
    ]
    with (
        ckptstore.open(place, run="rl", storage=options, threads=1) as writer,
        ckptstore.open(place, read_only=True, threads=1) as reader,
        reader.follow("rl", target) as follower,
    ):
        for step in range(STEPS):
            for _ in range(random.choice((1, 1, 3))):
                change(random, state)
                writer.commit(state, step=step)
            committed[step] = bits(state)
            if random.random() < 0.3:
                random.choice(upkeep)(writer)
            if (
                random.random() < 0.2 and not shares
            ):  # somebody writes to the target, and torch sees it
                tensors = [each for each in tensors_in(target) if each.numel()]
                random.choice(tensors).zero_()
            if random.random() < 0.8:
                assert follower.wait(0) is not None
                with follower.frozen() as commit:
                    assert commit.step == step
                    assert bits(target) == committed[step]


@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_a_follower_holds_what_was_committed(seconds: float, seed: int, scratch: Path) -> None:
    """Each walk has a seed of its own, which its failure names."""
    begun, walks = time.monotonic(), 0
    while not walks or time.monotonic() - begun < seconds:
        try:
            _walk(scratch / str(walks), Random(seed + walks))
        except BaseException as error:
            error.add_note(f"the walk of seed {seed + walks}")
            raise
        walks += 1
    print(f"{walks} walks from seed {seed}")
