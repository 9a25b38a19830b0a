"""What every test gets: one printed seed for all randomness, the profile Hypothesis runs with, no
pickle that it did not ask for."""

import gc
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support import draw
from tests.support.guard import sitecustomize as guard
from tests.support.live_output import Showing
from tests.support.servers.postgres import PostgresServer, postgres_server
from tests.support.servers.s3 import S3Server, s3_server

SEED = int(
    os.environ.setdefault("CKPTSTORE_TEST_SEED", str(secrets.randbelow(2**32)))
)  # set: the workers of pytest-xdist draw the same

DRAW = os.environ.get("CKPTSTORE_TEST_DRAW", "")
"""`make test` sets it: dear tests run with some of their cases. With real servers, each test of
several kinds of places runs at one of them. The seed draws, and this text beside it."""

# Set before torch is imported, and inherited by all processes. An OpenMP thread that waits for work
# spins: with two per process, a third of the CPU time of tests of tensors is spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DISK = os.environ.setdefault("CKPTSTORE_TEST_DISK", tempfile.gettempdir())
MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30
"""Ten times what the suite takes at once."""

# Tests wait for the disk, in fsync above all, for two thirds of their time, and few are about it.
if (
    os.environ.get("CKPTSTORE_TEST_PROFILE") != "soak"
    and MEMORY.is_dir()
    and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
):
    os.environ.setdefault("TMPDIR", str(MEMORY))
    tempfile.tempdir = None  # found anew

ON_DISK = (
    "tests/commit/test_commits.py",
    "tests/core/",
    "tests/faults/",
    "tests/interop/adopt/",
    "tests/restore/",
    "tests/storage/",
    "tests/trainers/",
)
"""Tests of what file systems and their cache do, and of whole trainings, use those of users."""

TOGETHER = {
    "ranks": (
        "tests/distributed/",
        "tests/interop/test_dcp_redirect.py",
        "tests/interop/torchft/test_replicas.py",
        "tests/net/test_ranks.py",
    ),
    "nursery": (
        "tests/crash/",
        "tests/faults/",
        "tests/stress/",
        "tests/commit/test_killed.py",
        "tests/follow/test_killed.py",
        "tests/maintenance/mirror/test_killed.py",
        "tests/maintenance/test_hostile.py",
        "tests/maintenance/test_index_loss.py",
        "tests/maintenance/test_neighbours.py",
    ),
    "fresh": ("tests/state/",),
}
"""What one worker of `make test` runs, by what its tests share: ranks, a fork server, a process
beside pytest's own, each of which imports torch. Other files are on their own."""

APART = ("tests/maintenance/test_gc.py", "tests/shared/test_faults.py", "tests/test_snippets.py")
"""Files whose tests share nothing, and would keep one worker busy when all others have ended: any
worker runs any of them."""

LONGEST = (
    "ranks",
    "nursery",
    "fresh",
    "tests/trainers/test_ray.py",
    "tests/trainers/test_accelerate.py",
    "tests/trainers/test_deepspeed.py",
    "tests/stateful/test_store_machine.py",
    "tests/storage/test_s3.py",
    "tests/maintenance/mirror/test_shared_ends.py",
    "tests/restore/test_budget.py",
    "tests/commit/test_process.py",
    "tests/maintenance/test_bitrot.py",
    "tests/log/test_protocol.py",
    "tests/shared/test_machine.py",
    "tests/interop/test_snapshots.py",
    "tests/cli/test_odd_arguments.py",
    "docs/stories.md",
    "tests/test_first_hour.py",
    "tests/test_site.py",
)
"""These, parts and pages, come first: were one of them the last, the other workers would wait for
it."""

