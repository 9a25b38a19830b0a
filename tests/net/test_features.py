"""Every way to commit, all that is done to a history, and every way to read, together: what comes
back is what was committed, by name."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ckptstore
from tests.net import registry
from tests.net.training import (
    CHUNK_BYTES,
    Tensors,
    Training,
    copies,
    same,
    tensors_of,
)

ACTIONS = 12
GLOBS = ("optimizer/**", "ema/*", "model/p*", "views/*", "model/tie")
MEMORY = Path("/dev/shm")


class History:
    """A store and its mirror. What was committed is known by step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        torch.manual_seed(seed)
        self.folder, self.told = folder, list[str]()
        self.codec = self.random.choice(("raw", "zstd"))
        self.store = ckptstore.open(folder / "a", threads=2, storage=self.kept())
        self.mirror = folder / "b"
        self.training = Training(self.random)
        self.wanted: dict[int, Tensors] = {}
        self.plain: dict[int, dict[str, Any]] = {}
        self.step = 0
        self.commit()

    def kept(self) -> ckptstore.Storage:
        return ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=self.codec)

    def act(self) -> None:
        table: dict[Callable[[], None], int] = {
            self.commit: 8,
            self.train: 4,
            self.reorder: 2,
            self.read: 8,
            self.compact: 1,
            self.thin: 1,
            self.forget: 1,
            self.gc: 2,
            self.push: 1,
            self.pull: 1,
            self.reopen: 1,
            self.tag: 1,
        }
        action = self.random.choices(list(table), list(table.values()))[0]
        self.told.append(action.__name__)
        action()

    # -- writers --

    def train(self) -> None:
        self.training.train()

    def reorder(self) -> None:
        self.training.reorder()

    def commit(self) -> None:
        self.step += 1
        way = self.random.choice(registry.WRITERS)
        state = dict(self.training.state)
        if self.random.random() < 0.2:
            state.pop("optimizer", None)
        tensors = copies(tensors_of(state))
        cast = self.training.cast(state) if self.random.random() < 0.5 else None
        self.told.append(f"  {self.step}: {way.name} cast={cast} keys={list(state)}")
        way.act(self.store, state, step=self.step, cast=cast)
        self.wanted[self.step] = {
            name: rounded(value) if matches(name, cast or {}) else value
            for name, value in tensors.items()
        }
        self.plain[self.step] = dict(state["plain"])

    # -- operations --

    def compact(self) -> None:
        policy = ckptstore.CompactPolicy(newest=0, every=self.random.randint(2, 4))
        assert not self.store.compact(policy).problems

    def thin(self) -> None:
        with suppress(ckptstore.InvalidInput):  # no commit has such a leaf
            self.store.forget(ckptstore.KeepLast(2).thin(self.random.choice(GLOBS)))

    def forget(self) -> None:
        self.store.forget(ckptstore.KeepLast(self.random.randint(2, 4)))
        self.gc()

    def gc(self) -> None:
        self.store.gc(grace_s=0, max_unused=0.0)

    def push(self) -> None:
        self.store.push(self.mirror, create=True, force=True)

    def pull(self) -> None:
        if self.mirror.is_dir():
            self.store.pull(self.mirror, force=True)

    def tag(self) -> None:
        self.store.tag("best")

    def reopen(self) -> None:
        self.store.close()
        self.store = ckptstore.open(self.folder / "a", threads=2)

    # -- readers --

    def read(self) -> None:
        infos = self.store.log()
        if infos:
            self.look(
                self.store, self.random.choice(infos).id, self.random.choice(registry.READERS)
            )

    def look(self, store: ckptstore.Store, commit: str, way: registry.Reader) -> None:
        snapshot = store.checkout(commit)
        assert snapshot.step is not None
        self.told.append(f"  {way.name} of step {snapshot.step}")
        way.act(self, snapshot, snapshot.step)

    def check(self, got: Tensors, step: int, names: Iterable[str], where: str) -> None:
        """Each is what was committed; what was cast is read in the lower precision."""
        for name in names:
            wanted, value = self.wanted[step][name], got[name]
            assert same(value.to(wanted.dtype), wanted), (
                f"{where} of step {step}: {name} is not what was committed"
            )

    def end(self) -> None:
        for place in ("a", "b"):
            if not (self.folder / place).is_dir():
                continue
            self.told.append(f"end: {place}")
            with ckptstore.open(self.folder / place, create=False, threads=2) as store:
                for info in store.log():
                    self.look(store, info.id, registry.READERS[0])
                    self.look(store, info.id, self.random.choice(registry.READERS[1:]))
                assert not store.fsck(read_data="100%").findings
        self.store.close()


def matches(name: str, globs: Mapping[str, Any]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def rounded(value: torch.Tensor) -> torch.Tensor:
    """As a cast leaves it: a tensor without dimensions stays as it is."""
    return value.to(torch.bfloat16).to(value.dtype) if value.dim() else value


def walk(seed: int) -> None:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        history = None
        try:
            history = History(Path(folder), seed)
            for _ in range(ACTIONS):
                history.act()
            history.end()
        except BaseException as error:
            told = history.told if history else ["the first commit"]
            error.add_note(f"walk of seed {seed}:\n  " + "\n  ".join(told))
            raise


@pytest.mark.parametrize("seconds", [12, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_what_comes_back_is_what_was_committed(seed: int, seconds: float) -> None:
    """Each walk has a seed of its own, which its failure names: CKPTSTORE_NET_WALK=N runs it."""
    if only := os.environ.get("CKPTSTORE_NET_WALK"):
        walk(int(only))
        return
    begun, walks = time.monotonic(), Counter[str]()
    while time.monotonic() - begun < seconds or not walks:
        walk(seed + walks["walks"])
        walks["walks"] += 1
    print(f"{walks['walks']} walks from seed {seed}")
