"""How are chunks read that are stored as patches? From bases at hand, and else from packs.

They are made after the other chunks of their request, which are bases at hand then: masters are
read once, for themselves and for the weights that round them. What is at hand is not trusted, since
others may write to it. What is made of it is compared with its checksum. If it differs, it is made
again, of bases from packs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from ckptstore.core.config import MIB
from ckptstore.core.ids import ChunkId, PackId, checksum, digest
from ckptstore.errors import Corrupt, NotFound
from ckptstore.objects import patches
from ckptstore.repository.chunk_reader import NO_BASES, Problem, Request, coalesce, cut
from ckptstore.repository.memory_budget import ReadRoom
from ckptstore.repository.near_chunks import NearChunks
from ckptstore.repository.patch_chains import ChunkLookup, PatchChain, Rounded, Whole, follow
from ckptstore.repository.thread_pool import Scratch, ThreadPool, one_by_one
from ckptstore.storage.read_cache import ReadCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

BASED_BYTES = 64 * MIB
"""Chunks that are made at once of bases that the caller has: most are a step away."""

Problems: TypeAlias = dict[int, Problem]
"""Why chunks cannot be read, by their numbers in the request."""

Damaged: TypeAlias = dict[int, tuple[PackId, Problem]]
"""As `Problems`, with the packs that have the chunks."""


class ChunkStore(ChunkLookup, Protocol):
    """A store from which chunks are read."""

    def read_into(
        self,
        ids: bytes,
        out: Sequence[memoryview],
        *,
        where: "NDArray[np.void] | None" = None,
        describe: Callable[[int], str] = ...,
        past_cache: bool = False,
        is_base: bool = False,
    ) -> None: ...


class Located(NamedTuple):
    """Chunks of a request: their numbers, and their places."""

    numbers: "NDArray[np.int64]"
    where: "NDArray[np.void]"

    def of(self, some: "NDArray[np.generic]") -> "Located":
        """Some of them, by a mask or by indices."""
        return Located(self.numbers[some], self.where[some])

    @classmethod
    def joined(cls, some: Sequence["Located"]) -> "Located":
        return cls(
            np.concatenate([each.numbers for each in some]),
            np.concatenate([each.where for each in some]),
        )

    def groups(self, limit_bytes: int) -> "list[Located]":
        """Groups of at most `limit_bytes` of raw bytes; a larger chunk is a group alone. Those that
        lie side by side go together."""
        order = np.lexsort((self.where["offset"], self.where["pack"]))
        ends = np.cumsum(self.where["raw"][order].astype(np.int64)).tolist()
        cuts = coalesce([0, *ends[:-1]], ends, limit_bytes=limit_bytes)
        return [self.of(order[some]) for some in cuts]


class _Making(NamedTuple):
    """A chunk that is being made: its number, its chain, its checksum, and its memory."""

    number: int
    chain: PatchChain
    checksum: bytes
    made: memoryview

    def made_bytes(self) -> int:
        return len(self.made)

    def masters_bytes(self) -> int:
        return 2 * len(self.made)


@dataclass(frozen=True, slots=True)
class PatchedReads:
    """Makes chunks of a request that are stored as patches. Threads may share it.

    They are made in the request's own memory, or `aside` if some of that overlaps. What NaN are
    rounded to is not sure, unless `exactly` is set: what was made of them otherwise is another
    chunk, and is made again.
    """

    store: ChunkStore
    request: Request
    at_hand: Mapping[ChunkId, memoryview]
    cache: ReadCache | None
    scratch: Scratch
    room: ReadRoom
    aside: bool
    exactly: bool = False

    def read_all(self, patched: Located, threads: ThreadPool | None) -> Damaged:
        """Make chunks in the memory of the request. Returns the problems of the others."""
        # A chain has at most as many bytes as its chunk, and there is room for twice as many.
        limit_bytes = BASED_BYTES if self.request.bases else 2 * self.room.read_bytes
        groups = patched.groups(limit_bytes)
        problems = Problems()
        spread = threads.spread if threads else one_by_one
        spread(lambda some: problems.update(self.read(some)), groups, max_workers=self.room.threads)
        packs = self.store.listed(set(patched.where["pack"].tolist()))
        number_of = dict(patched.where[["chunk", "pack"]].tolist())
        damaged = Damaged()
        for i, problem in problems.items():
            pack = packs.get(number_of[self.request.id(i)])
            damaged[i] = pack.id if pack else PackId("unlisted"), problem
        return damaged

    def read(self, patched: Located) -> Problems:
        """As `read_all`, of a group."""
        request, where, numbers = self.request, patched.where, patched.numbers.tolist()
        chains = follow(NearChunks(self.store, self.at_hand, self.cache), where)
        sums = dict(where[["chunk", "checksum"]].tolist())
        whole, rounded, problems = list[_Making](), list[_Making](), Problems()
        with self.scratch.lend(sum(len(request.out[i]) for i in numbers) * self.aside) as memory:
            for i in numbers:
                chunk, made = request.id(i), request.out[i]
                if self.aside:
                    made, memory = memory[: len(made)], memory[len(made) :]
                kind = rounded if isinstance(chains[chunk].end, Rounded) else whole
                kind.append(_Making(i, chains[chunk], sums[chunk], made))
            for some in cut(whole, _Making.made_bytes, self.room.read_bytes):
                problems |= self._made(some, self._copy)
            for some in cut(rounded, _Making.masters_bytes, self.room.read_bytes):
                problems |= self._made(some, self._round)
        if not problems or self.exactly or not (rounded or self.at_hand):
            return problems
        # A base in memory may be damaged, and is no reason to distrust a pack.
        again = patched.of(np.isin(patched.numbers, list(problems)))
        return replace(self, at_hand=NO_BASES, exactly=True).read(again)

    def _made(
        self, making: Sequence[_Making], bring: Callable[[Sequence[_Making]], None]
    ) -> Problems:
        """Make chunks of what `bring` fills their memory with: each alone, if one has a problem."""
        try:
            bring(making)
            patches.apply((each.made, each.chain.links()) for each in making)
            for each in making:
                self._finish(each)
        except (Corrupt, NotFound) as error:
            if len(making) == 1:
                return {making[0].number: error}
            return {n: why for each in making for n, why in self._made([each], bring).items()}
        return {}

    def _copy(self, making: Sequence[_Making]) -> None:
        """Fill memory with the whole chunks at the ends of chains."""
        far = list[tuple[_Making, Whole]]()
        for each in making:
            end = each.chain.end
            if not isinstance(end, Whole):
                assert not isinstance(end, Rounded)  # they go to `_round`
                raise end or NotFound("its chain of patches has no end")
            if (base := self.at_hand.get(end.chunk)) is None:
                far.append((each, end))
            elif len(base) == len(each.made):
                each.made[:] = base
            else:
                raise Corrupt(f"its base in memory has {len(base)} bytes")
        if far:
            self.store.read_into(
                b"".join(end.chunk for _, end in far),
                [each.made for each, _ in far],
                where=np.concatenate([end.row for _, end in far]),
                describe=lambda n: f"the base of {self.request.describe(far[n][0].number)}",
                past_cache=self.request.past_cache,
            )

    def _round(self, making: Sequence[_Making]) -> None:
        """Fill memory with the rounding of masters, which no rounding makes."""
        if self.request.is_base:
            raise Corrupt("a base of its patch is rounded itself; run `ckptstore fsck`")
        rounded = [(each, end) for each in making if isinstance(end := each.chain.end, Rounded)]
        bases = dict.fromkeys(base for _, end in rounded for base in end.bases)
        with self._masters(bases, 3 * sum(len(each.made) for each in making)) as masters:
            for each, end in rounded:
                of = [masters[base] for base in end.bases]
                patches.round_into(end.function, of, each.made, exactly=self.exactly)

    @contextmanager
    def _masters(
        self, bases: Iterable[ChunkId], limit_bytes: int
    ) -> Iterator[Mapping[ChunkId, memoryview]]:
        """Bases at hand, and the others in scratch memory. Raises `Corrupt` before it takes more
        than the limit of that."""
        masters = {base: self.at_hand[base] for base in bases if base in self.at_hand}
        where = self.store.located(b"".join(base for base in bases if base not in masters))
        sizes = where["raw"].tolist()
        if sum(sizes) > limit_bytes:
            raise Corrupt(f"the bases of its patch have {sizes} bytes; run `ckptstore fsck`")
        with self.scratch.lend(sum(sizes)) as memory:
            far = dict[ChunkId, memoryview]()
            for chunk, nbytes in where[["chunk", "raw"]].tolist():
                far[ChunkId(chunk)], memory = memory[:nbytes], memory[nbytes:]
            if far:
                self.store.read_into(
                    b"".join(far),
                    list(far.values()),
                    where=where,
                    describe=lambda _: "rounded to another chunk",
                    past_cache=self.request.past_cache,
                    is_base=True,
                )
            yield masters | far

    def _finish(self, making: _Making) -> None:
        """Verify a chunk that patches have made. Raises `Corrupt`."""
        number, chain, wanted, made = making
        chunk = self.request.id(number)
        if checksum(made) != wanted or (self.request.verify_ids and digest(made) != chunk):
            raise Corrupt(
                "what patches make of its base does not match its checksum; run `ckptstore fsck`"
            )
        if self.aside:
            self.request.out[number][:] = made
        # What is made of the caller's memory is made of it again as cheaply.
        if self.cache is not None and not chain.bases & self.request.bases.keys():
            self.cache.put(chunk, made)


def overlap(memories: Sequence[memoryview]) -> bool:
    """Whether two have bytes in common."""
    spans = sorted(
        (start, start + len(each))
        for each in memories
        for start in [np.frombuffer(each, np.uint8).__array_interface__["data"][0]]
    )
    return any(stop > after for (_, stop), (after, _) in pairwise(spans))
