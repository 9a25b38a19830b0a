"""One bit turned anywhere in a store: an error of ours, or the right bytes of the right commit.
Nothing else, and nobody dies of it.

Packs, twins, documents, log, checkpoint and `ckptstore.json` are tried in this process. Catalog and
chunk index are tried in processes of their own (`turned_bits`), because SQLite and liblmdb could
take one down. A sample of the bytes is tried, in `make soak` every byte.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.contents import CommitContents
from ckptstore.core.ids import TWIN_SUFFIX, checkpoint_key, document_key
from ckptstore.errors import CkptStoreError
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.log.log_snapshots import encode_state
from ckptstore.maintenance.check import Level
from ckptstore.maintenance.compact.plan import CompactPolicy
from ckptstore.objects.codecs import PATCH, RAW
from ckptstore.objects.documents import decode_document
from ckptstore.objects.pack import TRAILER_BYTES, entries, parse_footer, parse_trailer
from ckptstore.repository.chunk_store import ObjectStore
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader
from ckptstore.snapshot import Snapshot
from tests.maintenance import turned_bits
from tests.maintenance.stores import check
from tests.maintenance.turned_bits import INDEXES, STEPS, tiny
from tests.support.patching import roundings, small_chunks_too

FSCK_EVERY = 53
SAMPLED_SHARE = 0.1
"""Of the bytes of the store itself."""
NOWHERE = Path("/dev/null/index")
"""A chunk index that has no place for a file keeps to memory, so that every trial begins with
reading footers."""

SAMPLE = 25
SURE = (RAW, PATCH)
"""Codecs of which every bit means something."""

A_PROCESS = 4000
"""So many trials are made by one process: importing torch costs as much as a hundred of them."""


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits, the second of which has a tag as well, and a checkpoint of the log's state."""
    place = tmp_path_factory.mktemp("bitrot") / "store"
    with ckptstore.open(place) as store:
        for step in STEPS:
            store.commit(
                tiny(step),
                step=step,
                tag="t" if step == STEPS[-1] else (),
                metrics={"loss": float(step)},
            )
    handle = StoreHandle(place)
    handle.storage.put(checkpoint_key(2), encode_state(handle.log.replay()))
    handle.close()
    return place


def config(handle: StoreHandle) -> Any:
    return handle.config


def log_state(handle: StoreHandle) -> Any:
    return handle.log.replay()


def documents(handle: StoreHandle) -> Any:
    state = handle.log.replay()
    return {
        c: decode_document(handle.storage.read(document_key(row.session, c)), c)
        for c, row in state.commits.items()
    }


def restored(handle: StoreHandle) -> Any:
    """What the store gives without any index: the commit of each tag and step, and its state."""
    state = handle.log.replay()
    objects = ObjectStore(
        handle.storage,
        ChunkIndex.open(NOWHERE, handle.config.store),
        handle.log,
        SuspectPacks(NOWHERE),
    )
    objects.sync(state)
    reader = Reader(handle.config, objects, ThreadPool(1))
    names = {
        **{f"tag {tag}": commit for tag, commit in state.tags.items()},
        **{f"{row.step}": c for c, row in state.commits.items()},
    }
    states = {
        c: Snapshot(CommitContents(reader, c, reader.document(row.session, c))).state_dict()
        for c, row in state.commits.items()
    }
    return {name: (commit, as_lists(states[commit])) for name, commit in names.items()}


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


SEEN: dict[str, Callable[[StoreHandle], Any]] = {
    "packs": restored,
    "commits": documents,
    "log": log_state,
    "ckptstore.json": config,
}
"""What a folder's bytes may change of what a reader sees: if this is as before, all that follows
from it is."""


def seen(place: Path, folder: str) -> Any:
    handle = StoreHandle(place, read_only=True)
    try:
        return SEEN[folder](handle)
    finally:
        handle.close()


def only_copy(path: Path, whole: bytes) -> list[range]:
    """The bytes of a pack that nothing else in the store has, and of which every bit means
    something: its chunks, its footer and its trailer. None of one with a twin; not the chunks that
    are coded, since zstd's tables of codes end with bits that it does not read."""
    if path.suffix or path.with_name(path.name + TWIN_SUFFIX).exists():
        return []
    trailer = parse_trailer(whole[-TRAILER_BYTES:], len(whole))
    table = parse_footer(whole[trailer.footer_offset : -TRAILER_BYTES], trailer)
    chunks = [range(e.offset, e.offset + e.stored_bytes) for e in entries(table) if e.codec in SURE]
    return [*chunks, range(trailer.footer_offset, len(whole))]


def trials(path: Path, share: float) -> Iterator[tuple[int, int]]:
    """A share of the bytes of `path`, each with one of its bits."""
    size = path.stat().st_size
    offsets = sorted(random.sample(range(size), max(1, int(size * share))))
    return ((offset, random.randrange(8)) for offset in offsets)


