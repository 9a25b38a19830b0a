"""`make test-real`: the shared store's tests on real servers, Ceph's S3 gateway and Debian's
PostgreSQL, installed if need be.

Ends with the tests' exit code, or with 1 and the reason where the servers cannot be had.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.servers.rgw import missing_programs, rgw_server
from tests.support.servers.s3 import make_bucket

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "postgresql")
SUITES = (
    "tests/storage/test_s3.py",
    "tests/maintenance/mirror/test_shared_ends.py",
    "tests/maintenance/test_gc_crash.py",
    "tests/shared",
    "tests/maintenance/test_grace.py",
    "tests/maintenance/test_gc.py",
)
ALONE = "tests/shared/test_rgw.py"
"""Kills gateways of its own, again and again: by itself, so that they are back within deadlines."""

LEFT_OUT = "memory"
"""What has nothing to do with the servers."""


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    if problem := _install():
        print(f"test-real: cannot run: {problem}", file=sys.stderr)
        return 1
    postgres = _postgres()
    assert postgres is not None
    with rgw_server() as rgw:
        make_bucket(rgw.server)  # here: workers would make it at once
        print(
            f"test-real: Ceph RGW at {rgw.server.endpoint}, PostgreSQL from {postgres} "
            f"({time.monotonic() - started:.0f} s to start)"
        )
        environment = {
            **os.environ,
            "CKPTSTORE_TEST_S3": rgw.server.endpoint,
            "CKPTSTORE_TEST_S3_KEY": rgw.server.key,
            "CKPTSTORE_TEST_S3_SECRET": rgw.server.secret,
            "CKPTSTORE_TEST_POSTGRES_BIN": str(postgres),
        }
        pytest = [sys.executable, "-m", "pytest", "-k", f"not {LEFT_OUT}", "--timeout", "120"]
        runs = [*SUITES, "--ignore", ALONE, *arguments], [ALONE]
        codes = [
            subprocess.run([*pytest, *run], env=environment, check=False).returncode for run in runs
        ]
        return max(codes)


def _install() -> str:
    """Install what is missing; why that cannot be done, or nothing."""
    if not missing_programs() and _postgres():
        return ""
    if os.getuid():
        return f"{', '.join(PACKAGES)} are not installed, and only root may install them"
    if shutil.which("apt-get") is None:
        return (
            f"{', '.join(PACKAGES)} are not installed, and there is no apt-get to install them with"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    left = [*missing_programs(), *([] if _postgres() else ["postgres"])]
    return f"{', '.join(left)} are missing after the installation" if left else ""


def _postgres() -> Path | None:
    """The folder of Debian's binaries, the newest."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[4])
    )
    return found[-1].parent if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
