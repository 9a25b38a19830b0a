"""Every way to commit, all that is done to a history, and every way to read, together: what comes
back is what was committed, by name."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import ckptstore
from tests.net import places, registry
from tests.net.places import PACK_BYTES, Ground, packs_of, shared_directories
from tests.net.training import CHUNK_BYTES, Tensors, Training, copies, same, tensors_of
from tests.shared.sites import Site, on

ACTIONS = 12
MEMORY = Path("/dev/shm")


class History:
    """A store and its mirror, each in some place. What was committed is known by step."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, folder: Path, seed: int, ground: Ground) -> None:
        self.random = Random(seed)
        torch.manual_seed(seed)
        self.folder, self.told, self.hosts = folder, list[str](), 1
        self.sites, self.others = (
            ground.drawn(self.random, folder),
            ground.drawn(self.random, folder),
        )
        self.site, self.mirror = self.sites.new(), self.others.new()
        codec = self.random.choice(("raw", "zstd"))
        self.told.append(f"{codec}, in {self.sites.kind}, mirror in {self.others.kind}")
        self.store = self.site.open(codec=codec, threads=2)
        self.id = self.store.id
        self.training = Training(self.random)
        self.wanted: dict[int, Tensors] = {}
        self.plain: dict[int, dict[str, Any]] = {}
        self.labels: dict[int, dict[str, Any]] = {}
        self.orders: dict[int, list[str]] = {}
        self.contents: dict[str, str] = {}
        self.leaving = set[int | None]()
        self.step = 0
        self.commit()

    def act(self) -> None:
        """One action. What it does not take from the history is there afterwards."""
        before, self.leaving = {info.step for info in self.commits()}, {None}
        table: dict[Callable[[], None], int] = {
            self.commit: 8,
            self.steps: 4,
            self.refused: 1,
            self.training.train: 4,
            self.training.reorder: 2,
            self.read: 8,
            self.keep: 12,
        }
        action = self.random.choices(list(table), list(table.values()))[0]
        self.told.append(action.__name__)
        action()
        lost = before - {info.step for info in self.commits()} - self.leaving
        assert not lost, f"steps {lost} are gone"

    def commits(self) -> list[Any]:
        """The commits of the training that are there, the newest first."""
        return [info for info in self.store.log(run=self.store.run) if info.step in self.wanted]

    # -- writers --

    def commit(self) -> None:
        self.committed(*self.drawn())

    def steps(self) -> None:
        """Commits of one kind, between which a few elements of each tensor change, and now and then
        the process."""
        way, keys, cast = self.drawn()
        for _ in range(self.random.randint(2, 5)):
            self.committed(way, keys, cast)
            self.training.nudge()
            if self.random.random() < 0.3:
                self.reopen()

    def drawn(self) -> tuple[registry.Writer, list[str], dict[str, torch.dtype] | None]:
        """How to commit, which keys, and what to cast."""
        way, state = self.random.choice(registry.WRITERS), dict(self.training.state)
        if self.random.random() < 0.2:
            state.pop("optimizer", None)
        cast = self.training.cast(state) if self.random.random() < 0.5 else None
        return way, list(state), cast

    def committed(
        self, way: registry.Writer, keys: list[str], cast: dict[str, torch.dtype] | None
    ) -> None:
        self.step += 1
        state = {key: self.training.state[key] for key in keys}
        tensors = copies(tensors_of(state))
        self.told.append(f"  {self.step}: {way.name} cast={cast} keys={list(state)}")
        label = {
            "message": f"step {self.step}",
            "metrics": {"loss": self.random.random()},
            "links": {"tracker": f"https://example.org/{self.step}"},
        }
        way.act(self.store, state, step=self.step, cast=cast, **label)
        self.wanted[self.step] = {
            name: rounded(value) if matches(name, cast or {}) else value
            for name, value in tensors.items()
        }
        self.plain[self.step] = dict(state["plain"])
        self.labels[self.step] = label
        self.orders[self.step] = self.training.order(state)

    def refused(self) -> None:
        """A cast of one of several names of the same memory: nothing is committed, and the store
        takes the next commit."""
        if cast := self.training.divided_cast():
            way, before = self.random.choice(registry.WRITERS), self.store.log()
            self.told.append(f"  {way.name} cast={cast}")
            with pytest.raises(ckptstore.InvalidInput, match="share memory, and cast names one"):
                way.act(self.store, self.training.state, step=self.step + 1, cast=cast)
            assert self.store.log() == before

    # -- what is done to it --

    def keep(self) -> None:
        way = self.random.choice(registry.UPKEEP)
        self.told.append(f"  {way.name}")
        way.act(self)

    def reopen(self, **how: Any) -> None:
        """As this host, or as one that never saw the store."""
        self.store.close()
        self.hosts += self.random.random() < 0.5
        self.store = self.site.open(self.folder / f"host-{self.hosts}", threads=2, **how)

    def has_mirror(self) -> bool:
        return "ckptstore.json" in places.objects_of(self.mirror)

    # -- readers --

    def read(self) -> None:
        if infos := self.commits():
            self.look(
                self.store, self.random.choice(infos).id, self.random.choice(registry.READERS)
            )

    def look(
        self, store: ckptstore.Store, commit: str, way: registry.Reader = registry.READERS[0]
    ) -> None:
        self.look_at(store.checkout(commit), way)

    def look_at(
        self, snapshot: ckptstore.Snapshot, way: registry.Reader = registry.READERS[0]
    ) -> None:
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
        self.store.close()
        ends: list[Site] = [self.site, *([self.mirror] if self.has_mirror() else [])]
        for site in ends:
            self.told.append(f"end: {site.place}")
            with site.open(self.folder / "end", create=False, threads=2) as store:
                self.store = store  # of which `resume` takes the newest
                for info in store.log():
                    if info.step in self.wanted:
                        self.look(store, info.id)
                        self.look(store, info.id, self.random.choice(registry.READERS[1:]))
                assert not store.fsck(read_data="100%").findings

    def remove(self) -> None:
        for sites, site in ((self.sites, self.site), (self.others, self.mirror)):
            places.removed(sites, site)


