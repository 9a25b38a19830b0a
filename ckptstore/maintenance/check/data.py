"""fsck's last level: stored bytes are read and compared with chunk ids, least recently verified
packs first.

The time of each pack's last verification is kept in the host's index directory, so that an
interrupted run continues; a lost record only costs reading again. Damaged packs are noted for every
process of the host.
"""

import time
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptstore.core.config import default_threads
from ckptstore.core.ids import ChunkId, PackId, StoreId, digest
from ckptstore.core.model import PackEntry
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.log.state import Pack
from ckptstore.maintenance import Progress, Spread, here, load_note, save_note
from ckptstore.maintenance.check import WHOLE, Shard, Share
from ckptstore.maintenance.check.offline_store import OfflineStore
from ckptstore.maintenance.check.trees import Contents
from ckptstore.objects import codecs, patches
from ckptstore.objects import pack as packs
from ckptstore.repository.chunk_reader import (
    MergedRead,
    Problem,
    StoredPatch,
    Unread,
    keys_of,
    read_run,
    runs_of,
)
from ckptstore.repository.dedup import items_of
from ckptstore.repository.footers import ChunkInPack, read_chunk, stored_patch
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

RECORD_NAME = "verified.json"
_SAVE_EVERY_S = 5.0
_PATCHES_AT_ONCE = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk of `pack` whose bytes in the object `key` are wrong or unreadable."""

    pack: PackId
    key: str
    entry: PackEntry
    problem: Problem


def load_record(directory: Path, store: StoreId) -> Mapping[PackId, int]:
    """Unix seconds at which packs were verified last; empty if the record is absent, damaged or
    of another store."""
    return load_note(
        directory / RECORD_NAME,
        store,
        lambda times: {PackId(pack): int(time_s) for pack, time_s in times.items()},
        {},
    )


class PackToRead(NamedTuple):
    """A pack, and the records of its footer."""

    pack: Pack
    table: packs.FooterTable


class Patched(NamedTuple):
    """A chunk that is stored as a patch of `base`, and where; the `others` that it is rounded of,
    too, are whole."""

    chunk: ChunkId
    base: ChunkId
    others: tuple[tuple[ChunkId, tuple[ChunkInPack, ...]], ...]
    places: tuple[ChunkInPack, ...]


class Patches(NamedTuple):
    """A whole chunk, where it lies, and the patches that need it, each behind its base. What lies
    nowhere may be in a pack that is `unread`."""

    whole: ChunkId
    places: tuple[ChunkInPack, ...]
    patched: tuple[Patched, ...]
    unread: Unavailable | None


def choose(
    listed: Iterable[Pack], verified: Mapping[PackId, int], suspects: Set[PackId], share: Share
) -> list[Pack]:
    """The packs to read: least recently verified until `share` of all bytes is reached, and the
    `suspects`. Pure."""
    packs = sorted(listed, key=lambda pack: (verified.get(pack.id, 0), pack.id))
    chosen, rest = [], share.of(sum(pack.stored_bytes for pack in packs))
    for pack in packs:
        if rest > 0 or pack.id in suspects:
            chosen.append(pack)
            rest -= pack.stored_bytes
    return chosen


def verify(
    offline_store: OfflineStore,
    contents: Contents,
    share: Share,
    progress: Progress,
    spread: Spread[Storage] | None = None,
    shard: Shard = WHOLE,
) -> tuple[int, list[BadChunk]]:
    """Read a share of the packs of a shard; returns the bytes read and the damage, which is noted
    for every process of this host. The record is saved every few seconds and at the end, even after
    a failure."""
    directory, store = offline_store.index_directory, offline_store.config.store
    readable = [pack for pack in contents.state.packs.values() if pack.id in contents.tables]
    known, suspects = load_record(directory, store), offline_store.suspect_packs
    verified = {pack.id: known[pack.id] for pack in readable if pack.id in known}
    own = [pack for pack in readable if shard.has(pack.id)]
    chosen = choose(own, verified, suspects.packs(), share)
    total, done, saved = sum(pack.stored_bytes for pack in chosen), 0, time.monotonic()
    found: list[BadChunk] = []
    sound = set[PackId]()
    with ExitStack() as stack:
        stack.callback(lambda: save_note(directory / RECORD_NAME, store, verified))
        if spread is None:
            threads = stack.enter_context(closing(ThreadPool(default_threads())))
            spread = here(offline_store.storage, threads)
        packs_to_read = (PackToRead(pack, contents.tables[pack.id]) for pack in chosen)
        read = stack.enter_context(closing(spread(verify_pack, packs_to_read)))
        for (pack, _), bad in read:
            unread = sum(isinstance(chunk.problem, Unavailable) for chunk in bad)
            if unread < len(bad):
                suspects.add(pack.id)
            if not unread:
                verified[pack.id] = int(time.time())
            if not bad:
                sound.add(pack.id)
            found += bad
            done += pack.stored_bytes
            progress("data", done, total)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                save_note(directory / RECORD_NAME, store, verified)
                saved = time.monotonic()
        members = _chain_members(contents, chosen)
        made = stack.enter_context(closing(spread(made_wrong, patches_in(contents, members))))
        for wrong in [*never_made(contents, members), *(bad for _, some in made for bad in some)]:
            if isinstance(wrong.problem, Unavailable):
                verified.pop(wrong.pack, None)
            else:
                suspects.add(wrong.pack)
            sound.discard(wrong.pack)
            found.append(wrong)
    for name in sound:  # not before its patches were made
        suspects.discard(name)
    # The order of a report does not depend on who came first. A base is read for each patch.
    places = {(bad.pack, bad.key, bad.entry.offset): bad for bad in reversed(found)}
    return total, [places[place] for place in sorted(places)]


def verify_pack(storage: Storage, threads: ThreadPool, given: PackToRead) -> list[BadChunk]:
    """The chunks of one pack, and of its twin, that do not match their ids or cannot be read.

    Raises `Unavailable` if nothing of it can be read: its bytes may be sound.
    """
    return [
        bad
        for key in keys_of(given.pack)
        for bad in _verify_object(storage, key, given.pack.id, given.table, threads)
    ]


def patches_in(contents: Contents, members: Iterable[ChunkId]) -> Iterator[tuple[Patches, ...]]:
    """The patches `members`, with all that they are made of, some at a time. Pure."""
    bases = contents.bases
    patches_of: dict[ChunkId, list[ChunkId]] = {}
    for chunk in members:
        patches_of.setdefault(bases[chunk][0], []).append(chunk)

    def places(chunk: ChunkId, *, patched: bool) -> tuple[ChunkInPack, ...]:
        found = contents.inventory.places(chunk)
        if not patched:
            return tuple(found)
        # Another writer may have made it of other bases.
        named = set(bases[chunk])
        return tuple(place for place in found if set(items_of(place.entry.patch_of)) == named)

    batch: list[Patches] = []
    for whole in patches_of:
        if whole not in bases:
            below, left = list[Patched](), [whole]
            while left:
                base = left.pop()
                for chunk in patches_of.get(base, ()):
                    others = ((each, places(each, patched=False)) for each in bases[chunk][1:])
                    below.append(Patched(chunk, base, tuple(others), places(chunk, patched=True)))
                    left.append(chunk)
            its = places(whole, patched=False)
            batch.append(Patches(whole, its, tuple(below), contents.unread))
            if sum(len(each.patched) for each in batch) >= _PATCHES_AT_ONCE:
                yield tuple(batch)
                batch = []
    if batch:
        yield tuple(batch)


def made_wrong(storage: Storage, threads: ThreadPool, given: Sequence[Patches]) -> list[BadChunk]:
    """The patches that do not make their chunk, and what they are made of that cannot be read, in
    packs that were perhaps not read. A patch that was not tried, since storage did not answer, is
    `Unavailable`, too."""
    found = list[BadChunk]()

    def verify(each: Patches) -> None:
        bases, raws = {patched.base for patched in each.patched}, dict[ChunkId, memoryview]()
        silent: Unavailable | None = None

        def read(read_any: Callable[..., T], places: Sequence[ChunkInPack]) -> T | None:
            nonlocal silent
            try:
                return read_any(storage, places)
            except (Corrupt, NotFound, Unavailable) as error:
                why = error if places else each.unread
                silent = why if isinstance(why, Unavailable) else silent
                found.extend(_bad(place, error) for place in places[:1])
                return None

        if (whole := read(read_chunk, each.places)) is not None:
            raws[each.whole] = whole
        for chunk, base, others, places in each.patched:
            its = {name: read(read_chunk, where) for name, where in others}
            its[base], patch = raws.get(base), read(stored_patch, places)
            sound = {name: raw for name, raw in its.items() if raw is not None}
            if patch is None or len(sound) < len(its):
                found.extend(_bad(place, silent) for place in places if silent)
            elif (made := _made(patch, sound)) is None:
                found.append(_made_wrong(patch, places))
            elif chunk in bases:
                raws[chunk] = made

    threads.spread(verify, given)
    return found


def _bad(place: ChunkInPack, problem: Problem) -> BadChunk:
    return BadChunk(place.pack, place.keys[0], place.entry, problem)


def _made(patch: StoredPatch, raws: Mapping[ChunkId, memoryview]) -> memoryview | None:
    """The chunk that a patch makes of its bases, which its pack's footer names; None if it makes
    another or names other bases."""
    head, entry = patch.head, patch.entry
    if set(head.bases) != raws.keys():
        return None
    its = [raws[base] for base in head.bases]
    try:
        made = patches.made_of(patch.stored, entry.width, entry.raw_bytes, its)
    except Corrupt:
        return None
    return made if digest(made) == entry.chunk else None


def never_made(contents: Contents, members: Collection[ChunkId]) -> list[BadChunk]:
    """Those of the patches `members` that no reader makes: they need themselves, or round what is
    rounded itself. Pure."""
    bases, raw_bytes = contents.bases, dict[ChunkId, int]()
    users, left = defaultdict[ChunkId, list[ChunkId]](list), Counter[ChunkId]()
    for chunk in members:
        for each in (chunk, *bases[chunk]):
            places = contents.inventory.places(each)
            raw_bytes[each] = places[0].entry.raw_bytes if places else 0
        for base in bases[chunk]:
            if base in members:
                users[base].append(chunk)
                left[chunk] += 1
    ready, rounded = [chunk for chunk in members if not left[chunk]], set[ChunkId]()
    never = set(members).difference(ready)
    while ready:
        chunk = ready.pop()
        its = bases[chunk]
        rounds = len(its) > 1 or raw_bytes[its[0]] == 2 * raw_bytes[chunk]
        if rounds or not rounded.isdisjoint(its):
            rounded.add(chunk)
        if rounds and not rounded.isdisjoint(its):
            never.add(chunk)
        for user in users[chunk]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)
                never.discard(user)
    what = Corrupt("it is a patch that needs itself, or rounds what is rounded itself")
    return [_bad(contents.inventory.places(chunk)[0], what) for chunk in never]


def _chain_members(contents: Contents, chosen: Iterable[Pack]) -> dict[ChunkId, None]:
    """The patches in the chosen packs, and those that they need."""
    members: dict[ChunkId, None] = {}
    for pack in chosen:
        table = contents.tables[pack.id]
        left = list(map(ChunkId, table["chunk"][table["codec"] == codecs.PATCH].tolist()))
        while left:
            if (chunk := left.pop()) in contents.bases and chunk not in members:
                members[chunk] = None
                left += contents.bases[chunk]
    return members


def _made_wrong(patch: StoredPatch, places: Iterable[ChunkInPack]) -> BadChunk:
    chunk = patch.entry.chunk
    place = next(place for place in places if place.entry == patch.entry)
    what = f"chunk {chunk.hex()[:12]} in {place.keys[0]} is not what its patch makes of its bases"
    return BadChunk(place.pack, place.keys[0], patch.entry, Corrupt(what))


def _verify_object(
    storage: Storage, key: str, pack: PackId, table: packs.FooterTable, threads: ThreadPool
) -> list[BadChunk]:
    bad: list[BadChunk] = []

    def verify(run: MergedRead) -> None:
        found = read_run(storage, [key], run)
        one = found[0]
        if len(found) > 1 and isinstance(one, Unread) and isinstance(one.problem, Unavailable):
            # Part of it may be readable.
            found = [
                each for read in run.reads for each in read_run(storage, [key], MergedRead((read,)))
            ]
        bad.extend(
            BadChunk(pack, key, chunk.read.entry, chunk.problem)
            for chunk in found
            if isinstance(chunk, Unread)
        )

    threads.spread(verify, list(runs_of(storage, table)))
    unanswered = [chunk.problem for chunk in bad if isinstance(chunk.problem, Unavailable)]
    if unanswered and len(unanswered) == len(table):
        raise unanswered[0]
    return sorted(bad, key=lambda chunk: chunk.entry.offset)
