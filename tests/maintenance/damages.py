"""Stores damaged in several places at once, by a seed; and which of their commits restore, bit for
bit."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import ckptstore
from ckptstore import KeepLast
from ckptstore.core.ids import (
    CHECKSUM_BYTES,
    CommitId,
    PackId,
    checkpoint_key,
    checksum,
    pack_key,
)
from ckptstore.errors import CkptStoreError
from ckptstore.log.log_snapshots import encode_state
from ckptstore.objects.codecs import PATCH
from ckptstore.objects.pack import TRAILER_BYTES, parse_footer, parse_trailer
from ckptstore.store import Store
from tests.maintenance.collecting import opened
from tests.maintenance.stores import CHUNK_BYTES, assert_equal
from tests.support.patching import nudged

States = Mapping[CommitId, Any]
"""What each commit holds that a store keeps."""

MOST_DAMAGES = 6


def state(step: int) -> dict[str, Any]:
    """Three leaves of two chunks: one's own, one that steps share by threes, and one of which few
    elements change; and the rounding of the first, which needs two chunks."""
    group = torch.Generator().manual_seed(1000 + step // 3)
    own = torch.randn(40, 500, generator=torch.Generator().manual_seed(step))
    return {
        "model": {
            "own": own,
            "half": own.to(torch.bfloat16),
            "group": torch.randn(30, 500, generator=group),
            "nudged": nudged((40, 500), step),
        },
        "step": step,
    }


def make(place: Path, *, codec: str) -> States:
    """A store with all kinds of objects: two runs, packs of one size, forgotten and collected
    commits, packs that gc wrote, a tag, a checkpoint of the log, an orphan. Chunks that two packs
    hold come from a commit that did not rely on a pack."""
    with ckptstore.open(
        place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=codec)
    ) as store:
        for step in range(6):
            store.commit(state(step), step=step)
        store.forget(KeepLast(4))
        store.gc(max_unused=0.0, grace_s=0)
        store.tag("best", 3)
        _distrust_everything(store)
        store.commit(state(6), step=6)
    with ckptstore.open(place, run="other") as store:
        for step in (20, 21):
            store.commit(state(step), step=step)
    with opened(place) as handle:
        log = handle.log.replay()
        handle.storage.put(checkpoint_key(log.n), encode_state(log))
    steps = {commit: row.step for commit, row in log.commits.items() if not row.soft}
    orphan = place / pack_key(PackId(f"{'0' * 24}-0-0"))
    orphan.parent.mkdir(exist_ok=True)
    shutil.copy(next((place / "packs").rglob("*-0-0")), orphan)
    return {commit: state(step or 0) for commit, step in steps.items()}


def _distrust_everything(store: Store) -> None:
    for pack in store._handle.log.replay().packs.values():
        store._handle.objects.suspect_packs.add(pack.id)


def good(place: Path, states: States) -> frozenset[CommitId]:
    """The commits that restore, each as it was. A commit that restores as something else fails the
    test. The store is opened to be written to, so that the indexes are its own: those of a reader
    lie in the host's cache, which copies of one store share."""
    found: set[CommitId] = set()
    try:
        with ckptstore.open(place) as store:
            for commit, wanted in states.items():
                try:
                    got = store.checkout(commit).state_dict()
                except CkptStoreError:
                    continue
                assert_equal(got, wanted)
                found.add(commit)
    except CkptStoreError:
        pass
    return frozenset(found)


def good_in_copy(place: Path, states: States, *, index: bool) -> frozenset[CommitId]:
    """`good`, of a copy: reading mends indexes. Without `index`, as a host sees it that knows
    nothing yet."""
    copy = place.with_name("copy")
    shutil.copytree(place, copy, ignore=None if index else shutil.ignore_patterns("index"))
    try:
        return good(copy, states)
    finally:
        shutil.rmtree(copy)


# -- damage


@dataclass(frozen=True)
class Damaged:
    """What was done to a store, in words."""

    scenarios: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.scenarios)


KINDS: Mapping[str, tuple[int, Callable[[Path], Sequence[Path]]]] = {
    "pack": (30, lambda place: [path for path in _files(place, "packs") if path.suffix != ".2"]),
    "twin": (16, lambda place: [path for path in _files(place, "packs") if path.suffix == ".2"]),
    "document": (8, lambda place: _files(place, "commits")),
    "entry": (6, lambda place: [path for path in _files(place, "log") if path.name.isdecimal()]),
    "checkpoint": (
        3,
        lambda place: [path for path in _files(place, "log") if not path.name.isdecimal()],
    ),
    "config": (2, lambda place: [path for path in [place / "ckptstore.json"] if path.exists()]),
    "index": (
        9,
        lambda place: [
            path for path in _files(place, "index") if path.suffix in (".sqlite", ".mdb")
        ],
    ),
}