def matches(name: str, globs: Mapping[str, Any]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def rounded(value: torch.Tensor) -> torch.Tensor:
    """As a cast leaves it: a tensor without dimensions stays as it is."""
    return value.to(torch.bfloat16).to(value.dtype) if value.dim() else value


def walk(seed: int, ground: Ground) -> str:
    """Returns the kind of place in which the store was."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        history, pack_bytes = None, Random(seed).choice(PACK_BYTES)
        try:
            with on(Path(folder) / "host-1"), packs_of(pack_bytes):
                history = History(Path(folder), seed, ground)
                for _ in range(ACTIONS):
                    history.act()
                history.end()
        except BaseException as error:
            told = history.told if history else ["the first commit"]
            told.insert(0, f"packs of {pack_bytes} bytes")
            error.add_note(f"CKPTSTORE_NET_WALK={seed} repeats it:\n  " + "\n  ".join(told))
            raise
        history.remove()
        return history.sites.kind


@pytest.mark.parametrize("seconds", [12, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_what_comes_back_is_what_was_committed(
    seed: int, seconds: float, request: pytest.FixtureRequest
) -> None:
    """Each walk has a seed of its own, which its failure names: CKPTSTORE_NET_WALK=N runs it."""
    only, ground = os.environ.get("CKPTSTORE_NET_WALK"), Ground(request, with_servers=seconds > 60)
    begun, walks = time.monotonic(), Counter[str]()
    with shared_directories():
        while not walks or (not only and time.monotonic() - begun < seconds):
            walks[walk(int(only) if only else seed + walks.total(), ground)] += 1
    print(f"{walks.total()} walks from seed {seed}: {dict(walks)}")
