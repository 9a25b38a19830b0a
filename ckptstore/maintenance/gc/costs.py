"""Which packs does a gc rewrite? Those whose copy gains more than it costs; pure.

A copy is made for one of two gains:

* *bytes*: sparse packs, the emptiest first, until at most the share `max_unused` of the store is
  dead. That is a promise about disk space, and stops as soon as it is kept.
* *objects*: small packs, so that reads, listings and later gcs look through fewer. Its price is the
  traffic, and on a bucket the requests. One object less is worth `Prices.object_bytes` of both.

Merging must not be a gc's work for nothing, so a gc merges with the bytes that it frees: what its
dead and sparse packs give back pays for what it writes, all copies together. Where nothing is
freed, `MANY_PACKS` packs of one size class are merged: as many as a listing names at once.

A chunk is merged a logarithmic number of times: packs of one size class are merged, 64 or more at
once, and at some size an object less is not worth the copy. So small packs are at most `MANY_PACKS`
of each size class. A gc with an explicit budget (`max_repack_bytes`) spends it on all packs below a
quarter of the full size.

A new pack is full once it is so large that merging it would not pay. Chunks that were committed
together are forgotten together: if a copy mixes those of many commits, it is sparse again soon.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptstore.core.config import MIB
from ckptstore.core.text import bytes_text, count_text
from ckptstore.maintenance.gc.mark import PackUse
from ckptstore.objects.pack import FOOTER_DTYPE, TRAILER_BYTES
from ckptstore.storage.contract import PART_BYTES, Capabilities


@dataclass(frozen=True, slots=True)
class Prices:
    """The bytes of traffic, read or written, that one object less is worth, and those that take as
    long as one request."""

    object_bytes: int
    request_bytes: int


FILES = Prices(MIB // 2, 0)
"""Opening a file and reading its footer takes about 0.2 ms, as long as moving so many bytes."""
OBJECTS = Prices(8 * MIB, MIB)
"""A request to a bucket takes 10 to 50 ms, in which a connection moves one to several MiB. Every
cold open, gc and fsck needs two or three for each object."""

MERGE_PACKS = 64
"""At least this many small packs of similar size are merged, so a policy that keeps fewer commits
never has theirs merged, to be sparse and copied again when these commits go. With 16, daily gcs of
adapters wrote 2.6 times what they freed; with 64, a hundredth, for some dozen objects more."""
MANY_PACKS = 1024
"""So many are merged although the gc frees less than that writes. A year of patches, each needed by
the commits that stay, was merged for 350 objects less: 28 MiB written, 0.6 freed."""
BUDGET_MERGE_PACKS = 8
"""The same for a gc with a budget of its own."""

_SIZE_STEP_BITS = 3
_SMALL_SHARE = 4


def prices_of(capabilities: Capabilities) -> Prices:
    """What an object and a request cost at this storage."""
    return OBJECTS if capabilities.slow_requests else FILES


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Why these packs are rewritten, or left, at what cost and for what gain.

    `why` is "sparse" or "small". `written_bytes` counts both files of a metadata pack, `requests`
    the reads, writes and deletions.
    """

    why: str
    chosen: bool
    packs: int
    read_bytes: int
    written_bytes: int
    freed_bytes: int
    objects: int
    requests: int

    def pays(self, prices: Prices) -> bool:
        """Whether the gain is worth the traffic and the requests."""
        cost = self.read_bytes + self.written_bytes + self.requests * prices.request_bytes
        return cost <= self.freed_bytes + self.objects * prices.object_bytes

    def __str__(self) -> str:
        packs, written = count_text(self.packs, f"{self.why} pack"), bytes_text(self.written_bytes)
        if self.why == "sparse":
            return f"rewrite {packs}: writes {written}, frees {bytes_text(self.freed_bytes)}"
        gain = f"{written} for {count_text(self.objects, 'object')} less"
        if self.chosen:
            return f"merge {packs}: writes {gain}"
        return (
            f"leave {packs}: to merge them would write {gain}, which is not worth it; "
            "--max-repack SIZE spends up to SIZE on it"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The packs to copy from, those of each new pack together, and the reasons for them and against
    others."""

    groups: tuple[tuple[PackUse, ...], ...]
    rewrites: tuple[Rewrite, ...]
    left_bytes: int
    """Dead bytes of packs that are neither deleted nor copied from."""


def choose(
    uses: Iterable[PackUse],
    *,
    max_unused: float,
    max_repack_bytes: int | None,
    pack_bytes: int,
    prices: Prices,
    empty: float = 1.0,
) -> Choice:
    """Choose the packs to copy from, of which at most `max_repack_bytes` are copied. Those of which
    the share `empty` or more is dead are copied within `max_unused`, too."""
    uses = tuple(uses)
    kept = [use for use in uses if not use.dead]
    budget = _Budget(max_repack_bytes)
    sparse = _sparse(kept, max_unused, empty, budget)
    taken = {use.number for use in sparse}
    merged: list[PackUse] = []
    left: list[PackUse] = []
    enough_bytes = prices.object_bytes if max_repack_bytes is None else pack_bytes

    def rewrite(why: str, packs: Sequence[PackUse], enough_bytes: int = enough_bytes) -> Rewrite:
        return _rewrite(why, packs, _grouped(packs, pack_bytes, enough_bytes))

    def gained_bytes() -> int:
        """What dead packs and the copies so far give back."""
        copies = rewrite("sparse", sparse), rewrite("small", merged)
        gained = sum(each.freed_bytes - each.written_bytes for each in copies)
        return gained + sum(use.pack.stored_bytes for use in uses if use.dead)

    def is_worth(merge: Rewrite) -> bool:
        is_paid = merge.packs >= MANY_PACKS or merge.written_bytes <= gained_bytes()
        return is_paid and merge.pays(prices)

    for group in _same_size(
        use
        for use in kept
        if use.readable and use.live_bytes < pack_bytes // _SMALL_SHARE and use.number not in taken
    ):
        if max_repack_bytes is not None:
            merged += filter(budget.take, group)
        elif len(group) >= MERGE_PACKS and is_worth(rewrite("small", group)):
            merged += group
        else:
            left += group
    chosen = sorted((*sparse, *merged), key=lambda use: (use.pack.metadata, use.number))
    reasons = [
        rewrite(why, packs) for why, packs in (("sparse", sparse), ("small", merged)) if packs
    ]
    if left:
        reasons.append(replace(rewrite("small", left, pack_bytes), chosen=False))
    return Choice(
        tuple(_grouped(chosen, pack_bytes, enough_bytes)),
        tuple(reasons),
        sum(map(_unused_bytes, kept)) - sum(map(_unused_bytes, chosen)),
    )


def _grouped(
    packs: Iterable[PackUse], pack_bytes: int, enough_bytes: int
) -> Iterator[tuple[PackUse, ...]]:
    """The packs that are copied into one, in order. It takes no more once it has enough."""
    group: list[PackUse] = []
    end = 0
    for use in packs:
        if group and (
            use.pack.metadata != group[0].pack.metadata
            or end >= enough_bytes
            or end + use.live_bytes > pack_bytes
        ):
            yield tuple(group)
            group, end = [], 0
        group.append(use)
        end += use.live_bytes
    if group:
        yield tuple(group)


def _sparse(
    kept: Iterable[PackUse], max_unused: float, empty: float, budget: "_Budget"
) -> list[PackUse]:
    """The emptiest packs, until at most the share `max_unused` of the bytes is dead, and each is
    less than `empty`."""
    kept = list(kept)
    unused = sum(map(_unused_bytes, kept)) - max_unused * sum(u.pack.stored_bytes for u in kept)
    chosen: list[PackUse] = []
    shares = {use.number: _unused_bytes(use) / use.pack.stored_bytes for use in kept if use.sparse}
    for use in sorted(
        (use for use in kept if use.sparse), key=lambda use: (-shares[use.number], use.number)
    ):
        if unused <= 0 and shares[use.number] < empty:
            break
        if budget.take(use):
            unused -= _unused_bytes(use)
            chosen.append(use)
    return chosen


def _rewrite(why: str, packs: Sequence[PackUse], groups: Iterable[tuple[PackUse, ...]]) -> Rewrite:
    """The copy of `packs`, grouped into new packs."""
    requests = sum(1 + _parts(use.live_bytes) + use.files for use in packs)
    objects = sum(use.files for use in packs)
    for group in groups:
        requests += group[0].files * _parts(sum(use.live_bytes for use in group))
        objects -= group[0].files
    return Rewrite(
        why=why,
        chosen=True,
        packs=len(packs),
        read_bytes=sum(use.live_bytes for use in packs),
        written_bytes=sum(use.live_bytes * use.files for use in packs),
        freed_bytes=sum(map(_unused_bytes, packs)),
        objects=objects,
        requests=requests,
    )


def _parts(nbytes: int) -> int:
    """The requests that move so many bytes."""
    return -(-nbytes // PART_BYTES)


def _unused_bytes(use: PackUse) -> int:
    """The gain: dead chunks and their footers."""
    if not use.readable or not use.sparse:
        return 0
    live = use.live_bytes + use.live_chunks * FOOTER_DTYPE.itemsize + TRAILER_BYTES
    return max(use.pack.bytes - live, 0) * use.files


def _same_size(uses: Iterable[PackUse]) -> list[list[PackUse]]:
    groups: dict[tuple[bool, int], list[PackUse]] = defaultdict(list)
    for use in uses:
        groups[use.pack.metadata, use.live_bytes.bit_length() // _SIZE_STEP_BITS].append(use)
    return [group for _, group in sorted(groups.items()) if len(group) >= BUDGET_MERGE_PACKS]


class _Budget:
    """Bytes that may still be copied; None for no limit."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._left = limit_bytes

    def take(self, use: PackUse) -> bool:
        if self._left is None:
            return True
        cost = use.live_bytes * use.files
        if cost > self._left:
            return False
        self._left -= cost
        return True
