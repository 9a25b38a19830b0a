"""On packs of 256 MiB, maintenance needs at most 64 MiB more than its process had."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

import ckptstore
from ckptstore.core.config import MIB, PACK_BYTES_LOCAL
from ckptstore.maintenance.compact.plan import CompactPolicy
from tests.maintenance.stores import files, flip
from tests.net.test_budgets import peak_bytes

LIMIT_BYTES = 64 * MIB


def tensors(seed: int, count: int = 15) -> dict[str, torch.Tensor]:
    """So many of 16 MiB: 15 of them fill a pack."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(4 * MIB, generator=generator) for i in range(count)}


def sparse_packs(store: ckptstore.Store, mirror: Path) -> None:
    """Of two packs, every other tensor is needed."""
    for seed in (1, 2):
        state = tensors(seed)
        store.commit(state, step=2 * seed)
        store.commit({name: state[name] for name in list(state)[::2]}, step=2 * seed + 1)
    store.forget([2, 4])


def near_commits(store: ckptstore.Store, mirror: Path) -> None:
    """Two commits that differ little."""
    state = tensors(3)
    for step in (1, 2):
        store.commit(state, step=step)
        state = {name: tensor * (1 + 1e-4) for name, tensor in state.items()}


def damaged_pack(store: ckptstore.Store, mirror: Path) -> None:
    """One bit of a pack is wrong, and a mirror has its chunk."""
    store.commit(tensors(4), step=1)
    store.push(mirror, create=True)
    packs = files(Path(store.url), "packs")
    flip(max(packs, key=lambda path: path.stat().st_size), 100 * MIB)


def one_commit(store: ckptstore.Store, mirror: Path) -> None:
    store.commit(tensors(5), step=1)


Work: TypeAlias = tuple[
    Callable[[ckptstore.Store, Path], None], Callable[[ckptstore.Store, Path], object]
]
WORK: dict[str, Work] = {
    "gc": (sparse_packs, lambda store, mirror: store.gc(grace_s=0, max_unused=0.0)),
    "compact": (
        near_commits,
        lambda store, mirror: store.compact(CompactPolicy(newest=0, every=2)),
    ),
    "repair": (
        damaged_pack,
        lambda store, mirror: store.repair(mirror, apply=True, read_data="100%"),
    ),
    "push": (one_commit, lambda store, mirror: store.push(mirror, create=True)),
}
"""What a store holds, and the work on it, by name."""


def measure(name: str, folder: Path) -> None:
    """Print the peak of a work in bytes. A process of its own calls this."""
    make, work = WORK[name]
    with ckptstore.open(folder / "store", threads=1) as store:
        make(store, folder / "mirror")
        largest = max(path.stat().st_size for path in files(folder / "store", "packs"))
        assert largest > 0.9 * PACK_BYTES_LOCAL
        print(peak_bytes(lambda: work(store, folder / "mirror")))


@pytest.mark.soak
@pytest.mark.parametrize("name", WORK)
def test_maintenance_of_large_packs_needs_little_memory(name: str, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.maintenance.test_peak_memory import measure; "
        "measure(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    print(f"{name} on packs of 256 MiB: {peak / MIB:.0f} MiB above what the process had")
    assert peak <= LIMIT_BYTES
