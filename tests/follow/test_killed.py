"""The trainer and the follower killed at any moment: what is seen is a commit, bit by bit."""

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.shared.sites import Sites, sites_of
from tests.support.fixtures import nursery, scratch
from tests.support.fork_server import Child, Nursery

__all__ = ["nursery", "scratch"]

LONGEST_S = 0.5
PATIENCE_S = 120.0


@pytest.fixture(params=["local", "bucket"])
def sites(request: pytest.FixtureRequest, scratch: Path) -> Sites:
    return sites_of(request, scratch)


class Sides:
    """A trainer and a follower of one store, as processes of two hosts."""

    def __init__(self, nursery: Nursery, sites: Sites, random: Random) -> None:
        self._nursery, self._site, self._random = nursery, sites.new(), random
        self._folder = sites.folder
        self._starts = {"commit_steps_on": self._trainer, "follow_steps_on": self._follower}
        self._running: dict[str, Child] = {}
        self._done: list[Child] = []
        for side in self._starts:
            self.start(side)

    def _trainer(self) -> dict[str, Any]:
        return {"cache": str(self._folder / "trainer")}

    def _follower(self) -> dict[str, Any]:
        return {"cache": str(self._folder / "follower"), "thread": self._random.random() < 0.5}

    def start(self, side: str) -> None:
        given = {"place": self._site.place, "options": self._site.options, **self._starts[side]()}
        seed = self._random.getrandbits(32)
        self._running[side] = self._nursery.start(side, seed=seed, **given).go()

    def kill(self, side: str) -> None:
        self.check_alive()
        self._running[side].kill()
        self._done.append(self._running.pop(side))

    def check_alive(self) -> None:
        for side, child in self._running.items():
            lines = child.lines.read_text()[-300:]
            assert child.alive(), f"{side} ended; its last lines: {lines!r}"

    def end(self) -> None:
        for child in self._running.values():
            child.kill()

    def reports(self, kind: str) -> list[int]:
        """The steps that were reported, by any process so far."""
        children = (*self._done, *self._running.values())
        return [int(step) for child in children for (step,) in child.reports(kind)]


@pytest.mark.parametrize(
    ("steps", "kills"), [(20, 4), pytest.param(1000, 100, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(2 * 3600)
def test_every_state_that_is_seen_is_a_commit(
    steps: int, kills: int, sites: Sites, nursery: Nursery, seed: int
) -> None:
    random = Random(seed)
    sides = Sides(nursery, sites, random)
    todo = [side for side in ("commit_steps_on", "follow_steps_on") for _ in range(kills)]
    random.shuffle(todo)
    try:
        for side in todo:
            time.sleep(random.uniform(0, LONGEST_S))
            sides.kill(side)
            sides.start(side)
        deadline_s = time.monotonic() + PATIENCE_S + 4 * steps
        while max(sides.reports("seen"), default=0) < steps:
            sides.check_alive()
            assert time.monotonic() < deadline_s, (
                f"at step {max(sides.reports('committed'))}, "
                f"seen up to {max(sides.reports('seen'), default=0)}"
            )
            time.sleep(0.1)
    finally:
        sides.end()
    assert not sides.reports("torn")
    seen, committed = set(sides.reports("seen")), set(sides.reports("committed"))
    print(f"{sites.kind}: {2 * kills} kills, {len(committed)} commits, {len(seen)} of them seen")
