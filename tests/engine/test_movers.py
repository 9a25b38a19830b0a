"""Chunks that workers move: compaction, gc's copies and mirrors do what threads do, and a worker,
or the host that asks, may die at any moment."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import Unavailable
from ckptstore.maintenance import compact as compaction
from ckptstore.maintenance import mirror
from ckptstore.maintenance.compact import CompactReport
from ckptstore.maintenance.gc.session_monitor import STALE_S
from ckptstore.plugins.engine.work import Place, Work, carry_out
from ckptstore.repository.store_handle import StoreHandle
from tests.engine.killing import POLICY, work
from tests.engine.test_checks import Deadly, Watching, asking
from tests.maintenance.collecting import collected, garbage
from tests.maintenance.stores import make_store
from tests.support.patching import nudged, small_chunks_too
from tests.support.servers.s3 import S3Server, environment_of, new_url

STEPS = 8
SHAPE = (200, 300)
KEPT = (*range(3), 7)


def state(step: int) -> dict[str, Any]:
    own = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
    return {"moved": nudged(SHAPE, step), "own": own, "near": torch.ones(SHAPE) + step * 1e-3}


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        yield executor


def made(place: Path) -> Path:
    """A store with patches, to compact, to collect in, and to push from: some commits are
    forgotten."""
    with small_chunks_too(), ckptstore.open(place) as store:
        for step in range(STEPS):
            store.commit(state(step), step=step)
        for step in set(range(STEPS)) - {*KEPT}:
            store.forget(step)
    return place


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("template") / "store")


@pytest.fixture(autouse=True)
def _small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ENTRY_BYTES", 1)
    monkeypatch.setattr(compaction, "RUN_BYTES", 1 << 18)


def said(report: Any) -> Any:
    """What a report says, but for the bytes of footers: workers may divide packs otherwise."""
    if isinstance(report, CompactReport):
        return replace(report, packed_bytes=0, collected=())
    if isinstance(report, mirror.Mirrored):
        return replace(report, stored_bytes=0, plan=None)  # type: ignore[arg-type]
    return report.plan.rewrites, report.damaged, report.purged, len(report.deleted)


def assert_sound(place: Path) -> None:
    with ckptstore.open(place) as store:
        for info in store.log():
            assert info.step is not None
            snapshot = store.checkout(info)
            for name, tensor in state(info.step).items():
                assert torch.equal(snapshot.read(name), tensor), (info.step, name)
        assert sorted(info.step or 0 for info in store.log()) == sorted(KEPT)
        assert not store.fsck(read_data="all").findings


@pytest.mark.parametrize("verb", ["compact", "gc", "push"])
def test_workers_do_what_threads_do(
    verb: str, template: Path, tmp_path: Path, processes: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "WORKER_THREADS", 1)
    monkeypatch.setattr("ckptstore.storage.local.PACK_BYTES_LOCAL", 1 << 20)
    reports, sizes = [], []
    for name, by in (("threads", None), ("workers", processes)):
        place = tmp_path / name / "store"
        shutil.copytree(template, place)
        with ckptstore.open(place) as store:
            on = store.on(by) if by else None
            reports.append(said(work(store, on, tmp_path / name / "there", verb)))
        written = tmp_path / name / ("there" if verb == "push" else "store")
        assert_sound(written)
        assert not garbage(written)
        sizes.append(sum(path.stat().st_size for path in (written / "packs").rglob("*.*")))
    assert reports[0] == reports[1]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


@pytest.mark.parametrize("verb", ["compact", "gc", "push"])
def test_after_a_worker_died_the_next_run_ends(
    verb: str, template: Path, tmp_path: Path, processes: Executor
) -> None:
    place, there = tmp_path / "store", tmp_path / "there"
    shutil.copytree(template, place)
    with (
        ckptstore.open(place) as store,
        Deadly(1 if verb != "compact" else 2) as executor,
        pytest.raises(Unavailable, match="repeat the call"),
    ):
        work(store, store.on(executor), there, verb)
    assert_sound(place)
    finish(place, there, verb, processes)


def finish(place: Path, there: Path, verb: str, executor: Executor | None) -> None:
    """The next run does what is left, and later gcs find nothing of the one before, once its
    workers have ended."""
    written, later_s = there if verb == "push" else place, 0.0
    with ckptstore.open(place) as store:
        work(store, store.on(executor) if executor else None, there, verb)
        if verb == "compact":
            assert not store.compact(POLICY).chunks
    while garbage(written) and later_s < 20 * STALE_S:
        time.sleep(later_s and 0.2)
        collected(written, clock=lambda s=later_s: time.monotonic() + s)  # type: ignore[misc]
        later_s += STALE_S
    assert not garbage(written)
    assert_sound(written)


ASKS = """
import sys, threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
import ckptstore
from ckptstore.maintenance import compact as compaction
from tests.engine.killing import work
if __name__ == "__main__":
    place, there, verb = sys.argv[1:]
    compaction.ENTRY_BYTES, compaction.RUN_BYTES = 1, 1 << 18
    with ckptstore.open(place) as store:
        with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
            print("begins", flush=True)
            work(store, store.on(executor), Path(there), verb)
"""


def test_after_the_host_that_asks_died_the_next_run_ends(template: Path, tmp_path: Path) -> None:
    script, verb = tmp_path / "asks.py", Random().choice(["compact", "gc", "push"])
    script.write_text(ASKS)
    place, there = tmp_path / "store", tmp_path / "there"
    shutil.copytree(template, place)
    with asking([sys.executable, script, place, there, verb]) as asks:
        assert asks.stdout is not None and asks.stdout.readline() == "begins\n"
        time.sleep(Random().uniform(0.3, 2.0))
        asks.kill()
    assert_sound(place)
    finish(place, there, verb, None)


def test_workers_that_write_have_credentials_of_their_own(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    options = ckptstore.Storage(options=s3.options())
    with ckptstore.open(new_url(), storage=options) as store, Watching() as executor:
        for step in range(4):
            store.commit(state(step), step=step)
        there = new_url()
        on = store.on(executor)
        assert on.push(there, create=True, storage=options).chunks
        assert on.compact(ckptstore.CompactPolicy(newest=0, every=4)).chunks
        assert len(executor.sent) > 2
        assert all(s3.secret.encode() not in task for task in executor.sent)


def test_a_worker_that_would_write_to_another_store_refuses(tmp_path: Path) -> None:
    place, other = make_store(tmp_path / "store"), make_store(tmp_path / "other")
    before = sorted(os.walk(other))
    with closing(StoreHandle(place)) as handle:
        where = replace(Place.of(handle, read_only=False), url=str(other))
        with pytest.raises(Unavailable, match="wanted the store"):
            carry_out(Work("job", (where,), print, None))  # type: ignore[arg-type]
    assert sorted(os.walk(other)) == before