OBJECTS_BETWEEN_COLLECTIONS = 7_000
"""Ten times Python's own. Of the CPU time of 24 tests of mirrors, collections took 0.6 s of 13 s
with 700, and 0.2 s with this. They still come at any line of ours."""

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile(
    "soak",
    deadline=None,
    print_blob=True,
    max_examples=2_000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("CKPTSTORE_TEST_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    config.pluginmanager.register(Showing(config))
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    folders = [str(Path(guard.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # hundreds of Pythons are started: each would compile the package anew
    sys.dont_write_bytecode = False
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # what a shell starts in the background ignores it, and so would all children


OF_THEIR_OWN = {"trainers": "CKPTSTORE_TEST_TRAINERS", "ui/chromium": "CKPTSTORE_TEST_UI"}
"""Folders whose libraries or programs only `make test-trainers` and `make test-ui` prepare, with
what they set."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    for folder, variable in OF_THEIR_OWN.items():
        if collection_path == Path(__file__).parent / folder and variable not in os.environ:
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DRAW:
        left = _left_out([item.nodeid for item in items if not item.get_closest_marker("soak")])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    places = {part: place for place, part in enumerate(LONGEST)}

    def place_of(item: pytest.Item) -> int:
        parameter = item.nodeid.rpartition("[")[2].removesuffix("]")
        return min(places.get(name, len(places)) for name in (part_of(item.nodeid), parameter))

    items.sort(key=place_of)


def _left_out(cases: list[str]) -> set[str]:
    if "CKPTSTORE_TEST_S3" not in os.environ:
        return draw.left_out(cases, f"{SEED} {DRAW}")
    from tests.shared.sites import KINDS  # which imports torch

    return draw.other_places(cases, f"{SEED} {DRAW}", KINDS)


def part_of(nodeid: str) -> str:
    """The part of the suite that a test belongs to, which one worker runs."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return nodeid
    return next((part for part, files in TOGETHER.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = part_of
    return scheduler


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported meanwhile stays, and to look through it again and again takes a sixth of the
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """What has been imported stays. Collections, those that tests ask for and others, look through
    the objects of one module of tests, and not through torch's compiler, moto and all else that is
    there by then: a second each, and hundreds of them."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    drawn = f"; DRAW={DRAW} draws cases of tests that take long; with DRAW= all run" if DRAW else ""
    return f"seed: {SEED} (CKPTSTORE_TEST_SEED={SEED} repeats this run){drawn}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the run's seed and the test's name, so that a test alone draws what
    it drew in the suite."""
    return crc32(f"{SEED} {request.node.nodeid}".encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a device in use, `torch.manual_seed` notes the call for each kind of device, with
        # a formatted stack: more than all else that a small test takes.
        (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(seed)


@pytest.fixture(scope="session")
def _disk() -> Iterator[Path]:
    """A folder on the disk."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-test-", dir=DISK) as place:
        yield Path(place).resolve()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own, or one on the disk."""
    if tempfile.gettempdir() == DISK or not request.node.nodeid.startswith(ON_DISK):
        yield tmp_path
        return
    place = Path(tempfile.mkdtemp(dir=request.getfixturevalue("_disk")))
    yield place
    # Where a test has let calls of `os` fail, they do so here, too; what stays goes at the end.
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _ceiling(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A store that happens to lie above the directories of the tests is none of theirs, nor of the
    processes that they start."""
    base = tmp_path_factory.getbasetemp()
    os.environ["CKPTSTORE_CEILING"] = os.pathsep.join(
        [str(base), str(base.parent), tempfile.gettempdir(), DISK]
    )


@pytest.fixture(autouse=True)
def _no_pickle(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Only a test marked `pickles` may pass allow_pickle=True; whoever else came near a pickle, in
    whatever process, fails the test."""
    report = tmp_path_factory.getbasetemp() / "reached-pickle"
    monkeypatch.setenv(guard.REPORT, str(report))
    if request.node.get_closest_marker("pickles"):
        monkeypatch.setenv(guard.PERMIT, "1")
    yield
    if report.exists():
        reached = report.read_text(encoding="utf-8")
        report.unlink()
        pytest.fail(f"pickles that no test has allowed:\n{reached}", pytrace=False)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One S3 server for all tests; each takes a place of its own there (`new_url`)."""
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for all tests; each takes a database of its own there (`new_url`)."""
    with postgres_server() as server:
        yield server
