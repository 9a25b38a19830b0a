"""What every test gets: one printed seed for all randomness, and the profile that Hypothesis runs with."""

import os
import random
import secrets
import sys
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

SEED = int(os.environ.get("CKPTSTORE_TEST_SEED", secrets.randbelow(2**32)))

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("CKPTSTORE_TEST_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


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
