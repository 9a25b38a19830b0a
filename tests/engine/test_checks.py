"""A check on workers, or in parts, finds what one host finds; and a worker, or the host that asks,
may die at any moment."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.core.ids import CONFIG_KEY
from ckptstore.core.process import AHEAD, each_done
from ckptstore.errors import CkptStoreError, InvalidInput, Unavailable
from ckptstore.maintenance.check import WHOLE, Kind, Looked, Report, Shard, Share, parse_shard
from ckptstore.maintenance.check.data import load_record
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.plugins.engine.work import Place, spread_on
from tests.cli.running import call
from tests.maintenance.damages import damage, make
from tests.maintenance.stores import files, flip, large_state, make_store
from tests.support.patching import small_chunks_too
from tests.support.servers.s3 import S3Server, environment_of, new_url

FEW = 3
MANY = int(os.environ.get("CKPTSTORE_TEST_SHARDED_CHECKS", "500"))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
        yield executor


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With patches, two runs, and all kinds of objects."""
    place = tmp_path_factory.mktemp("template") / "store"
    with small_chunks_too():
        make(place, codec="raw")
    return place


def checked(place: Path, shard: Shard = WHOLE, executor: Executor | None = None) -> Report:
    """Check a copy, so that one check leaves the next one nothing."""
    copy = place.with_name("checked")
    shutil.copytree(place, copy)
    try:
        with open_offline_store(copy) as store:
            spread = spread_on(executor, Place.of(store)) if executor else None
            return fsck(store, share=Share(), shard=shard, spread=spread)
    finally:
        shutil.rmtree(copy)


def together(reports: list[Report]) -> tuple[set[Any], Looked]:
    """What the reports of all parts say."""
    seen = [report.looked for report in reports]
    names = ("commits", "packs", "chunks", "data_bytes", "stored_bytes")
    sums = {name: sum(getattr(looked, name) for looked in seen) for name in names}
    return {f for report in reports for f in report.findings}, Looked(seen[0].entries, **sums)


def _compare(template: Path, scratch: Path, seed: int, executor: Executor) -> None:
    """Damage a store, and check it whole, in parts, and on workers."""
    random, store = Random(seed), scratch / "store"
    shutil.copytree(template, store)
    scenario, count = damage(store, random), random.randint(1, 5)
    what = f"seed {seed}: {scenario}"
    try:
        whole = checked(store)
    except CkptStoreError:  # nothing says what store it was
        shutil.rmtree(store)
        return
    parts = [checked(store, Shard(i, count)) for i in range(1, count + 1)]
    assert together(parts) == (set(whole.findings), whole.looked), what
    if any(finding.kind is Kind.CONFIG for finding in whole.findings):
        with pytest.raises(Unavailable, match=CONFIG_KEY):
            checked(store, executor=executor)
    else:
        assert checked(store, executor=executor) == whole, what
    shutil.rmtree(store)


