"""Trainings on several hosts resume what they have acknowledged, or what the mirror has."""

from pathlib import Path
from shutil import rmtree

import pytest

from tests.hosts.lives import play


def test_a_training_survives_the_loss_of_hosts(tmp_path: Path) -> None:
    assert {"partners", "replaced"} <= play(tmp_path, seed=18, lives=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_1000_lives_on_many_hosts(tmp_path: Path) -> None:
    happened: set[str] = set()
    for seed in range(200):
        (folder := tmp_path / str(seed)).mkdir()
        happened |= play(folder, seed, lives=5)
        rmtree(folder)
    assert {"lost", "replaced", "away", "came", "damaged", "partners"} <= happened