def damage(place: Path, random: Random) -> Damaged:
    """One to `MOST_DAMAGES` damages, to objects of any kind."""
    scenarios = []
    for _ in range(random.randint(1, MOST_DAMAGES)):
        kind = random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        if there := KINDS[kind][1](place):
            path = random.choice(there)
            scenario = random.choice(SCENARIOS)
            scenarios.append(f"{kind} {path.relative_to(place)} {scenario(path, there, random)}")
    return Damaged(tuple(scenarios))


def _files(place: Path, folder: str) -> list[Path]:
    """In the order in which they were written: names are drawn anew for each store, and a seed must
    find the same objects."""
    return sorted(
        (path for path in (place / folder).rglob("*") if path.is_file()),
        key=lambda path: (path.stat().st_mtime_ns, path.name),
    )


def _flip(path: Path, others: Sequence[Path], random: Random) -> str:
    data = bytearray(path.read_bytes())
    bits = [
        random.randrange(len(data) * 8) for _ in range(random.choice((1, 1, 2, 20)) if data else 0)
    ]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"flipped {bits[:4]}"


def _flip_at_the_end(path: Path, others: Sequence[Path], random: Random) -> str:
    """In a pack, that is in the footer."""
    data = bytearray(path.read_bytes())
    places = [
        random.randrange(max(0, len(data) - 200), len(data))
        for _ in range(random.choice((1, 3)) if data else 0)
    ]
    for at in places:
        data[at] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return f"flipped at bytes {places}"


def _truncate(path: Path, others: Sequence[Path], random: Random) -> str:
    size = path.stat().st_size
    nbytes = random.choice((0, size // 2, max(0, size - 1), random.randrange(size + 1)))
    path.write_bytes(path.read_bytes()[:nbytes])
    return f"truncated to {nbytes}"


def _lengthen(path: Path, others: Sequence[Path], random: Random) -> str:
    path.write_bytes(path.read_bytes() + bytes(10))
    return "lengthened"


def _delete(path: Path, others: Sequence[Path], random: Random) -> str:
    path.unlink()
    return "deleted"


def _zero(path: Path, others: Sequence[Path], random: Random) -> str:
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data) + 1)
    stop = min(len(data), start + random.choice((1, 64, 512, 4096, len(data))))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return f"zeroed {start}:{stop}"


def _other(path: Path, others: Sequence[Path], random: Random) -> Path:
    """One of the same size, if there is one."""
    same = [
        other for other in others if other != path and other.stat().st_size == path.stat().st_size
    ]
    return random.choice(same or others)


def _swap(path: Path, others: Sequence[Path], random: Random) -> str:
    other = _other(path, others, random)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"swapped with {other.name}"


def _replace(path: Path, others: Sequence[Path], random: Random) -> str:
    other = _other(path, others, random)
    path.write_bytes(other.read_bytes())
    return f"replaced by {other.name}"


def _make_patch_wrong(path: Path, others: Sequence[Path], random: Random) -> str:
    """One of a pack's patches, if it has any, is as its writer wrote it, and makes something else,
    or nothing."""
    data = bytearray(path.read_bytes())
    try:
        trailer = parse_trailer(bytes(data[-TRAILER_BYTES:]), len(data))
        table = parse_footer(bytes(data[trailer.footer_offset : -TRAILER_BYTES]), trailer)
    except CkptStoreError:
        return "unreadable"
    rows = table[table["codec"] == PATCH]
    if not len(rows):
        return "without patches"
    row = random.choice(rows)
    start, stop = int(row["offset"]), int(row["offset"] + row["stored"])
    data[random.randrange(start + CHECKSUM_BYTES, stop)] ^= 1 << random.randrange(8)
    data[start : start + CHECKSUM_BYTES] = checksum(bytes(data[start + CHECKSUM_BYTES : stop]))
    path.write_bytes(data)
    return f"made the patch at {start} wrong"


SCENARIOS = (
    _flip,
    _flip_at_the_end,
    _truncate,
    _lengthen,
    _delete,
    _zero,
    _swap,
    _replace,
    _make_patch_wrong,
)
