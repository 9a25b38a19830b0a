"""Checks, exports, compaction, gc and mirrors on Ray's workers, which are killed, and whose driver
is."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, wait
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ray
import torch

import ckptstore
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.interop.formats import export
from ckptstore.maintenance import compact as compaction
from ckptstore.plugins.engine import consolidated
from ckptstore.plugins.engine.ray_executor import RayExecutor
from tests.engine.killing import Killing, work
from tests.engine.test_movers import assert_sound, finish, made
from tests.maintenance.stores import files, flip, large_state, make_store
from tests.support.guard import sitecustomize as guard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
    pytest.mark.pickles,  # Ray sends everything as pickles
]

KILLS = int(os.environ.get("CKPTSTORE_TEST_ENGINE_KILLS", "2"))
MANY_KILLS = int(os.environ.get("CKPTSTORE_TEST_MANY_ENGINE_KILLS", "100"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two workers; its address. Its processes are not watched for pickles."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    unguarded = [path for path in paths if path and Path(path) != Path(guard.__file__).parent]
    os.environ["PYTHONPATH"] = os.pathsep.join(unguarded)
    made = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield made.address_info["gcs_address"]
    ray.shutdown()
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.fixture
def executor(cluster: str) -> Iterator[RayExecutor]:
    with RayExecutor() as executor:
        yield executor


def test_it_is_an_executor(executor: RayExecutor) -> None:
    assert list(executor.map(abs, [-1, -2, 3])) == [1, 2, 3]
    assert isinstance(executor.submit(int, "x").exception(), ValueError)
    missing = executor.submit(_refuses).exception()
    assert type(missing) is NotFound, "the error itself, not Ray's around it"
    waiting: list[Future[Any]] = [executor.submit(time.sleep, 0.5) for _ in range(8)]
    assert waiting[-1].cancel()
    assert not wait(waiting).not_done
    assert waiting[-1].cancelled() and not waiting[0].cancelled()
    lost = executor.submit(os._exit, 1).exception()
    assert isinstance(lost, BrokenExecutor), "after it began again some times"
    with pytest.raises(InvalidInput, match="ray://HOST"):
        RayExecutor("spark")


def _refuses() -> None:
    raise NotFound("it is not there")


def test_a_check_on_ray_finds_what_threads_find(tmp_path: Path, executor: RayExecutor) -> None:
    place = make_store(tmp_path / "store", steps=5, states=large_state)
    flip(next(path for path in files(place, "packs") if path.suffix != ".2"), 100)
    with ckptstore.open(place) as store:
        wanted = store.fsck(read_data="all")
        assert wanted.damaged
        assert store.on(executor).fsck(read_data="all") == wanted


def test_workers_that_are_killed_cost_nothing(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidated, "TASK_BYTES", 1 << 16)
    place = make_store(tmp_path / "store", steps=KILLS + 1, states=large_state)
    with ckptstore.open(place) as store, Killing(tmp_path / "marks") as executor:
        report = store.on(executor).fsck(read_data="all")
        assert report == store.fsck(read_data="all")
        done = store.on(executor).export("main@2", tmp_path / "got.safetensors")
        wanted = export(store.checkout("main@2"), tmp_path / "wanted.safetensors")
        assert done.files[0].read_bytes() == wanted.files[0].read_bytes()
    killed = len(os.listdir(tmp_path / "marks"))
    print(f"{killed} workers were killed")
    assert killed > KILLS / 2


@pytest.fixture
def _small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ENTRY_BYTES", 1)
    monkeypatch.setattr(compaction, "RUN_BYTES", 1 << 18)


@pytest.mark.usefixtures("_small_items")
def test_chunks_move_on_ray_whatever_workers_die(tmp_path: Path, cluster: str) -> None:
    place, there = made(tmp_path / "store"), tmp_path / "there"
    with ckptstore.open(place) as store, Killing(tmp_path / "marks") as executor:
        on = store.on(executor)
        assert work(store, on, there, "push").sent
        assert work(store, on, there, "compact").chunks
    assert os.listdir(tmp_path / "marks")
    for verb in ("compact", "push"):
        finish(place, there, verb, None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_small_items")
def test_many_workers_and_drivers_that_are_killed_cost_nothing(
    tmp_path: Path, cluster: str
) -> None:
    """Half of the kills are of workers, which Ray replaces; the others are of drivers, after which
    the next run finishes."""
    template = made(tmp_path / "template")
    env, marks, drivers = {**os.environ, "RAY_ADDRESS": cluster}, tmp_path / "marks", 0
    marks.mkdir()
    while len(os.listdir(marks)) + drivers < MANY_KILLS:
        verb = Random().choice(["compact", "gc", "push"])
        place, there = tmp_path / "store", tmp_path / "there"
        shutil.copytree(template, place)
        if len(os.listdir(marks)) <= drivers:
            with ckptstore.open(place) as store, Killing(marks, every=2) as executor:
                work(store, store.on(executor), there, verb)
        else:
            command = [sys.executable, "-m", "tests.engine.killing", str(place), str(there), verb]
            with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as driver:
                writes = (there if verb == "push" else place) / "sessions"
                while driver.poll() is None and not (writes.is_dir() and os.listdir(writes)):
                    time.sleep(0.01)
                time.sleep(Random().uniform(0.0, 1.0))
                drivers += driver.poll() is None
                driver.kill()
        assert_sound(place)
        finish(place, there, verb, None)
        for folder in (place, there):
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(os.listdir(marks))} workers and {drivers} drivers were killed")


def test_a_driver_that_is_killed_costs_nothing(tmp_path: Path, cluster: str) -> None:
    """By the command, as users run it; and the next one ends."""
    place, out = tmp_path / "store", tmp_path / "out"
    with ckptstore.open(place) as store:
        store.commit({"model": torch.randn(1 << 20)}, step=1)
    env = {**os.environ, "RAY_ADDRESS": cluster}
    checks = ["fsck", "--read-data", "--on", "ray"]
    exports = ["export", "1", str(out), "--on", "ray", "--shard-size", "1MiB"]
    command = [sys.executable, "-m", "ckptstore", "-s", str(place)]
    for words in [checks, exports] * KILLS:
        with subprocess.Popen(
            [*command, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as driver:
            time.sleep(Random().uniform(1.0, 8.0))
            driver.kill()
        assert place.exists()
    done = subprocess.run([*command, *checks], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no damage" in done.stdout
    if not out.exists():
        done = subprocess.run([*command, *exports], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(tmp_path)) == ["out", "store"], "what was left is gone"
    with ckptstore.open(place) as store:
        wanted = export(store.checkout(1), tmp_path / "w.safetensors").files[0]
    (got,) = out.iterdir()
    assert got.read_bytes() == wanted.read_bytes()


def test_no_cluster_is_an_error_that_says_so(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    command = [sys.executable, "-m", "ckptstore", "-s", str(tmp_path / "store"), "fsck", "--on"]
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    for engine in ("ray", "ray://127.0.0.1:1"):
        done = subprocess.run([*command, engine], env=env, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"no Ray cluster answers at {engine}" in done.stderr
