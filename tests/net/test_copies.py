"""Whoever copies, moves, links or mounts what: no directory loses what it needs, no pointer means
another commit, and no store shows another's."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.net.copies import Disks, World, mounted
from tests.shared.sites import on

ACTIONS = 40


def walk(seed: int, disks: Disks) -> None:
    """Copies of the caches are among what it makes, so it begins with none."""
    with TemporaryDirectory() as host, on(Path(host)):
        world = World(seed, disks.inside(f"walk-{seed}"))
        try:
            for _ in range(ACTIONS):
                world.act()
            world.end()
        except BaseException as error:
            error.add_note(f"walk of seed {seed}:\n  " + "\n  ".join(world.told))
            with suppress(Exception):
                world.close()
            raise
        world.close()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    with mounted(tmp_path) as disks:
        yield disks


@pytest.mark.parametrize("seconds", [6, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_copies_lose_and_exchange_nothing(seed: int, seconds: float, disks: Disks) -> None:
    """Each walk has a seed of its own, which its failure names: CKPTSTORE_NET_WALK=N runs it."""
    if only := os.environ.get("CKPTSTORE_NET_WALK"):
        walk(int(only), disks)
        return
    begun, walks = time.monotonic(), 0
    while time.monotonic() - begun < seconds or not walks:
        walk(seed + walks, disks)
        walks += 1
    print(f"{walks} walks from seed {seed}")
