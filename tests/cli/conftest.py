"""A small store with all that the commands tell apart."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore

LEAVES = 700
"""Enough for `ls` to fill the buffer of a pipe."""


def _state() -> dict[str, Any]:
    model = {f"layers.{i}.weight": torch.full((4, 64), float(i)) for i in range(50)}
    model["embedding"] = torch.arange(300_000, dtype=torch.float32)
    model["head"] = model["embedding"]
    metrics = {f"counter.number_{i}.of_many": torch.tensor(float(i)) for i in range(LEAVES - 52)}
    return {
        "model": model,
        "counters": metrics,
        "progress": {"epoch": 0, "lr": 0.001, "seed": 2**60, "text": "a\x1b[31mb"},
    }


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `main`: steps 100, 200, 300 (tag `best`); run `tune`, from main's step 200: 210 (tags
    `prod`, `tune/first`) and 220."""
    place = tmp_path_factory.mktemp("stores") / "checkpoints"
    state = _state()
    with ckptstore.open(place) as store:
        for step in (100, 200, 300):
            state["model"]["embedding"][step] = -1
            state["progress"]["epoch"] = step // 100
            state["progress"]["lr"] *= 0.5
            metrics = {
                "loss": 100 / step,
                "accuracy": step / 1000,
                "val_loss": math.nan if step == 300 else 1.0,
            }
            message = "first line\x1b]0;title\x07\nsecond line" if step == 200 else ""
            store.commit(
                state,
                step=step,
                metrics=metrics,
                message=message,
                tag="best" if step == 300 else (),
            )
    with ckptstore.open(place, run="tune") as store:
        store.checkout("main@200").restore(state)
        for step in (210, 220):
            state["lora"] = {"a": torch.full((step, 8), 1.0)}
            store.commit(
                state,
                step=step,
                metrics={"loss": math.inf},
                tag=("prod", "tune/first") if step == 210 else (),
            )
    return place


@pytest.fixture
def store(made_store: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made_store, tmp_path / "checkpoints"))
