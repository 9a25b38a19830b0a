"""The server of children leaves nothing behind, however the tests end."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import ROOT

_TESTS = """
import signal
from tests.support.fork_server import Nursery
nursery = Nursery()
print(nursery.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "group"), [(signal.SIGKILL, False), (signal.SIGINT, True), (signal.SIGTERM, True)]
)
def test_an_interrupted_run_leaves_no_folder(
    tmp_path: Path, how: signal.Signals, group: bool
) -> None:
    """Killed alone, as by a runner's time limit, or with all of its group, as from a terminal."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _TESTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as tests:
        assert tests.stdout
        server = os.pidfd_open(int(tests.stdout.readline()))
        assert list(tmp_path.glob("ckptstore-nursery-*"))
        os.killpg(tests.pid, how) if group else tests.send_signal(how)
    ended, _, _ = select.select([server], [], [], 30)
    os.close(server)
    assert ended, "the server is still there"
    assert not list(tmp_path.iterdir())
