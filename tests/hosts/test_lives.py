"""Trainings on several hosts resume what they have acknowledged, or what the mirror has."""

from pathlib import Path
from shutil import rmtree

import pytest

from tests.hosts.lives import play
from tests.support.mounts import small_disk_problem
from tests.support.servers.s3 import S3Server


def test_a_training_survives_a_full_host_and_the_loss_of_hosts(tmp_path: Path) -> None:
    happened = play(tmp_path, seed=2, lives=3)
    assert "replaced" in happened and ("full" in happened or small_disk_problem())


def test_a_host_that_was_cut_off_changes_nothing_any_more(tmp_path: Path) -> None:
    assert "cut off" in play(tmp_path, seed=7, lives=3)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_500_scenarios(tmp_path: Path, s3: S3Server) -> None:
    happened: set[str] = set()
    for seed in range(500):
        (folder := tmp_path / str(seed)).mkdir()
        happened |= play(folder, seed, lives=3, bucket=s3 if seed % 3 == 0 else None)
        rmtree(folder)
    assert happened == {
        *("killed", "ended", "refused", "cut off", "nothing"),
        *("lost", "replaced", "away", "came", "damaged", "partners"),
        *("silent", "full", "mirror away"),
    }
