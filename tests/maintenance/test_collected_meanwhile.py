"""A gc between two steps of `fsck` or `repair`: removed objects are not reported as damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import pack_key
from ckptstore.maintenance import Progress
from ckptstore.maintenance.check import Level, Report, Severity, Share
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.maintenance.repair import repair
from tests.maintenance.collecting import collected, make, opened, verify
from tests.maintenance.stores import check, files, flip

STEPS, FORGOTTEN = 5, (0, 1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make(tmp_path / "store", STEPS, forget=FORGOTTEN)
    return tmp_path / "store"


def _once(stage: str, act: Callable[[], object]) -> Progress:
    """Progress that does `act` when `stage` is reached for the first time."""
    done: list[str] = []

    def progress(reached: str, _done: int, _total: int) -> None:
        if reached == stage and not done:
            done.append(stage)
            act()

    return progress


def _alarms(report: Report) -> list[str]:
    return [finding.what for finding in report.findings if finding.severity is not Severity.NOTE]


def _commit(store: Path) -> None:
    with ckptstore.open(store) as other:
        other.commit({"n": 1}, step=50)


@pytest.mark.parametrize("stage", ["commits", "packs", "data"])
@pytest.mark.parametrize("act", [collected, _commit])
def test_fsck_does_not_report_what_others_did_meanwhile(
    store: Path, stage: str, act: Callable[[Path], object]
) -> None:
    with open_offline_store(store) as offline_store:
        report = fsck(
            offline_store,
            level=Level.DATA,
            share=Share(),
            progress=_once(stage, lambda: act(store)),
        )
    assert _alarms(report) == []


def test_fsck_still_reports_what_is_damaged_when_others_collect(store: Path) -> None:
    with opened(store) as handle:
        kept = handle.log.replay().packs[max(handle.log.replay().packs) - 1]
    flip(store / pack_key(kept.id), 5)
    with open_offline_store(store) as offline_store:
        report = fsck(
            offline_store,
            level=Level.DATA,
            share=Share(),
            progress=_once("commits", lambda: collected(store)),
        )
    assert _alarms(report)


def test_a_repair_whose_damaged_pack_is_collected_meanwhile_plans_anew(store: Path) -> None:
    with opened(store) as handle:
        forgotten = next(
            pack
            for number, pack in sorted(handle.log.replay().packs.items())
            if number > 1 and not pack.metadata
        )
    flip(store / pack_key(forgotten.id), 5)
    with open_offline_store(store) as offline_store:
        done = repair(
            offline_store,
            apply=True,
            share=Share(),
            progress=_once("repair", lambda: collected(store)),
        )
    assert not done.after.damaged
    verify(store, range(2, STEPS))
    assert check(store, Level.DATA, Share()).findings == ()


def test_what_only_the_chunk_index_knows_is_saved(store: Path) -> None:
    """The footers are gone, and with the index, which a restore goes by, the chunks were found
    before."""
    for path in files(store, "packs"):
        path.write_bytes(path.read_bytes()[:-200] + bytes(200))
    verify(store, range(2, STEPS))
    with open_offline_store(store) as offline_store:
        done = repair(offline_store, apply=True, share=Share())
    assert not done.after.damaged
    verify(store, range(2, STEPS))
    assert check(store, Level.DATA, Share()).findings == ()