def test_parts_of_a_check_and_checks_on_workers_find_the_same(
    template: Path, tmp_path: Path, processes: Executor
) -> None:
    seed = Random().randrange(1 << 32)
    for n in range(FEW):
        _compare(template, tmp_path, seed + n, processes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_parts_of_many_checks_find_the_same(
    template: Path, tmp_path: Path, processes: Executor
) -> None:
    for seed in range(MANY):
        _compare(template, tmp_path, seed, processes)


def test_a_part_is_named_by_two_numbers() -> None:
    assert parse_shard("3/8") == Shard(3, 8)
    for wrong in ("0/8", "9/8", "1/0", "3", "a/b", "-1/2", ""):
        with pytest.raises(InvalidInput, match="wanted I/N"):
            parse_shard(wrong)


def test_the_command_checks_a_part(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    words = ("-s", str(store), "fsck", "--read-data", "--json")
    whole = call(*words).document
    parts = [call(*words, "--shard", f"{i}/3").document for i in (1, 2, 3)]
    for name in ("read_bytes", "stored_bytes", "packs", "commits"):
        assert sum(part[name] for part in parts) == whole[name]
    assert call(*words, "--shard", "4/3").code == Exit.USAGE
    assert call(*words, "--on", "spark").code == Exit.USAGE


def test_threads_of_the_caller_are_workers_too(tmp_path: Path) -> None:
    place, said = make_store(tmp_path / "store", states=large_state), list[tuple[str, int, int]]()
    flip(next(path for path in files(place, "packs") if path.suffix != ".2"), 100)
    with ckptstore.open(place) as store, ThreadPoolExecutor(2) as executor:
        wanted = store.fsck(read_data="all")
        report = store.on(executor).fsck(read_data="all", progress=lambda *now: said.append(now))
        assert report == wanted
        assert report.damaged
        assert executor.submit(len, "it stays open").result()
    total = report.looked.stored_bytes
    assert [now for now in said if now[0] == "data"][-1] == ("data", total, total)


# -- what travels


class Watching(ThreadPoolExecutor):
    """Keeps what it would send to processes."""

    def __init__(self) -> None:
        super().__init__(2)
        self.sent: list[bytes] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(bytes(ForkingPickler.dumps((fn, args, kwargs))))
        return super().submit(fn, *args, **kwargs)


def test_workers_have_credentials_of_their_own(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(s3).items():
        monkeypatch.setenv(name, value)
    with (
        ckptstore.open(new_url(), storage=ckptstore.Storage(options=s3.options())) as store,
        Watching() as executor,
    ):
        store.commit(large_state(1))
        assert store.on(executor).fsck(read_data="all").looked.data_bytes
        assert executor.sent
        assert all(s3.secret.encode() not in task for task in executor.sent)


def test_a_worker_that_finds_another_store_refuses(tmp_path: Path, processes: Executor) -> None:
    place, other = make_store(tmp_path / "store"), make_store(tmp_path / "other")
    with open_offline_store(place) as store:
        there = replace(Place.of(store), url=str(other))
        with pytest.raises(Unavailable, match="wanted the store"):
            fsck(store, share=Share(), spread=spread_on(processes, there))
        gone = replace(Place.of(store), url=str(tmp_path / "gone"))
        with pytest.raises(Unavailable, match="its own environment and mounts"):
            fsck(store, share=Share(), spread=spread_on(processes, gone))


# -- what dies


class Deadly(ProcessPoolExecutor):
    """The worker that begins task `at` dies."""

    def __init__(self, at: int) -> None:
        super().__init__(2, get_context("forkserver"))
        self._left = at

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        return super().submit(fn, *args, **kwargs) if self._left else super().submit(os._exit, 1)


def test_after_a_worker_died_the_next_check_ends(tmp_path: Path, processes: Executor) -> None:
    place = make_store(tmp_path / "store", steps=6, states=large_state)
    with open_offline_store(place) as store:
        packs = len(store.open_log().replay().packs)
        at = Random().randrange(1, packs)
        with Deadly(at) as executor, pytest.raises(Unavailable, match="repeat the call"):
            fsck(store, share=Share(), spread=spread_on(executor, Place.of(store)))
        known = load_record(store.index_directory, store.config.store)
        assert len(known) < packs, f"task {at} of {packs}"
        report = fsck(store, share=Share(), spread=spread_on(processes, Place.of(store)))
        assert report.findings == ()
        assert report.looked.data_bytes == report.looked.stored_bytes
        assert len(load_record(store.index_directory, store.config.store)) == packs


ASKS = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from ckptstore.maintenance.check import Share
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.plugins.engine.work import Place, spread_on
if __name__ == "__main__":
    with open_offline_store(sys.argv[1]) as store:
        with ProcessPoolExecutor(2, get_context("forkserver")) as executor:
            spread = spread_on(executor, Place.of(store))
            while True:
                say = lambda *now: print(*now, flush=True)
                fsck(store, share=Share(), spread=spread, progress=say)
"""


@contextmanager
def asking(command: Sequence[object]) -> Iterator["subprocess.Popen[str]"]:
    """A process that asks workers of its own, which outlive it: nobody tells them."""
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as asks:
        try:
            yield asks
        finally:
            os.killpg(asks.pid, signal.SIGKILL)


def test_after_the_host_that_asks_died_the_next_check_ends(tmp_path: Path) -> None:
    place, script = make_store(tmp_path / "store", states=large_state), tmp_path / "asks.py"
    script.write_text(ASKS)
    command = [sys.executable, script, place]
    with asking(command) as asks:
        assert asks.stdout is not None
        began = any(line.startswith("data") for line in asks.stdout)
        time.sleep(Random().uniform(0.0, 0.3))
        asks.kill()
    assert began
    with ckptstore.open(place) as store:
        assert store.fsck(read_data="all").findings == ()
        store.commit(large_state(7))


def test_what_an_interrupt_ends_has_ended(tmp_path: Path) -> None:
    place, begun = make_store(tmp_path / "store", steps=8, states=large_state), list[object]()

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "data":
            begun.clear()
            raise KeyboardInterrupt

    class Slow(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            def slowly() -> Any:
                begun.append(args)
                time.sleep(0.05)
                return fn(*args, **kwargs)

            return super().submit(slowly)

    with ckptstore.open(place) as store, Slow(2) as executor:
        with pytest.raises(KeyboardInterrupt):
            store.on(executor).fsck(read_data="all", progress=stop)
        assert len(begun) <= 4
        assert executor.submit(len, "nothing of it is left").result()
        assert len(begun) <= 5


def test_results_come_as_they_end_and_few_tasks_wait() -> None:
    most, items = 0, iter(range(3 * AHEAD))

    def counted() -> Iterator[int]:
        nonlocal most
        for item in items:
            most = max(most, item - len(found))
            yield item

    found: set[tuple[int, int]] = set()
    with ThreadPoolExecutor(2) as executor, closing(each_done(executor, abs, counted())) as done:
        for pair in done:
            found.add(pair)
    assert found == {(n, n) for n in range(3 * AHEAD)}
    assert most <= AHEAD
