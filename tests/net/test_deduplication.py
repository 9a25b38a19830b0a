"""What a commit has that is there costs no chunk again, whatever two open stores did before."""

from pathlib import Path
from random import Random

import pytest
import torch

import ckptstore
from tests.net.upkeep import collected
from tests.support.patching import small_chunks_too

CHUNK_BYTES = 1 << 16
ELEMENTS = CHUNK_BYTES // 4
ACTIONS = 25


class Stores:
    """Two open stores at one path, and tensors of few blocks. Copies of chunks are made as by
    writers that commit at once, none of which finds the packs of the other."""

    def __init__(self, place: Path, seed: int) -> None:
        self.random, self.steps = Random(seed), 0
        generator = torch.Generator().manual_seed(seed)
        self.blocks = [torch.rand(ELEMENTS, generator=generator) for _ in range(4)]
        self.stores = [
            ckptstore.open(
                place,
                run=run,
                threads=1,
                storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, patch_memory_bytes=memory),
            )
            for run, memory in (("a", None), ("b", 1))
        ]
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def drawn(self) -> dict[str, torch.Tensor]:
        """A state, in which some blocks have changed a little."""
        block = self.random.choice(self.blocks)
        block[self.random.randrange(ELEMENTS)] += 1
        return {name: torch.cat(self.random.choices(self.blocks, k=2)) for name in ("x", "y", "z")}

    def commit(self, state: dict[str, torch.Tensor]) -> ckptstore.Snapshot:
        store, self.steps = self.random.choice(self.stores), self.steps + 1
        self.states[self.steps] = state
        if self.random.random() < 0.5:
            return store.commit(state, step=self.steps)
        return store.commit_async(state, step=self.steps).wait()

    def copy(self) -> None:
        handle = self.stores[0]._handle
        packs = [pack.id for pack in handle.log.replay().packs.values()]
        unseen = self.random.sample(packs, len(packs) // 2)
        for pack in unseen:
            handle.objects.suspect_packs.add(pack)
        self.commit(self.drawn())
        for pack in unseen:
            handle.objects.suspect_packs.discard(pack)

    def collect(self) -> None:
        store = self.random.choice(self.stores)
        store.forget(ckptstore.KeepLast(self.random.randint(2, 4)), all_runs=True)
        collected(store)

    def repeat(self) -> None:
        """The state of a commit that is there, once more."""
        if infos := self.stores[0].log():
            state = self.states[self.random.choice(infos).step or 0]
            stats = self.commit(state).stats
            assert stats and stats.new_chunks == 0

    def act(self) -> None:
        self.random.choice((lambda: self.commit(self.drawn()), self.copy, self.collect))()
        self.repeat()

    def end(self) -> None:
        for info in self.stores[0].log():
            found = self.stores[1].checkout(info.id).state_dict()
            for name, wanted in self.states[info.step or 0].items():
                assert torch.equal(found[name], wanted)
        for store in self.stores:
            store.close()


LONG = [pytest.param(number, marks=pytest.mark.soak) for number in range(2, 60)]


@pytest.mark.parametrize("number", [0, 1, *LONG])
def test_what_is_there_is_found(number: int, tmp_path: Path) -> None:
    with small_chunks_too():
        stores = Stores(tmp_path / "store", number)
        for _ in range(ACTIONS):
            stores.act()
        stores.end()
