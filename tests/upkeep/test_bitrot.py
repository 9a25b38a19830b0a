"""One bit turned anywhere in a store: an error of ours, or the right bytes of the right commit. Nothing else, and nobody dies of it.

Packs, twins, documents, log, checkpoint and `ckptstore.json` are tried byte by byte in this process. Catalog and chunk index are tried in
processes of their own, because SQLite and liblmdb could take one down: a sample of their bytes; in `make soak` every byte that is not zero,
and with CKPTSTORE_BITROT=all the zeros between them as well, which takes hours.
"""

import os
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
from ckptstore.core.ids import checkpoint_key, document_key
from ckptstore.engine.checkout import Reader
from ckptstore.engine.opening import Opening
from ckptstore.engine.transfer import Threads
from ckptstore.errors import CkptStoreError
from ckptstore.history.checkpoints import encode_state
from ckptstore.index.chunks import ChunkIndex
from ckptstore.objects.documents import decode_document
from ckptstore.objects.store import ObjectStore
from ckptstore.snapshot import Snapshot
from ckptstore.upkeep.findings import Level
from tests.upkeep.stores import check

FSCK_EVERY = 211
NOWHERE = Path("/dev/null/index")
"""A chunk index that has no place for a file keeps to memory, so that every trial begins with reading footers."""

SAMPLE = 100
ALL = os.environ.get("CKPTSTORE_BITROT") == "all"


def tiny(step: int) -> dict[str, Any]:
    """As few bytes as have everything in them: `w` is a chunk that both commits share, `b` lies in a page."""
    return {"m": {"w": torch.arange(65, dtype=torch.float64), "b": step}}


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits, the second of which has a tag as well, and a checkpoint of the log's state."""
    place = tmp_path_factory.mktemp("bitrot") / "store"
    with ckptstore.open(place) as store:
        for step in (1, 2):
            store.commit(tiny(step), step=step, tag="t" if step == 2 else (), metrics={"loss": float(step)})
    opening = Opening(place)
    opening.backend.put(checkpoint_key(2), encode_state(opening.log.replay()))
    opening.close()
    return place


def config(opening: Opening) -> Any:
    return opening.config


def log_state(opening: Opening) -> Any:
    return opening.log.replay()


def documents(opening: Opening) -> Any:
    state = opening.log.replay()
    return {c: decode_document(opening.backend.read(document_key(row.session, c)), c) for c, row in state.commits.items()}


def restored(opening: Opening) -> Any:
    """What the store gives without any index: the commit of each tag and step, and its state."""
    state = opening.log.replay()
    objects = ObjectStore(opening.backend, ChunkIndex.open(NOWHERE, opening.config.store), opening.log)
    objects.sync(state)
    reader = Reader(opening.config, objects, Threads(1))
    names = {**{f"tag {tag}": commit for tag, commit in state.tags.items()}, **{f"{row.step}": c for c, row in state.commits.items()}}
    states = {c: Snapshot(reader, c, reader.document(row.session, c)).state_dict() for c, row in state.commits.items()}
    return {name: (commit, as_lists(states[commit])) for name, commit in names.items()}


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


SEEN: dict[str, Callable[[Opening], Any]] = {"packs": restored, "commits": documents, "log": log_state, "ckptstore.json": config}
"""What a folder's bytes may change of what a reader sees: if this is as before, all that follows from it is."""


def seen(place: Path, folder: str) -> Any:
    opening = Opening(place, read_only=True)
    try:
        return SEEN[folder](opening)
    finally:
        opening.close()


def trials(path: Path) -> Iterator[tuple[int, int]]:
    """Every byte of `path` with one of its bits."""
    return ((offset, random.randrange(8)) for offset in range(path.stat().st_size))


