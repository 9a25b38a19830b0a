"""A store without bytes: tables of packs that commits fill, policies empty, and the real choice of
a gc rewrites. A year of it takes a second."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore.core.config import MIB, PACK_BYTES_LOCAL, PACK_BYTES_REMOTE
from ckptstore.core.ids import CommitId, new_session_id, pack_id
from ckptstore.core.text import SECOND_NS
from ckptstore.log.state import NEWEST_KEPT, CommitRow, Pack
from ckptstore.maintenance.gc.costs import FILES, OBJECTS, Choice, Prices, choose
from ckptstore.maintenance.gc.mark import PackUse
from ckptstore.maintenance.retention import (
    Candidate,
    Keep,
    KeepBest,
    KeepEverySteps,
    KeepLast,
    KeepPeriods,
    KeepWithin,
)
from ckptstore.objects.pack import FOOTER_DTYPE, TRAILER_BYTES
from ckptstore.objects.patches import DEPTH_MAX

SESSION = new_session_id()
ONE_THREAD_BYTES = 4 * MIB
DAY_S = 86_400
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
    policies: tuple[Keep, ...]
    thin_after: int
    """The newest commits that keep all layers; the others lose every second one. 0 thins none."""
    gc_every: int
    scattered: float = 0.0
    patched: float = 0.0
    """With a share, a changed layer is a patch of it, made of the layer before; 0 stores it
    whole."""

    def changed(self, step: int, random: Random) -> Iterator[int]:
        """The layers that the commit of this step writes."""
        for layer, cadence in enumerate(self.cadence):
            is_due = cadence and step % cadence == 0
            if not step or (random.random() < self.scattered if self.scattered else is_due):
                yield layer


def training_of(
    seed: int, *, least_bytes: int, scattered: float = 0.0, any_policy: bool = False
) -> Training:
    """A run of layers of at least so many bytes, and policies by step; or any, with
    `any_policy`."""
    random = Random(seed)
    layers = random.choice((4, 8, 12))
    unit = least_bytes * random.choice((1, 4, 30))
    layer_bytes = tuple(unit * random.choice((1, 1, 2, 5)) for _ in range(layers))
    cadence = (*(random.choice((0, 1, 1, 1, 2, 7)) for _ in range(layers - 1)), 1)
    threads = random.choice((1, 4))
    last, every = random.choice((1, 2, 3, 5, 10, 20, 50)), random.choice((0, 0, 5, 10, 50))
    policies: list[Keep] = [KeepLast(last)]
    if every:
        policies.append(KeepEverySteps(every))
    if any_policy:
        policies += (
            KeepBest("loss", n=random.choice((1, 3, 10))),
            KeepWithin(random.choice((3, 14, 45)) * DAY_S),
            KeepPeriods(random.choice(("weekly", "monthly")), random.choice((2, 6, 50))),
        )
        policies = random.sample(policies, random.choice((1, 2)))
    return Training(
        layer_bytes=layer_bytes,
        cadence=cadence,
        threads=threads,
        policies=tuple(policies),
        thin_after=random.choice((0, 0, 2, 10)),
        gc_every=random.choice((1, 7, 30, 100)),
        scattered=scattered,
    )


@dataclass
class Simulated:
    """A store, and what gcs did to it. `freed_bytes` is what the store shrank by beyond what the
    gcs wrote into it: the bytes that were dead. `most_unused` is the largest share that a gc left
    dead."""

    place: Place
    packs: dict[int, tuple[bool, Chunks]] = field(default_factory=dict)
    commits: list[tuple[Candidate, Chunks]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    """What a chunk is a patch of; -1 for one that is whole."""
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
            nbytes, before = training.layer_bytes[layer], int(now[layer])
            if before >= 0 and training.patched and self._patches(before) < DEPTH_MAX:
                now[layer] = self._chunk(int(nbytes * training.patched), before)
            else:
                now[layer] = self._chunk(nbytes)
            fresh.append(now[layer])
        total = sum(self.sizes[chunk] for chunk in fresh)
        threads = 1 if total <= ONE_THREAD_BYTES else training.threads
        for thread in range(threads):
            self._fill(fresh[thread::threads], metadata=False)
        now[-1] = self._chunk(1000 + 40 * len(now))
        self._fill([now[-1]], metadata=True)
        loss = ("loss", Random(step).random())
        row = CommitRow(
            n=step,
            place=step,
            session=SESSION,
            content="",
            run="main",
            step=step,
            time_ns=step * DAY_S * SECOND_NS,
            parents=(),
            metrics=(loss,),
            thinned=(),
            soft=0,
            forgotten_ns=0,
        )
        self.commits.append((Candidate(CommitId(f"{step:064x}"), row), now))

    def forget(self, training: Training) -> None:
        """What the policies, and a thinning, leave."""
        newest_first = [candidate for candidate, _ in reversed(self.commits)]
        kept = {each.commit for each in newest_first[:NEWEST_KEPT]}
        for policy in training.policies:
            kept.update(commit for commit, _ in policy.keeps(newest_first))
        self.commits = [(each, chunks) for each, chunks in self.commits if each.commit in kept]
        if training.thin_after:
            for _, chunks in self.commits[: -max(2, training.thin_after)]:
                chunks[:-1:2] = -1

    def uses(self) -> list[PackUse]:
        needed = np.zeros(len(self.sizes) + 1, np.bool_)
        for _, chunks in self.commits:
            needed[chunks] = True
        for chunk in reversed(range(len(self.bases))):
            if needed[chunk]:
                needed[self.bases[chunk]] = True
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
        uses, before, objects = self.uses(), self.bytes(), self.objects()
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
        self.freed_bytes += before - self.bytes()
        self.objects_less += objects - self.objects()
        return choice

    def _chunk(self, nbytes: int, base: int = -1) -> int:
        self.sizes.append(nbytes)
        self.bases.append(base)
        return len(self.sizes) - 1

    def _patches(self, chunk: int) -> int:
        """How many patches make it."""
        count = 0
        while (chunk := self.bases[chunk]) >= 0:
            count += 1
        return count

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

    def objects(self) -> int:
        """The files of its packs."""
        return sum(1 + metadata for metadata, _ in self.packs.values())

    def bytes(self) -> int:
        """Those of all packs."""
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
