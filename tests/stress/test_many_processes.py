"""Many processes commit, restore, forget and collect in one store: what is retained restores, and nobody waits long for others."""

from pathlib import Path

import pytest

from ckptstore.core.ids import CommitId
from tests.crash.works import small
from tests.faults.nursery import Nursery
from tests.faults.witness import assert_no_garbage_after_gc, view_of
from tests.upkeep.collecting import opened

LONGEST_WAIT_S = 1.0
COUNTED = ("committed", "restored", "collected", "forgotten", "conflict")


def _share_a_store(processes: int, seconds: float, scratch: Path, nursery: Nursery, seed: int) -> None:
    place = scratch / "store"
    children = [nursery.start("churn", place=str(place), me=me, everybody=processes, seed=seed, seconds=seconds) for me in range(processes)]
    for child in children:
        child.go()
    codes = [child.wait() for child in children]
    assert codes == [0] * processes, f"seed {seed}: exit codes {codes}"
    waits = sorted(float(s) for child in children for _, s in child.reports("waited"))
    counts = {kind: sum(len(child.reports(kind)) for child in children) for kind in COUNTED}
    wait_s = waits[len(waits) * 99 // 100]
    print(f"{processes} processes, {seconds:.0f} s: {counts}; 99 % of {len(waits)} waits <= {wait_s:.3f} s, all <= {waits[-1]:.3f} s")
    assert counts["restored"] >= processes and counts["committed"] >= processes
    assert wait_s < LONGEST_WAIT_S, f"seed {seed}"
    _check_what_is_left(place, [int(step) for child in children for step, _ in child.reports("committed")])


def _check_what_is_left(place: Path, steps: list[int]) -> None:
    with opened(place) as opening:
        rows = opening.log.replay().commits
    assert {row.step for row in rows.values()} <= set(steps)
    contents: dict[CommitId, dict[str, object]] = {commit: small(row.step or 0) for commit, row in rows.items()}
    assert {name for name, _ in view_of(place).tags if name.startswith("keep-")}
    assert_no_garbage_after_gc(place, contents)


def test_three_processes_share_a_store(scratch: Path, nursery: Nursery, seed: int) -> None:
    _share_a_store(3, 6.0, scratch, nursery, seed)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_eight_processes_share_a_store_for_a_minute(scratch: Path, nursery: Nursery, seed: int) -> None:
    _share_a_store(8, 60.0, scratch, nursery, seed)
