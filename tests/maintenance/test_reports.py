"""Plans and reports: `repr` is a line, `str` a readable page."""

from pathlib import Path

import pytest

import ckptstore
from tests.maintenance.stores import files, flip, make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with forgotten commits."""
    place = make_store(tmp_path_factory.mktemp("reports") / "store", steps=5)
    with ckptstore.open(place) as opened:
        opened.forget(ckptstore.KeepLast(2))
    return place


def test_every_report_is_a_line_or_a_page(store: Path, tmp_path: Path) -> None:
    with ckptstore.open(store) as opened:
        usage, forget = opened.usage(), opened.forget(ckptstore.KeepLast(3), dry_run=True)
        sent = opened.push(tmp_path / "mirror", create=True)
        planned = opened.gc(dry_run=True, grace_s=0)
        done = opened.gc(grace_s=0)
        flip(files(store, "commits")[0], 40)
        found, repair = opened.fsck(), opened.repair()
        checks = opened.doctor()
    pages = (
        (usage, "exclusive"),
        (forget, "last 1 of 3"),
        (sent, "sent "),
        (sent.plan, ""),
        (planned, "purge "),
        (planned.plan, "frees "),
        (done, "freed "),
        (found, "damaged: "),
        (repair, "would: put back commits/"),
        (repair.plan, ""),
        (checks[0], "write: ok"),
    )
    for report, words in pages:
        assert "\n" not in repr(report)
        assert len(repr(report)) < 200
        assert words in str(report)
