"""`python -m benchmarks.gc_year` lives through a year of trainings, one commit a day: what gcs
write, what they free, and how much they leave dead, beside restic's `prune` (if it is installed).

Both keep the same states, forget the same commits by the same policies and collect on the same
days. restic backs up a safetensors file of the state. All figures but the dead bytes come from the
files: *written* is what a gc adds, *freed* what it makes a place smaller by. So what is copied and
then deleted counts as written and not as freed.

A second table needs no bytes, and no restic: the median and the most of many random years, by the
same choice of packs (`tests/maintenance/simulated_store.py`).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from safetensors.torch import save_file

import ckptstore
from ckptstore import KeepBest, KeepEverySteps, KeepLast
from ckptstore.core.config import MIB
from ckptstore.core.text import bytes_text
from ckptstore.maintenance.retention import Keep
from tests.maintenance.simulated_store import BUCKET, DISK, a_year, training_of

MAX_UNUSED = 0.05
RESTIC_ENVIRONMENT = os.environ | {"RESTIC_PASSWORD": "benchmark"}
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Year:
    """A training: each layer changes with the probability `layers_changed` a commit, in a share
    `elements_changed` of its elements."""

    name: str
    layer_floats: tuple[int, ...]
    layers_changed: float
    policies: tuple[Keep, ...]
    gc_every: int
    elements_changed: float = 1.0

    def states(self, days: int, random: Random) -> Iterator[State]:
        """A state for each day. What did not change is the same tensor."""
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        state: State = {}
        for day in range(days):
            state = dict(state)
            for number, floats in enumerate(self.layer_floats):
                name = f"layer.{number}"
                if not day or random.random() < self.layers_changed:
                    fresh = torch.randn(floats, generator=generator)
                    if day and self.elements_changed < 1:
                        stay = torch.rand(floats, generator=generator) >= self.elements_changed
                        fresh = torch.where(stay, state[name], fresh)
                    state[name] = fresh
            yield state


YEARS = (
    Year(
        "all of 6 MB changes; last 5, every 30th",
        (500_000, 250_000, 250_000, 500_000),
        1.0,
        (KeepLast(5), KeepEverySteps(30)),
        7,
    ),
    Year(
        "a quarter of 20 layers, 10 MB; last 10, best 5",
        (60_000, 125_000, 190_000, 125_000) * 5,
        0.25,
        (KeepLast(10), KeepBest("loss", n=5)),
        7,
    ),
    Year(
        "a tenth of 20 layers, 10 MB; last 3, every 10th",
        (125_000,) * 20,
        0.1,
        (KeepLast(3), KeepEverySteps(10)),
        30,
    ),
    Year(
        "2 % of the elements of 4 MB; last 20, every 50th",
        (500_000, 500_000),
        1.0,
        (KeepLast(20), KeepEverySteps(50)),
        7,
        elements_changed=0.02,
    ),
    Year(
        "adapters of 100 KB; last 50, best 10",
        (2_000, 8_000, 15_000),
        1.0,
        (KeepLast(50), KeepBest("loss", n=10)),
        1,
    ),
)


class Files(NamedTuple):
    """The files of a place, and their bytes."""

    sizes: dict[Path, int]

    @classmethod
    def of(cls, place: Path, cache: str = "-") -> "Files":
        """Those that are there now, but for a folder `cache`, which can be deleted."""
        found = (path for path in place.rglob("*") if path.is_file())
        return cls({p: p.stat().st_size for p in found if p.relative_to(place).parts[0] != cache})

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.sizes.values())

    def added_since(self, before: "Files") -> int:
        """The bytes of files that are new, or another size."""
        return sum(n for path, n in self.sizes.items() if before.sizes.get(path) != n)


@dataclass
class Tally:
    """What the gcs of a year did to a place. `dead` is the share that the last one left, and
    `most_dead` the largest."""

    written_bytes: int = 0
    freed_bytes: int = 0
    objects: int = 0
    place_bytes: int = 0
    dead: float = 0.0
    most_dead: float = 0.0

    def collect(self, files: Callable[[], Files], gc: Callable[[], float]) -> None:
        """Measure a gc, which returns the share that it left dead."""
        before = files()
        self.dead = gc()
        after = files()
        self.written_bytes += after.added_since(before)
        self.freed_bytes += before.bytes - after.bytes
        self.objects, self.place_bytes = len(after.sizes), after.bytes
        self.most_dead = max(self.most_dead, self.dead)

    def row(self, who: str) -> str:
        ratio = self.written_bytes / max(self.freed_bytes, 1)
        return (
            f"| {who} | {bytes_text(self.written_bytes)} | {bytes_text(self.freed_bytes)} "
            f"| {ratio:.3f} | {self.dead:.1%} | {self.most_dead:.1%} | {self.objects} "
            f"| {bytes_text(self.place_bytes)} |"
        )


class Restic:
    """A repository of one file."""

    def __init__(self, folder: Path) -> None:
        self.place, self._source = folder / "repository", folder / "source"
        self._source.mkdir()
        self._environment = RESTIC_ENVIRONMENT | {"RESTIC_CACHE_DIR": str(folder / "cache")}
        self._run("init")
        self._snapshots: dict[int, str] = {}

    def backup(self, step: int, state: State) -> None:
        save_file(state, self._source / "state.safetensors")
        lines = self._run("backup", "--json", str(self._source)).splitlines()
        self._snapshots[step] = json.loads(lines[-1])["snapshot_id"]

    def collect(self, kept: set[int]) -> float:
        """Forget all but the steps `kept`, and prune; the share that stays unused."""
        if gone := [step for step in self._snapshots if step not in kept]:
            self._run("forget", *(self._snapshots.pop(step) for step in gone))
        said = self._run("prune", "--max-unused", f"{MAX_UNUSED:.0%}")
        share = re.search(r"unused size after prune: .* \((?P<share>[\d.]+)% of", said)
        assert share is not None, said
        return float(share["share"]) / 100

    def _run(self, *command: str) -> str:
        return subprocess.run(
            ["restic", "-r", str(self.place), *command],
            check=True,
            capture_output=True,
            text=True,
            env=self._environment,
        ).stdout


def live(year: Year, days: int, folder: Path, *, peer: bool) -> dict[str, Tally]:
    """What the gcs of a year did, by whose they are."""
    random = Random(0)
    store = ckptstore.open(folder / "store")
    restic = Restic(folder) if peer else None
    ours, theirs = Tally(), Tally()

    def files() -> Files:
        return Files.of(folder / "store", cache="index")

    def gc() -> float:
        left_bytes = store.gc(grace_s=0, max_unused=MAX_UNUSED).plan.left_bytes
        return left_bytes / Files.of(folder / "store" / "packs").bytes

    with store:
        for step, state in enumerate(year.states(days, random)):
            store.commit(state, step=step, metrics={"loss": random.random()})
            if restic:
                restic.backup(step, state)
            if step % year.gc_every == year.gc_every - 1:
                store.forget(year.policies)
                ours.collect(files, gc)
                if restic:
                    kept = {commit.step for commit in store.log() if commit.step is not None}
                    theirs.collect(partial(Files.of, restic.place), partial(restic.collect, kept))
    return {"ckptstore": ours} | ({"restic": theirs} if restic else {})


def simulate(seeds: int) -> Iterator[str]:
    """A table of random years without bytes."""
    yield "| place | least layer | changed at random | median | most | all | most dead |"
    yield "|---|---|---|---|---|---|---|"
    for name, place in (("disk", DISK), ("bucket", BUCKET)):
        for least_bytes in (5_000, 50_000, MIB, 8 * MIB):
            for scattered in (0.0, 0.02, 0.1):
                stores = [
                    a_year(
                        training_of(
                            seed, least_bytes=least_bytes, scattered=scattered, any_policy=True
                        ),
                        place,
                        seed,
                    )
                    for seed in range(seeds)
                ]
                ratios = sorted(each.written_bytes / max(each.freed_bytes, 1) for each in stores)
                written = sum(each.written_bytes for each in stores)
                freed = sum(each.freed_bytes for each in stores)
                dead = max(each.most_unused for each in stores)
                yield (
                    f"| {name} | {bytes_text(least_bytes)} | {scattered:.0%} "
                    f"| {ratios[seeds // 2]:.3f} | {ratios[-1]:.2f} | {written / freed:.3f} "
                    f"| {dead:.1%} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None, help="a folder on the disk to measure")
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seeds", type=int, default=100, help="random years without bytes")
    parser.add_argument("--year", type=int, action="append", help="only these years, from 0")
    parser.add_argument("--no-restic", action="store_true", help="ckptstore alone")
    args = parser.parse_args()
    peer = not args.no_restic and shutil.which("restic") is not None
    if not peer:
        print("without restic, which is not installed or not wanted")
    chosen = range(len(YEARS)) if args.year is None else args.year
    print("| gcs of | written | freed | written / freed | dead | most dead | files | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for year in (YEARS[number] for number in chosen):
        print(f"| **{year.name}, gc every {year.gc_every} days** | | | | | | | |")
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for who, tally in live(year, args.days, Path(folder), peer=peer).items():
                print(tally.row(who), flush=True)
    if args.seeds:
        print("", *simulate(args.seeds), sep="\n")


if __name__ == "__main__":
    main()
