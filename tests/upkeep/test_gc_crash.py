"""A gc that ends after any of its changes loses nothing, and the next one leaves no garbage."""

import shutil
from pathlib import Path

import pytest

from ckptstore.access import open
from ckptstore.upkeep.gc import collect
from ckptstore.upkeep.watch import STALE_S
from tests.upkeep.collecting import ALL, Stopped, collected, garbage, make, opened_stopping, verify


def stopped_after(place: Path, changes: int) -> int | None:
    """Run a gc that ends after so many changes; None, or how many a whole one takes."""
    opening, stopping = opened_stopping(place, changes)
    try:
        collect(opening, ALL, clock=lambda: 0.0)
        return stopping.changed
    except Stopped:
        return None
    finally:
        opening.close()


def test_a_gc_may_end_after_any_change(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make(source, 9, forget=[0, 2, 4, 6])
    for changes in range(1_000):
        place = tmp_path / "store"
        shutil.copytree(source, place)
        total = stopped_after(place, changes)
        verify(place, [1, 3, 5, 7, 8])
        for s in (0.0, STALE_S, 2 * STALE_S):
            collected(place, clock=lambda s=s: s)
        assert not garbage(place), f"after change {changes}"
        verify(place, [1, 3, 5, 7, 8])
        shutil.rmtree(place)
        if total is not None:
            assert total == changes
            return


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_a_forget_that_ends_at_any_change_has_happened_or_not(tmp_path: Path, changes: int) -> None:
    from ckptstore.upkeep.forget import forget_by_policy
    from ckptstore.upkeep.retention import KeepLast

    make(tmp_path, 5)
    opening, _ = opened_stopping(tmp_path, changes)
    try:
        forget_by_policy(opening, [KeepLast(2)])
    except Stopped:
        pass
    finally:
        opening.close()
    with open(tmp_path) as store:
        assert len(store.log()) in (2, 5)
    verify(tmp_path, [3, 4])
