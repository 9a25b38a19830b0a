"""However a script ends, its last commit is made or cleanly absent, and who waits for it is
told."""

import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from tests.support.fork_server import ROOT

CODES = {"the end": 0, "an exception": 1, "Ctrl-C": -2}
"""Ways to end, and the exit code of each."""

FAILURE = "thread: a failure"
KINDS = ("thread", "process", "lazy")
WAYS = {f"{kind}: {way}": code for kind in KINDS for way, code in CODES.items()} | {
    "thread: sys.exit": 3,
    FAILURE: 0,
}


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """The scripts of the tests that run, ended, with their exit codes."""
    folder = tmp_path_factory.mktemp("exits")
    wanted = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    ways = [way for way in WAYS if way in wanted or way == FAILURE]
    done = subprocess.run(
        [sys.executable, "-m", "tests.commit.exits", str(folder), *ways],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return folder, {
        way: int(code) for way, code in (line.split("\t") for line in done.stdout.splitlines())
    }


@pytest.mark.parametrize("way", [way for way in WAYS if way != FAILURE])
def test_an_exit_waits_for_the_commit_in_flight_and_says_so(
    ended: tuple[Path, dict[str, int]], way: str
) -> None:
    folder, codes = ended
    said = Path(folder, f"{way}.err").read_text()
    assert codes[way] == WAYS[way], said
    assert "waiting for the commit of step 1" in said
    with ckptstore.open(folder / way) as store:
        store.checkout(1).verify()


def test_a_failure_that_nobody_saw_is_told_at_the_end(ended: tuple[Path, dict[str, int]]) -> None:
    folder, codes = ended
    said = Path(folder, f"{FAILURE}.err").read_text()
    assert codes[FAILURE] == WAYS[FAILURE], said
    assert "failed: " in said and "sessions" in said
