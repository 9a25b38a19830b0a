"""Trainings by Lightning that are killed at random moments of their saves end as if they had not
been."""

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests.trainers.trainings import ended_bit_equal, trained

TRAINING = "tests.trainers.lightning_training"
KINDS = [("sync", 1), ("async", 1), ("async", 2)]


def folder(tmp_path: Path, name: str, **settings: Any) -> Path:
    found = tmp_path / name
    found.mkdir()
    (found / "settings.json").write_text(json.dumps(settings))
    return found


def check(tmp_path: Path, seed: int, kills: int, ranks: int, **settings: Any) -> None:
    files = {"settings.json": json.dumps(settings)}
    draw = random.Random(seed)
    fate = ended_bit_equal(TRAINING, tmp_path, kills, draw, ranks, saves=(2, 6), **files)
    assert fate.resumed


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("plugin", "ranks"), [("async", 1), ("sync", 2)])
def test_a_killed_training_ends_bit_equal(
    tmp_path: Path, seed: int, plugin: str, ranks: int
) -> None:
    check(tmp_path, seed, 2, ranks, plugin=plugin, epochs=14)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("plugin", "ranks"), KINDS)
def test_twenty_kills_lose_nothing(tmp_path: Path, seed: int, plugin: str, ranks: int) -> None:
    check(tmp_path, seed, 20, ranks, plugin=plugin, epochs=130)


@pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="the package pytorch_lightning is not installed"
)
def test_the_other_package_trains_as_well(tmp_path: Path) -> None:
    results = [
        trained(TRAINING, folder(tmp_path, package, package=package, epochs=3))
        for package in ("lightning.pytorch", "pytorch_lightning")
    ]
    assert results[0] == results[1]


@pytest.mark.timeout(240)
def test_sharded_checkpoints_go_to_the_store_within_redirect(tmp_path: Path) -> None:
    first, second = trained("tests.trainers.lightning_sharded_training", tmp_path, 2)
    assert first["store"] == first["files"] and second["store"] == second["files"]
    assert first["store"] != second["store"], "the ranks have shards of their own"
    assert {path.name for path in (tmp_path / "out" / "last.ckpt").iterdir()} == {
        ".metadata",
        "meta.pt",
    }
    with ckptstore.open(tmp_path / "store") as store:
        state = store.checkout(tmp_path / "out" / "last.ckpt").state_dict("state_dict")
    assert state["layers.0.weight"].shape == (40, 16)
