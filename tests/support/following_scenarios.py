"""Scenarios of the fork server in which one process commits and another follows it."""

import hashlib
import os
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch

import ckptstore
from tests.shared.sites import Site

Report = Callable[..., None]

RUN = "rl"
SHAPES = {"wide": (60, 4000), "tall": (90_000,), "small": (33, 7), "scale": (), "none": (0, 4)}
KEEP_EVERY = 16
"""Steps between two collections of what was forgotten."""


def commit_steps_on(report: Report, place: str, options: Any, cache: str, seed: int) -> None:
    """Go on from the newest commit: a step changes a few elements, and the state says by a hash
    what is in it."""
    random, state = Random(seed), _state()
    with _opened(place, options, cache) as store:
        found = store.resume(state)
        while True:
            step = 0 if found is None else (found.step or 0) + 1
            _step(random, state, step)
            found = store.commit(state, step=step)
            report("committed", step)
            if step % KEEP_EVERY == 0 and step:
                store.forget(ckptstore.KeepLast(3))
                store.gc(max_unused=0.0, grace_s=0)


def follow_steps_on(
    report: Report, place: str, options: Any, cache: str, seed: int, thread: bool
) -> None:
    """Two readers look at what they are shown, and say whether it is a commit."""
    target, over = _state(), threading.Event()
    with (
        _opened(place, options, cache) as store,
        store.follow(RUN, target, poll_s=0.002) as follower,
    ):
        while not follower.wait(0.01):
            pass

        def look(n: int) -> None:
            random = Random(seed + n)
            while not over.is_set():
                with follower.frozen() as commit:
                    is_whole = _hash(target) == bytes(target["hash"].numpy())
                    is_whole = is_whole and target["step"] == commit.step
                    report("seen" if is_whole else "torn", commit.step)
                over.wait(random.uniform(0, 0.01))

        readers = [threading.Thread(target=look, args=(n,), daemon=True) for n in range(2)]
        for reader in readers:
            reader.start()
        if thread:
            follower.start()
        while True:
            follower.wait(1)


def _opened(place: str, options: Any, cache: str) -> ckptstore.Store:
    os.environ["CKPTSTORE_CACHE"] = cache  # of the host that this process plays
    return Site(place, options).open(run=RUN, threads=1)


def _state() -> dict[str, Any]:
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    return {"w": weights, "hash": torch.zeros(32, dtype=torch.uint8), "step": -1}


def _step(random: Random, state: dict[str, Any], step: int) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    for weight in state["w"].values():
        if weight.numel():
            some = torch.randint(weight.numel(), (1 + weight.numel() // 100,), generator=generator)
            weight.view(-1)[some] += 0.5
    state["step"] = step
    state["hash"].copy_(torch.frombuffer(bytearray(_hash(state)), dtype=torch.uint8))


def _hash(state: dict[str, Any]) -> bytes:
    hashed = hashlib.blake2b(str(state["step"]).encode(), digest_size=32)
    for weight in state["w"].values():
        hashed.update(weight.reshape(-1).view(torch.uint8).numpy())
    return hashed.digest()
