"""A store without bytes: tables of packs that commits fill, policies empty, and the real choice of
a gc rewrites. A year of it takes a second."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.core.config import MIB, PACK_BYTES_LOCAL, PACK_BYTES_REMOTE
from ckptstore.core.ids import new_session_id, pack_id
from ckptstore.log.state import Pack
from ckptstore.maintenance.gc.costs import FILES, OBJECTS, Choice, Prices, choose
from ckptstore.maintenance.gc.mark import PackUse
from ckptstore.objects.pack import FOOTER_DTYPE, TRAILER_BYTES

SESSION = new_session_id()
ONE_THREAD_BYTES = 4 * MIB
Chunks = npt.NDArray[np.int64]


class Place(NamedTuple):
    """What the choice knows about a storage."""

    pack_bytes: int
    prices: Prices


DISK, BUCKET = Place(PACK_BYTES_LOCAL, FILES), Place(PACK_BYTES_REMOTE, OBJECTS)


def use_of(number: int, sizes: Sequence[int], live: Sequence[bool], *, metadata: bool) -> PackUse:
    """A pack of chunks of these sizes."""
    nbytes = sum(sizes) + len(sizes) * FOOTER_DTYPE.itemsize + TRAILER_BYTES
    return PackUse(
        number,
        Pack(pack_id(SESSION, 0, number), nbytes, len(sizes), metadata, True, 0),
        np.array(live, np.bool_),
        b"",
        sum(live),
        sum(size for size, is_live in zip(sizes, live, strict=True) if is_live),
        True,
    )


@dataclass(frozen=True)
class Training:
    """A run that commits `layer_bytes` of layers. A layer changes with every commit whose number is
    a multiple of its `cadence`, never with a cadence of 0, or at random, with the probability
    `scattered`."""

    layer_bytes: tuple[int, ...]
    cadence: tuple[int, ...]
    threads: int
    keep_last: int
    keep_every: int
    thin_after: int
    """The newest commits that keep all layers; the others lose every second one. 0 thins none."""
    gc_every: int
    scattered: float = 0.0

    def changed(self, step: int, random: Random) -> Iterator[int]:
        """The layers that the commit of this step writes."""
        for layer, cadence in enumerate(self.cadence):
            is_due = cadence and step % cadence == 0
            if not step or (random.random() < self.scattered if self.scattered else is_due):
                yield layer


@dataclass
class Simulated:
    """A store, and what gcs did to it. `freed_bytes` is what the store shrank by beyond what the
    gcs wrote into it: the bytes that were dead. `most_unused` is the largest share that a gc left
    dead."""

    place: Place
    packs: dict[int, tuple[bool, Chunks]] = field(default_factory=dict)
    commits: list[tuple[int, Chunks]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    written_bytes: int = 0
    freed_bytes: int = 0
    objects_less: int = 0
    most_unused: float = 0.0
    _numbers: int = 0

    def commit(self, step: int, training: Training, random: Random) -> None:
        """Write what changed, divided among threads as a commit divides it, and a page."""
        now = self.commits[-1][1].copy() if self.commits else np.zeros(0, np.int64)
        if not len(now):
            now = np.full(len(training.layer_bytes) + 1, -1)
        fresh = []
        for layer in training.changed(step, random):
            now[layer] = self._chunk(training.layer_bytes[layer])
            fresh.append(now[layer])
        total = sum(self.sizes[chunk] for chunk in fresh)
        threads = 1 if total <= ONE_THREAD_BYTES else training.threads
        for thread in range(threads):
            self._fill(fresh[thread::threads], metadata=False)
        now[-1] = self._chunk(1000 + 40 * len(now))
        self._fill([now[-1]], metadata=True)
        self.commits.append((step, now))

    def forget(self, training: Training) -> None:
        """What `KeepLast`, `KeepEverySteps` and a thinning leave."""
        newest = self.commits[-max(2, training.keep_last) :]
        every = training.keep_every
        old = [c for c in self.commits[: -len(newest)] if every and not c[0] % every]
        self.commits = old + newest
        if training.thin_after:
            for _, chunks in self.commits[: -max(2, training.thin_after)]:
                chunks[:-1:2] = -1

    def uses(self) -> list[PackUse]:
        needed = np.zeros(len(self.sizes) + 1, np.bool_)
        for _, chunks in self.commits:
            needed[chunks] = True
        return [
            use_of(
                number,
                [self.sizes[chunk] for chunk in chunks.tolist()],
                needed[chunks].tolist(),
                metadata=metadata,
            )
            for number, (metadata, chunks) in self.packs.items()
        ]

    def collect(self, max_unused: float = 0.05, max_repack_bytes: int | None = None) -> Choice:
        """Do what a gc would."""
        pack_bytes, prices = self.place
        uses, before, objects = self.uses(), self._bytes(), self._objects()
        choice = choose(
            uses,
            max_unused=max_unused,
            max_repack_bytes=max_repack_bytes,
            pack_bytes=pack_bytes,
            prices=prices,
        )
        kept = sum(use.pack.stored_bytes for use in uses if not use.dead)
        self.most_unused = max(self.most_unused, choice.left_bytes / kept)
        for use in uses:
            if use.dead:
                del self.packs[use.number]
        for group in choice.groups:
            moved: list[int] = []
            for use in group:
                metadata, chunks = self.packs.pop(use.number)
                moved += chunks[use.live].tolist()
                self.written_bytes += use.live_bytes * use.files
            self._list(moved, metadata)
        self.freed_bytes += before - self._bytes()
        self.objects_less += objects - self._objects()
        return choice

    def _chunk(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def _fill(self, chunks: Iterable[int], *, metadata: bool) -> None:
        """Write chunks to packs of at most the full size."""
        pack: list[int] = []
        end = 0
        for chunk in chunks:
            if pack and end + self.sizes[chunk] > self.place.pack_bytes:
                self._list(pack, metadata)
                pack, end = [], 0
            pack.append(chunk)
            end += self.sizes[chunk]
        if pack:
            self._list(pack, metadata)

    def _list(self, pack: list[int], metadata: bool) -> None:
        self._numbers += 1
        self.packs[self._numbers] = metadata, np.array(pack, np.int64)

    def _objects(self) -> int:
        return sum(1 + metadata for metadata, _ in self.packs.values())

    def _bytes(self) -> int:
        return sum(
            (1 + metadata) * (sum(self.sizes[c] for c in chunks.tolist()))
            for metadata, chunks in self.packs.values()
        )


def a_year(training: Training, place: Place, seed: int, commits: int = 365) -> Simulated:
    """Commit every day, and forget and collect every `training.gc_every` days."""
    store, random = Simulated(place), Random(seed)
    for step in range(commits):
        store.commit(step, training, random)
        if step % training.gc_every == training.gc_every - 1:
            store.forget(training)
            store.collect()
    return store
