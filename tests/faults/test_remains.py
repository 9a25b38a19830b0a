"""What a process leaves that is killed while it writes a file beside the store goes when the next
one writes that file."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import strace
from tests.support.fixtures import store_of
from tests.support.fork_server import Nursery
from tests.support.strace import traced

RENAMES = "rename,renameat,renameat2,link,linkat"
SCENARIOS = ("export", "point", "gc")


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


def deed_of(what: str, place: Path, out: Path) -> tuple[str, dict[str, Any]]:
    if what == "export":
        return "command", {
            "words": ["-s", str(place), "export", "latest", str(out / "x.safetensors")]
        }
    if what == "point":
        return "point", {"place": str(place), "path": str(out / "pointer")}
    return "command", {"words": ["-s", str(place), "gc"]}


@pytest.mark.parametrize("what", SCENARIOS)
def test_nothing_is_left_of_a_file_whose_writer_was_killed(
    what: str, scratch: Path, nursery: Nursery
) -> None:
    place, out = store_of(scratch / "store", 2), scratch / "out"
    out.mkdir()
    scenario, given = deed_of(what, place, out)
    assert not traced(nursery.start(scenario, **given), scratch / "log", calls=RENAMES)
    wanted = sorted(path.name for path in [*out.iterdir(), *(place / "index").iterdir()])
    killed, code = 0, -1
    while code < 0:
        for path in out.glob("[!.]*"):
            path.unlink()
        options = "-e", f"inject={RENAMES}:signal=KILL:when={killed + 1}"
        code = traced(nursery.start(scenario, **given), scratch / "log", *options, calls=RENAMES)
        killed += code < 0
    assert killed, "it renamed nothing"
    child = nursery.run(scenario, **given)
    assert not child.wait()
    assert sorted(path.name for path in [*out.iterdir(), *(place / "index").iterdir()]) == wanted
