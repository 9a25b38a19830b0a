"""Machines of forks, interrupts and `close` (`tests/net/forks.py`), in a process of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 150.0
"""Longer than a machine takes on busy cores, and than a child that hangs lives."""


@pytest.mark.parametrize("seconds", [8, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_forks_interrupts_and_close_lose_nothing_and_hang_nowhere(
    seed: int, seconds: int, tmp_path: Path
) -> None:
    """A failure names the machine's seed and the command that runs it alone."""
    command = [sys.executable, "-m", "tests.net.forks", f"{seed}", f"{seconds}"]
    root, cache = Path(__file__).parents[2], tmp_path / "cache"
    with subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "CKPTSTORE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=seconds + PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGABRT)  # tells the stacks of all threads
            told, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            _end(process.pid)
    assert process.returncode == 0, told[-20_000:]
    print(told.splitlines()[-1])


def _end(group: int) -> None:
    """End what the machines have left running."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