@pytest.mark.parametrize("folder", SEEN)
def test_a_bit_turned_in_the_store_is_noticed_or_means_nothing(
    tiny_store: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _turn_bits_of_the_store(tiny_store, tmp_path, folder, monkeypatch, SAMPLED_SHARE)


@pytest.mark.soak
@pytest.mark.parametrize("folder", SEEN)
def test_a_bit_turned_in_any_byte_of_the_store_is_noticed_or_means_nothing(
    tiny_store: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _turn_bits_of_the_store(tiny_store, tmp_path, folder, monkeypatch, 1.0)


@pytest.fixture
def compacted_store(tmp_path: Path) -> Path:
    """Three commits, of which two share a pack: a base, and the difference from it."""
    place = tmp_path / "compacted"
    with ckptstore.open(place) as store:
        for step in (1, 2, 3):
            moved = torch.arange(160, dtype=torch.float64) * (1 + step * 2**-40)
            store.commit({"m": {"w": moved}}, step=step)
        assert store.compact(CompactPolicy(newest=1, every=2)).deltas == 1
    return place


@pytest.fixture
def rounded_store(tmp_path: Path) -> Path:
    """Masters, and weights that are their rounding but for a few."""
    place, masters = tmp_path / "rounded", torch.randn(512)
    weights = masters.to(torch.bfloat16)
    weights[::100] += 1
    with small_chunks_too(), ckptstore.open(place) as store:
        store.commit({"m": {"half": weights, "single": masters}}, step=1)
        assert roundings(store)
    return place


PACKS = {"compacted_store": 0.05, "rounded_store": 0.02}
"""The share of the bytes that is tried, by the fixture."""


@pytest.mark.parametrize("kind", PACKS)
def test_a_bit_turned_in_a_pack_of_what_needs_another_is_noticed_or_means_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(kind)
    _turn_bits_of_the_store(place, tmp_path, "packs", monkeypatch, PACKS[kind])


@pytest.mark.soak
@pytest.mark.parametrize("kind", PACKS)
def test_a_bit_turned_in_any_byte_of_a_pack_of_what_needs_another_is_noticed_or_means_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(kind)
    _turn_bits_of_the_store(place, tmp_path, "packs", monkeypatch, 1.0)


def _turn_bits_of_the_store(
    tiny_store: Path, scratch: Path, folder: str, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(
        "ckptstore.log.log.CHECKPOINT_EVERY", 1
    )  # so that the checkpoint is looked at
    place = Path(shutil.copytree(tiny_store, scratch / "store"))
    root = place / folder
    wanted, noticed, count = seen(place, folder), 0, 0
    for path in sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]:
        whole = path.read_bytes()
        alone = only_copy(path, whole) if folder == "packs" else []
        for offset, bit in trials(path, share):
            where = f"bit {bit} of byte {offset} of {path.relative_to(place)}"
            path.write_bytes(
                whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :]
            )
            count += 1
            try:
                assert seen(place, folder) == wanted, where
                assert not any(offset in range_ for range_ in alone), where
            except CkptStoreError:
                noticed += 1
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            if count % FSCK_EVERY == 0:
                assert_fsck_agrees(place, where)
        path.write_bytes(whole)
    assert noticed > (0 if folder == "packs" else count // 3)
    assert seen(place, folder) == wanted


def assert_fsck_agrees(place: Path, where: str) -> None:
    """fsck reads more than a restore does, twins among it, so it finds every bit but those between
    runs of chunks."""
    try:
        report = check(place, Level.DATA)
    except CkptStoreError:
        return
    findings = [finding for finding in report.findings if finding.key]
    assert findings or "packs/" in where, f"{where}: fsck finds nothing"


@pytest.mark.parametrize("name", INDEXES)
def test_a_bit_turned_in_an_index_costs_no_process_and_no_commit(
    tiny_store: Path, scratch: Path, name: str
) -> None:
    _, tried = _turn_bits(
        tiny_store,
        scratch,
        name,
        lambda data: random.sample([at for at, byte in enumerate(data) if byte], SAMPLE),
    )
    assert tried > SAMPLE // 5


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", INDEXES)
def test_a_bit_turned_in_any_byte_of_an_index_costs_no_process_and_no_commit(
    tiny_store: Path, scratch: Path, name: str
) -> None:
    same, tried = _turn_bits(tiny_store, scratch, name, lambda data: range(len(data)))
    print(
        f"{same + tried} bytes of the {name}: {same} mean nothing to the library, {tried} were "
        "tried with a store"
    )


def _turn_bits(
    tiny_store: Path, scratch: Path, name: str, choose: Callable[[bytes], Sequence[int]]
) -> tuple[int, int]:
    """How many bytes meant nothing to the library, and how many were tried with a store."""
    chosen = sorted(choose((tiny_store / "index" / INDEXES[name].path).read_bytes()))
    same = tried = 0
    for first in range(0, len(chosen), A_PROCESS):
        trials, room = scratch / "trials", scratch / "room"
        trials.write_text(
            "".join(
                f"{offset} {random.randrange(8)}\n" for offset in chosen[first : first + A_PROCESS]
            )
        )
        room.mkdir()
        command = [
            sys.executable,
            "-m",
            turned_bits.__name__,
            name,
            str(tiny_store),
            str(room),
            str(trials),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1:]
        assert done.returncode == 0, (
            f"{name}, offset and bit {last}: exit {done.returncode}\n{done.stderr[-3000:]}"
        )
        same, tried = same + int(last[0].split()[0]), tried + int(last[0].split()[1])
        shutil.rmtree(room)
    return same, tried
