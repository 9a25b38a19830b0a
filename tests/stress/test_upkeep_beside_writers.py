"""`fsck` and `repair` of a sound store in which others commit, forget and collect: no false alarm,
and nothing is repaired."""

import os
from pathlib import Path

import pytest

from ckptstore.maintenance.check import Level, Report, Severity
from tests.maintenance.collecting import opened
from tests.maintenance.stores import check, heal
from tests.support.checker import assert_no_garbage_after_gc
from tests.support.fork_server import Nursery
from tests.support.workloads import small

FEW = 6
MANY = int(os.environ.get("CKPTSTORE_TEST_BUSY_FSCKS", "200"))
IN_ONE_STORE = 20
"""So many runs of fsck until another store takes its turn: what is kept and the log only grow, and
each run reads them from the start."""
REPAIRS = 4
"""Every so many runs of fsck are followed by a repair."""

_LONGER_THAN_ANY_TEST_S = 3600.0


def _alarms(report: Report) -> list[str]:
    return [finding.what for finding in report.findings if finding.severity is not Severity.NOTE]


def _look(place: Path, runs: int, nursery: Nursery, seed: int, *, churners: int) -> None:
    children = [
        nursery.start(
            "churn",
            place=str(place),
            me=me,
            everybody=churners,
            seed=seed,
            seconds=_LONGER_THAN_ANY_TEST_S,
        )
        for me in range(churners)
    ]
    for child in children:
        child.go()
    found: list[str] = []
    try:
        while not all(child.reports("committed") for child in children):
            assert all(child.alive() for child in children)
        for run in range(runs):
            found += _alarms(check(place, Level.DATA if run % 2 else Level.PACKS))
            if run % REPAIRS == 0:
                done = heal(place, data=False)
                found += [*_alarms(done.before), *_alarms(done.after), *map(str, done.applied)]
    finally:
        for child in children:
            child.kill()
    counts = {
        kind: sum(len(child.reports(kind)) for child in children)
        for kind in ("committed", "forgotten", "collected")
    }
    beside = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(
        f"{runs} runs of fsck, {-(-runs // REPAIRS)} of repair, beside {churners} processes "
        f"({beside}): {len(found)} alarms; seed {seed}"
    )
    assert found == []
    assert counts["committed"] > churners
    with opened(place) as handle:
        rows = handle.log.replay().commits
    assert_no_garbage_after_gc(
        place, {commit: small(row.step or 0) for commit, row in rows.items()}
    )


def test_maintenance_beside_writers_raises_no_false_alarm(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    _look(scratch / "store", FEW, nursery, seed, churners=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hundreds_of_runs_beside_writers_raise_no_alarm(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    for done in range(0, MANY, IN_ONE_STORE):
        runs = min(IN_ONE_STORE, MANY - done)
        _look(scratch / f"store-{done}", runs, nursery, seed + done, churners=3)
