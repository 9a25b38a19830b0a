"""Random stores, of which a mirror has some commits, lose and turn bytes. A repair from the mirror
costs no commit, and brings back each that the mirror has."""

import time
from collections import Counter
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.store import Store
from tests.maintenance.stores import CHUNK_BYTES, heal
from tests.support.patching import small_chunks_too

ACTIONS = ("commit", "commit", "commit", "push", "compact", "forget", "thin", "gc")
SHAPES = {"weight": (40_000,), "table": (200, 64), "moment": (20_000,)}
MEMORY = Path("/dev/shm")


class Walk:
    """One store and its mirror; `told` is what was done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.here, self.there = folder / "here", folder / "there"
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.told: list[str] = []
        self.state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.step = 0

    def run(self) -> Counter[str]:
        """Act, damage, heal, and compare; how many commits could be read before and after."""
        codec = self.random.choice(("raw", "zstd"))
        storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=codec)
        with ckptstore.open(self.here, storage=storage) as store:
            self.commit(store)
            for _ in range(self.random.randrange(3, 13)):
                self.act(store, self.random.choice(ACTIONS))
            if not self.there.exists():
                self.act(store, "push")
        for pack in self.drawn(sorted(self.here.glob("packs/*/*"))):
            self.damage(pack)
        if self.random.random() < 0.5:
            rmtree(self.here / "index", ignore_errors=True)
        commits, before = self.readable(self.here)
        there = self.readable(self.there)[1] & commits
        heal(self.here, self.there)
        after = self.readable(self.here)[1]
        assert before <= after, "the repair cost a commit"
        assert there <= after, "the mirror has more"
        with ckptstore.open(self.here) as store:
            told = store.fsck(read_data="all").damaged_commits.keys()
        assert told & commits == commits - after
        healed, damaged = len(after - before), len(commits - before)
        return Counter(walks=1, commits=len(commits), damaged=damaged, healed=healed)

    def act(self, store: Store, action: str) -> None:
        self.told.append(action)
        if action == "commit":
            self.commit(store)
        elif action == "push":
            for info in reversed(store.log()):
                if self.random.random() < 0.5 or not self.there.exists():
                    store.push(self.there, info.id, create=True)
        elif action == "compact":
            every = self.random.choice((2, 4))
            store.compact(ckptstore.CompactPolicy(newest=1, every=every))
        elif action == "forget":
            store.forget(ckptstore.KeepLast(3))
        elif action == "thin":
            store.forget(ckptstore.KeepLast(2).thin("state/moment"))
        else:
            store.gc(grace_s=0, max_unused=self.random.choice((0.0, 0.5)))

    def commit(self, store: Store) -> None:
        """Change each tensor in few elements or in many, or not at all; two are there rounded,
        too."""
        for name, tensor in self.state.items():
            count = int(self.random.choice((0, 0.01, 0.01, 0.6)) * tensor.numel())
            changed = tensor.clone()
            at = torch.randperm(tensor.numel(), generator=self.generator)[:count]
            changed.view(-1)[at] = torch.randn(count, generator=self.generator)
            self.state[name] = changed
        rounded = {
            "half": self.state["weight"].to(torch.float16),
            "brief": self.state["moment"].to(torch.bfloat16),
        }
        store.commit({"state": self.state | rounded}, step=self.step)
        self.step += 1

    def drawn(self, packs: list[Path]) -> list[Path]:
        return self.random.sample(packs, self.random.randint(1, max(1, len(packs) // 2)))

    def damage(self, pack: Path) -> None:
        data, draw = bytearray(pack.read_bytes()), self.random
        how = draw.choice(("gone", "cut", "bits", "bits", "footer"))
        self.told.append(f"{how}: {pack.name}")
        pack.unlink()
        if how == "gone":
            return
        if how == "cut":
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((1, 3)) if how == "bits" else 0):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        if how == "footer":
            data[-draw.randint(1, min(len(data), 400))] ^= draw.randint(1, 255)
        pack.write_bytes(data)

    @staticmethod
    def readable(place: Path) -> tuple[set[Any], set[Any]]:
        """The commits of a store, and those that verify."""
        found = set()
        with ckptstore.open(place) as store:
            ids = {info.id for info in store.log()}
            for commit in ids:
                try:
                    store.checkout(commit).verify()
                    found.add(commit)
                except ckptstore.CkptStoreError:
                    continue
        return ids, found


def walk(seed: int) -> Counter[str]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        one = Walk(Path(folder), seed)
        try:
            return one.run()
        except BaseException as error:
            error.add_note(f"walk of seed {seed}: {one.told}")
            raise


@pytest.mark.parametrize("seconds", [3, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_a_repair_costs_no_commit_and_brings_back_what_the_mirror_has(
    seed: int, seconds: float
) -> None:
    begun, counts = time.monotonic(), Counter[str]()
    with small_chunks_too():
        while time.monotonic() - begun < seconds or not counts:
            counts += walk(seed + counts["walks"])
    print(f"from seed {seed}: {counts}")
