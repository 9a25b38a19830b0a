"""What every test gets: one printed seed for all randomness, the profile Hypothesis runs with, no pickle that it did not ask for."""

import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from tests.guard import sitecustomize as guard
from tests.servers.postgres import PostgresServer, postgres_server
from tests.servers.s3 import S3Server, s3_server
from tests.showing import Showing

SEED = int(os.environ.setdefault("CKPTSTORE_TEST_SEED", str(secrets.randbelow(2**32))))  # set: the workers of pytest-xdist draw the same

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("CKPTSTORE_TEST_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    config.pluginmanager.register(Showing(config))
    folders = [str(Path(guard.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def pytest_report_header() -> str:
    return f"seed: {SEED} (CKPTSTORE_TEST_SEED={SEED} repeats this run)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the run's seed and the test's name, so that a test alone draws what it drew in the suite."""
    return crc32(f"{SEED} {request.node.nodeid}".encode())


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(autouse=True)
def _no_pickle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only a test marked `pickles` may pass allow_pickle=True; whoever else came near a pickle, in whatever process, fails the test."""
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
