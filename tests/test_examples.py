"""The examples run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guard import sitecustomize as guard

FOLDER = Path(__file__).parents[1] / "examples"
MANY_RANKS = FOLDER / "many_ranks.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {MANY_RANKS})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_is(example: Path) -> None:
    run(str(example))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_training_on_many_ranks_survives_a_kill(kind: str) -> None:
    run(str(MANY_RANKS), kind)


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, guard.WHOLE_EXIT: "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
