"""What a new user types works, and what goes wrong explains itself, as docs/first-hour.md shows."""

import subprocess
import sys

import pytest

from tests.cli.running import environment
from tests.support.first_hour import PAGE, THINGS, WRONG_TURNS, without_chance


@pytest.mark.pickles  # of torch.save, which torch.load reads without running code
@pytest.mark.docs
def test_the_page_of_the_first_hour_is_what_a_run_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.first_hour", "--print"],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=PAGE.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = PAGE.read_text(encoding="utf-8")
    assert without_chance(done.stdout) == without_chance(written), (
        "run `python -m tests.support.first_hour`"
    )
    assert (len(THINGS), len(WRONG_TURNS)) == (20, 9)
