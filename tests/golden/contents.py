"""What the golden stores hold: states that need no random numbers, and the history that is made of
them.

`python -m tests.golden.contents PLACE` writes such a store with this ckptstore; a new format
version adds one to this folder, and none is ever changed.
"""

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.maintenance.compact.plan import CompactPolicy
from tests.support.patching import small_chunks_too

TAGS = {"best": 2, "prod": 1}
METRICS = {1: {"loss": 1.5}, 2: {"loss": 0.1 + 0.2, "acc": 1.0}, 3: {}}


def state(step: int) -> dict[str, Any]:
    """The application state of a step; what differs between steps is `model/moving`, `model/tiny`
    and `step`."""
    long = torch.arange(300_000, dtype=torch.float32)
    return {
        "model": OrderedDict(
            {
                "embed.weight": long.reshape(1000, 300) / 7,
                "tied.weight": long[:5] * 0,
                "moving": torch.arange(40_000, dtype=torch.int64) * step,
                "half": (torch.arange(9_000) / 3).to(torch.bfloat16).reshape(90, 100),
                "tiny": torch.tensor([step, 2.5], dtype=torch.float64),
                "empty": torch.zeros(0, 4, dtype=torch.uint8),
                "scalar": torch.tensor(True),
            }
        ),
        "notes": {
            "a/b": "ü ✓",
            0: None,
            "0": [1, 2.5, -0.0, 2**70],
            "t": (1, (2, b"\x00\xff")),
            "": {"deep": {"er": float("inf")}},
        },
        "step": step,
    }


MOVED_STEPS = (1, 2, 3, 4)


def _noise(of: torch.Tensor) -> torch.Tensor:
    """Numbers of 15 bits that look random."""
    mixed = of * 2654435761 % (1 << 32)
    return (mixed ^ mixed >> 15) * 2246822519 >> 13 & 0x7FFF


def moved_state(step: int) -> dict[str, Any]:
    """A state whose tensors, of each width, move a little from step to step."""
    start = torch.arange(20_000, dtype=torch.float64)
    moved = start / 7 * (1 + step * 2**-18)
    high, low = (_noise(torch.arange(20_000) + at) for at in (0, 7919 * step))
    far = (start * 0.6180339887 + step * 0.1) % 1 < 0.05
    return {
        "model": {
            "few": torch.where(far, -moved, start / 7).to(torch.float32),
            "bytes": (start % 251 + step).to(torch.uint8),
            "noise": (high << 16 | low).to(torch.int32),
            "half": moved.to(torch.bfloat16),
            "single": moved.to(torch.float32),
            "double": moved,
            "complex": torch.complex(moved, -moved),
        }
    }


PATCHED_STEPS = (1, 2, 3, 4)


def patched_state(step: int) -> dict[str, Any]:
    """A state of which few elements change from step to step, here and there and in a row."""
    single, half = torch.arange(40_003, dtype=torch.float32), torch.arange(70_001) / 7
    for each in range(step):
        single[each * 7 :: 101] += 0.5
        half[1000 * each : 1000 * each + 300] *= -2
    return {
        "model": {
            "single": single,
            "half": half.to(torch.bfloat16),
            "bytes": (half.to(torch.int64) % 251).to(torch.uint8).repeat(2),
        }
    }


def write_patched(place: Path) -> None:
    """Four commits, of which the last three are patches of the ones before."""
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with ckptstore.open(place / "patched", storage=storage) as store:
        for step in PATCHED_STEPS:
            store.commit(patched_state(step), step=step)


ROUNDED_STEPS = (1, 2)


def rounded_state(step: int) -> dict[str, Any]:
    """Weights that round masters, among which are numbers of all kinds: of two chunks and of one,
    and some that are not what rounding makes. The weights of the second step are alone."""
    odd = torch.arange(4_000, dtype=torch.int64) * 2654435761 + step
    bits = torch.cat([odd % (1 << 32), _noise(torch.arange(36_003) + step) * 5 + 0x3E000000])
    single = (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
    up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = bits & 0x7FFFFFFF > 0x7F800000
    brain = torch.where(nan, bits >> 16 | 0x7FC1, up)
    brain[35_000::97] ^= 3
    finite = torch.where(nan | single.isinf(), torch.ones(()), single)
    finite[:40] = torch.arange(40) * 2.0**-26 * step
    weights = {
        "brain": (brain - (brain >> 15 << 16)).to(torch.int16).view(torch.bfloat16),
        "half": finite[:20_000].half(),
    }
    masters = {"brain": single, "half": finite[:20_000]}
    return {"model": weights} if step == 2 else {"model": weights, "masters": masters}


def write_rounded(place: Path) -> None:
    """A commit of weights that round its masters, and one of weights alone."""
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with small_chunks_too(), ckptstore.open(place / "rounded", storage=storage) as store:
        for step in ROUNDED_STEPS:
            store.commit(rounded_state(step), step=step)


PLAIN_STEPS = (1, 2)


def plain_state(step: int) -> dict[str, Any]:
    """Plain values in each form that one leaf has, more of them in each step."""
    return {
        "log": {
            "records": [{"step": i, "loss": 1 / (i + 1), "ü": None} for i in range(1030 + step)],
            "items": {f"s/{i}": (i, 2.5) for i in range(1030)} | {"last": {"n": step << 60}},
            "numbers": {i - 5: i % 7 for i in range(1030)},
            "floats": [i / 3 for i in range(100 + step)],
            "seen": set(range(0, 300, step)),
        }
    }


def grown_state(step: int) -> dict[str, Any]:
    """As `plain_state`, which was written without chunks that taper off (docs/format.md §3), with
    sets that have a table."""
    ids = {(i * 2654435761) % 2**30 for i in range(2000 + step)}
    return {
        "log": plain_state(step)["log"] | {"texts": {f"é{i}": i for i in range(step * 1500)}},
        "ids": ids,
        "wide": frozenset({-i << 40 for i in range(1100 + step)}),
    }


def write_grown(place: Path) -> None:
    """Two commits of plain values."""
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with ckptstore.open(place / "grown", storage=storage) as store:
        for step in PLAIN_STEPS:
            store.commit(grown_state(step), step=step)


def write_compacted(place: Path) -> None:
    """Four commits, the first three of them compacted."""
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with ckptstore.open(place / "compacted", storage=storage) as store:
        for step in MOVED_STEPS:
            store.commit(moved_state(step), step=step)
        store.compact(CompactPolicy(newest=1, every=3))


def write(place: Path) -> None:
    """Three commits in two runs with tags and metrics, one of them forgotten and brought back."""
    for codec in ("raw", "zstd"):
        with ckptstore.open(
            place / codec, storage=ckptstore.Storage(codec=codec, chunk_bytes=64 << 10)
        ) as store:
            for step in (1, 2):
                store.commit(state(step), step=step, message=f"step {step}", metrics=METRICS[step])
        with ckptstore.open(place / codec, run="branch") as store:
            snapshot = store.checkout("main@2")
            restored: dict[str, Any] = dict.fromkeys(snapshot.keys())
            snapshot.restore(restored)
            store.commit(state(3), step=3)
            for tag, step in TAGS.items():
                store.tag(tag, f"main@{step}")
            store.untag("prod")
            store.tag("prod", "main@1")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    write_compacted(Path(sys.argv[1]))
    write_patched(Path(sys.argv[1]))
    write_rounded(Path(sys.argv[1]))
    write_grown(Path(sys.argv[1]))
