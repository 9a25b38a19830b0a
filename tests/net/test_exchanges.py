"""Whatever stores do and send each other: no acknowledged commit loses a leaf or a byte that nobody
took away, no tag moves unasked, no listing lacks a commit, and a push and a pull make two alike."""

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.net.exchanges import Stores
from tests.net.places import PACK_BYTES, packs_of

ACTIONS = 25
MEMORY = Path("/dev/shm")


def walk(seed: int) -> Counter[str]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        stores, pack_bytes = None, Random(seed).choice(PACK_BYTES)
        try:
            with packs_of(pack_bytes):
                stores = Stores(Path(folder), seed)
                for _ in range(ACTIONS):
                    stores.act()
                stores.end()
        except BaseException as error:
            told = stores.told if stores else ["the first commits"]
            told.insert(0, f"packs of {pack_bytes} bytes")
            error.add_note(f"walk of seed {seed}:\n  " + "\n  ".join(told))
            if stores:
                with suppress(Exception):
                    stores.close()
            raise
        stores.close()
        return stores.counts


@pytest.mark.parametrize("seconds", [6, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_stores_keep_what_each_has_and_converge(
    seed: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each walk has a seed of its own, which its failure names: CKPTSTORE_NET_WALK=N runs it."""
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "cache"))
    if only := os.environ.get("CKPTSTORE_NET_WALK"):
        walk(int(only))
        return
    begun, counts = time.monotonic(), Counter[str]()
    while time.monotonic() - begun < seconds or not counts:
        counts += walk(seed + counts["walks"])
        counts["walks"] += 1
    print(f"from seed {seed}: {counts}")