@pytest.mark.parametrize("folder", SEEN)
def test_a_bit_turned_in_any_byte_of_the_store_is_noticed_or_means_nothing(
    tiny_store: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.history.log.CHECKPOINT_EVERY", 1)  # so that the checkpoint is looked at
    place = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    root = place / folder
    wanted, noticed, count = seen(place, folder), 0, 0
    for path in sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]:
        whole = path.read_bytes()
        for offset, bit in trials(path):
            where = f"bit {bit} of byte {offset} of {path.relative_to(place)}"
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :])
            count += 1
            try:
                assert seen(place, folder) == wanted, where
            except CkptStoreError:
                noticed += 1
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            if count % FSCK_EVERY == 0:
                assert_fsck_agrees(place, where)
        path.write_bytes(whole)
    assert noticed > count // 3
    assert seen(place, folder) == wanted


def assert_fsck_agrees(place: Path, where: str) -> None:
    """fsck reads more than a restore does, twins among it, so it finds every bit but those between runs of chunks."""
    try:
        report = check(place, Level.DATA)
    except CkptStoreError:
        return
    findings = [finding for finding in report.findings if finding.key]
    assert findings or "packs/" in where, f"{where}: fsck finds nothing"


CHILD = """
import shutil, sys
from pathlib import Path
import ckptstore
from tests.upkeep.test_bitrot import tiny
from tests.upkeep.stores import assert_equal

place, name, whole = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
wanted = {"t": 2, "1": 1, "2": 2, "latest": 2, "latest~1": 1, "best:loss": 1}
ids = dict(line.split() for line in sys.argv[4].split(","))
for trial in sys.argv[5].split(","):
    offset, bit = map(int, trial.split(":"))
    print(trial, flush=True)
    shutil.rmtree(place / "index", ignore_errors=True)
    shutil.copytree(whole, place / "index")
    with (place / "index" / name).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
    with ckptstore.open(place) as store:
        listed = store.log(), store.runs(), store.tags()
        for ref, step in wanted.items():
            try:
                snapshot = store.checkout(int(ref) if ref.isdecimal() else ref)
                assert snapshot.id == ids[str(step)], f"{ref} is {snapshot.id}"
                assert_equal(snapshot.state_dict(), tiny(step))
            except ckptstore.CkptStoreError as error:
                raise AssertionError(f"{ref}: {error}") from error
"""


INDEXES = pytest.mark.parametrize("name", ["catalog.sqlite", "chunks.lmdb/data.mdb"])


@INDEXES
def test_a_bit_turned_in_an_index_costs_no_process_and_no_commit(tiny_store: Path, tmp_path: Path, name: str) -> None:
    _turn_bits(tiny_store, tmp_path, name, lambda data: random.sample(_not_zero(data), SAMPLE))


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@INDEXES
def test_a_bit_turned_in_any_byte_of_an_index_costs_no_process_and_no_commit(tiny_store: Path, tmp_path: Path, name: str) -> None:
    _turn_bits(tiny_store, tmp_path, name, lambda data: range(len(data)) if ALL else _not_zero(data))


def _not_zero(data: bytes) -> list[int]:
    return [offset for offset, byte in enumerate(data) if byte]


def _turn_bits(tiny_store: Path, tmp_path: Path, name: str, choose: Callable[[bytes], Sequence[int]]) -> None:
    place = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    with ckptstore.open(place) as store:
        ids = {info.step: info.id for info in store.log()}
    whole = tmp_path / "whole"
    shutil.copytree(place / "index", whole)
    chosen = [f"{offset}:{random.randrange(8)}" for offset in sorted(choose((whole / name).read_bytes()))]
    known = ",".join(f"{step} {commit}" for step, commit in ids.items())
    for first in range(0, len(chosen), 2000):
        part = ",".join(chosen[first : first + 2000])
        command = [sys.executable, "-c", CHILD, str(place), name, str(whole), known, part]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.split()[-1:]
        assert done.returncode == 0, f"{name}, offset:bit {last}: exit {done.returncode}\n{done.stderr[-3000:]}"
