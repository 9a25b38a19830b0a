"""fsck's last level: stored bytes are read and compared with chunk ids, least recently verified
packs first.

The time of each pack's last verification is kept in the host's index directory, so that an
interrupted run continues; a lost record only costs reading again. Damaged packs are noted for every
process of the host.
"""

import time
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptstore.core.config import default_threads
from ckptstore.core.ids import ChunkId, PackId, StoreId, digest
from ckptstore.core.model import PackEntry
from ckptstore.errors import CkptStoreError, Corrupt, Unavailable
from ckptstore.log.state import Pack
from ckptstore.maintenance import Progress, load_note, save_note
from ckptstore.maintenance.check import Share
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
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

RECORD_NAME = "verified.json"
_SAVE_EVERY_S = 5.0


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
    offline_store: OfflineStore, contents: Contents, share: Share, progress: Progress
) -> tuple[int, list[BadChunk]]:
    """Read a share of the packs; returns the bytes read and the damage, which is noted for every
    process of this host. The record is saved every few seconds and at the end, even after a
    failure."""
    directory, store = offline_store.index_directory, offline_store.config.store
    readable = [pack for pack in contents.state.packs.values() if pack.id in contents.tables]
    known, suspects = load_record(directory, store), offline_store.suspect_packs
    verified = {pack.id: known[pack.id] for pack in readable if pack.id in known}
    chosen = choose(readable, verified, suspects.packs(), share)
    total, done, saved = sum(pack.stored_bytes for pack in chosen), 0, time.monotonic()
    found: list[BadChunk] = []
    threads = ThreadPool(default_threads())
    try:
        for pack in chosen:
            bad = verify_pack(offline_store.storage, pack, contents.tables[pack.id], threads)
            unread = sum(isinstance(chunk.problem, Unavailable) for chunk in bad)
            if unread < len(bad):
                suspects.add(pack.id)
            if not unread:
                verified[pack.id] = int(time.time())
            if not bad:
                suspects.discard(pack.id)
            found += bad
            done += pack.stored_bytes
            progress("data", done, total)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                save_note(directory / RECORD_NAME, store, verified)
                saved = time.monotonic()
        for wrong in made_wrong(contents, {pack.id for pack in chosen}, threads):
            suspects.add(wrong.pack)
            found.append(wrong)
    finally:
        save_note(directory / RECORD_NAME, store, verified)
        threads.close()
    return total, found


def verify_pack(
    storage: Storage, pack: Pack, table: packs.FooterTable, threads: ThreadPool
) -> list[BadChunk]:
    """The chunks of one pack, and of its twin, that do not match their ids or cannot be read.

    Raises `Unavailable` if nothing of it can be read: its bytes may be sound.
    """
    return [
        bad
        for key in keys_of(pack)
        for bad in _verify_object(storage, key, pack.id, table, threads)
    ]


def made_wrong(contents: Contents, chosen: Set[PackId], threads: ThreadPool) -> list[BadChunk]:
    """The patches in the `chosen` packs that are sound, as is what they are made of, but do not
    make their chunk. What cannot be read is reported for itself."""
    bases, found = contents.bases, list[BadChunk]()
    wanted = _chain_members(contents, chosen)
    patches_of: dict[ChunkId, list[ChunkId]] = {}
    for chunk in wanted:
        patches_of.setdefault(bases[chunk], []).append(chunk)

    def verify(whole: ChunkId) -> None:
        left: list[tuple[ChunkId, bytes | memoryview]] = []
        with suppress(CkptStoreError):
            left = [(patch, contents.read(whole)) for patch in patches_of[whole]]
        while left:
            chunk, base = left.pop()
            with suppress(CkptStoreError):
                patch = contents.patch(chunk)
                made = _made(patch, bases[chunk], base)
                if made is None:
                    found.append(_made_wrong(contents, patch))
                else:
                    left += [(other, made) for other in patches_of.get(chunk, ())]

    threads.spread(verify, [base for base in patches_of if base not in bases])
    return sorted(found, key=lambda bad: (bad.pack, bad.entry.offset))


def _made(patch: StoredPatch, base: ChunkId, raw: bytes | memoryview) -> memoryview | None:
    """The chunk that a patch makes of its `base`, which its pack's footer names; None if it makes
    another or names another base."""
    made = memoryview(bytearray(raw))
    try:
        patches.apply([(patch.stored, patch.entry.width)], made)
    except Corrupt:
        return None
    is_right = patch.head.base == base and digest(made) == patch.entry.chunk
    return made if is_right else None


def _chain_members(contents: Contents, chosen: Set[PackId]) -> dict[ChunkId, None]:
    """The patches in the chosen packs, and those that they need."""
    members: dict[ChunkId, None] = {}
    for pack in sorted(chosen):
        table = contents.tables[pack]
        for chunk in map(ChunkId, table["chunk"][table["codec"] == codecs.PATCH].tolist()):
            at: ChunkId | None = chunk
            while at is not None and at in contents.bases and at not in members:
                members[at] = None
                at = contents.bases[at]
    return members


def _made_wrong(contents: Contents, patch: StoredPatch) -> BadChunk:
    chunk = patch.entry.chunk
    place = next(p for p in contents.inventory.places(chunk) if p.entry == patch.entry)
    what = f"chunk {chunk.hex()[:12]} in {place.keys[0]} is not what its patch makes of its base"
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
