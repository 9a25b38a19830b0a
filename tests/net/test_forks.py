"""Machines of forks, interrupts and `close` (`tests/net/forks.py`), in a process of their own."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PATIENCE_S = 150.0
"""Longer than a machine takes on busy cores, and than a child that hangs lives."""


@pytest.mark.parametrize("seconds", [4, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_forks_interrupts_and_close_lose_nothing_and_hang_nowhere(
    seed: int, seconds: int, tmp_path: Path
) -> None:
    """A failure names the machine's seed and the command that runs it alone."""
    command = [sys.executable, "-m", "tests.net.forks", f"{seed}", f"{seconds}"]
    root, cache = Path(__file__).parents[2], tmp_path / "cache"
    told = tmp_path / "told"
    with told.open("w") as output:  # no pipe, which children that hang would keep open
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "CKPTSTORE_CACHE": str(cache)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds + PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # tells the stacks of all threads
            code = process.wait(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):  # what the machines have left running
                os.killpg(process.pid, signal.SIGKILL)
    text = told.read_text()
    assert code == 0, text[-20_000:]
    print(text.splitlines()[-1])
