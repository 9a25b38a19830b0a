"""fsck's last level: stored bytes are read and compared with chunk ids, least recently verified
packs first.

The time of each pack's last verification is kept in the host's index directory, so that an
interrupted run continues; a lost record only costs reading again. Damaged packs are noted for every
process of the host.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ckptstore.core.config import default_threads
from ckptstore.core.ids import PackId, StoreId
from ckptstore.core.model import PackEntry
from ckptstore.core.paths import make_directories, write_file
from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.fold import Pack
from ckptstore.maintenance.check.report import Share
from ckptstore.maintenance.progress import Progress
from ckptstore.objects import pack as packs
from ckptstore.repository.chunk_reader import (
    Problem,
    Run,
    StoredChunk,
    keys_of,
    read_run,
    runs_of,
)
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.contract import Storage

RECORD_NAME = "verified.json"
_SAVE_EVERY_S = 5.0

Verified: TypeAlias = Mapping[PackId, int]
"""Unix seconds at which packs were verified last."""


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk of `pack` whose bytes in the object `key` are wrong or unreadable."""

    pack: PackId
    key: str
    entry: PackEntry
    problem: Problem


def load_record(directory: Path, store: StoreId) -> Verified:
    """The record of earlier runs; empty if it is absent, damaged or of another store."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        fields: dict[str, Any] = json.loads((directory / RECORD_NAME).read_text())
        if fields["store"] == store:
            return {PackId(p): int(t) for p, t in fields["times"].items()}
    return {}


def save_record(directory: Path, store: StoreId, verified: Verified) -> None:
    """Save the record; if it cannot be written, the next run starts over."""
    with suppress(OSError):
        make_directories(directory)
        new = directory / f"{RECORD_NAME}.new"
        write_file(new, json.dumps({"store": store, "times": verified}).encode())
        new.replace(directory / RECORD_NAME)


def choose(
    listed: Iterable[Pack], verified: Verified, suspects: Set[PackId], share: Share
) -> list[Pack]:
    """The packs to read: least recently verified until `share` of all bytes is reached, and the
    `suspects`. Pure."""
    packs = sorted(listed, key=lambda pack: (verified.get(pack.id, 0), pack.id))
    chosen, rest = [], share.of(sum(map(bytes_of, packs)))
    for pack in packs:
        if rest > 0 or pack.id in suspects:
            chosen.append(pack)
            rest -= bytes_of(pack)
    return chosen


def bytes_of(pack: Pack) -> int:
    """The size of a pack, its twin included."""
    return pack.bytes * (2 if pack.metadata else 1)


def verify_packs(
    storage: Storage,
    chosen: Sequence[Pack],
    tables: Mapping[PackId, packs.FooterTable],
    verified: Verified,
    save: Callable[[Verified], None],
    suspect_packs: SuspectPacks,
    progress: Progress,
) -> Iterator[BadChunk]:
    """Read `chosen` and yield the damage, noted in `suspect_packs` by then. `save` receives the
    record every few seconds and at the end, even after a failure."""
    threads = ThreadPool(default_threads())
    total, done, saved = sum(map(bytes_of, chosen)), 0, time.monotonic()
    try:
        for pack in chosen:
            bad = verify_pack(storage, pack, tables[pack.id], threads)
            (suspect_packs.add if bad else suspect_packs.discard)(pack.id)
            yield from bad
            verified = {**verified, pack.id: int(time.time())}
            done += bytes_of(pack)
            progress("data", done, total)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                save(verified)
                saved = time.monotonic()
    finally:
        save(verified)
        threads.close()


def verify_pack(
    storage: Storage, pack: Pack, table: packs.FooterTable, threads: ThreadPool
) -> list[BadChunk]:
    """The chunks of one pack, and of its twin, that do not match their ids or cannot be read.

    Raises `Unavailable` if nothing of it can be read: its bytes may be sound.
    """
    return [
        bad
        for key in keys_of(pack.id, metadata=pack.metadata)
        for bad in _verify_object(storage, key, pack.id, table, threads)
    ]


def _verify_object(
    storage: Storage, key: str, pack: PackId, table: packs.FooterTable, threads: ThreadPool
) -> list[BadChunk]:
    bad: list[BadChunk] = []

    def verify(run: Run) -> None:
        bad.extend(
            BadChunk(pack, key, entry, chunk)
            for entry, chunk in zip(run.entries, _read(storage, key, run), strict=True)
            if isinstance(chunk, CkptStoreError)
        )

    threads.spread(verify, runs_of(table))
    unanswered = [chunk.problem for chunk in bad if isinstance(chunk.problem, Unavailable)]
    if unanswered and len(unanswered) == len(table):
        raise unanswered[0]
    return sorted(bad, key=lambda chunk: chunk.entry.offset)


def _read(storage: Storage, key: str, run: Run) -> list[StoredChunk | Problem]:
    found = read_run(storage, [key], run)
    if isinstance(found[0], Unavailable) and len(found) > 1:
        # Part of it may be readable.
        return [read_run(storage, [key], run.alone(i))[0] for i in range(len(found))]
    return found


def prune(verified: Verified, listed: Iterable[Pack]) -> Verified:
    """The record without packs that are gone."""
    names = {pack.id for pack in listed}
    return {name: t for name, t in verified.items() if name in names}
