"""Checks and exports on Ray's workers, which are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from ckptstore.plugins.engine import consolidated
from ckptstore.plugins.engine.ray_executor import RayExecutor
from tests.maintenance.stores import files, flip, large_state, make_store
from tests.support.guard import sitecustomize as guard

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
    pytest.mark.pickles,  # Ray sends everything as pickles
]

KILLS = int(os.environ.get("CKPTSTORE_TEST_ENGINE_KILLS", "2"))


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


class Killing(RayExecutor):
    """Every third task ends with the death of its worker, the first time."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self._marks, self._count = marks, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._count += 1
        if self._count % 3:
            return super().submit(fn, *args, **kwargs)
        return super().submit(_dies_once, str(self._marks / str(self._count)), fn, args)


def _dies_once(mark: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Do the work; the first time, die before anybody is told."""
    result = fn(*args)
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return result
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def test_workers_that_are_killed_cost_nothing(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidated, "TASK_BYTES", 1 << 16)
    (tmp_path / "marks").mkdir()
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
