"""Tensors that are one in the target, under two keys of the application state."""

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_is_tied_across_keys_is_read_once_where_the_commit_has_one_content(
    place: Path,
) -> None:
    with ckptstore.open(place) as store:
        wanted = torch.randn(1000, 300)
        snap = store.commit(
            {"model": {"w": wanted, "n": torch.ones(2)}, "average": {"w": wanted.clone()}}
        )
        shared = torch.zeros(1000, 300)
        target = {"model": {"w": shared, "n": torch.zeros(2)}, "average": {"w": shared}}
        snap.restore(target)
        assert target["model"]["w"] is target["average"]["w"] is shared
        assert torch.equal(shared, wanted)


def test_what_is_tied_across_keys_cannot_be_restored_to_two_contents(place: Path) -> None:
    with ckptstore.open(place) as store:
        snap = store.commit(
            {"model": {"w": torch.ones(3)}, "average": {"w": torch.full((3,), 2.0)}}
        )
        shared = torch.zeros(3)
        for strict in (True, False):
            with pytest.raises(
                InvalidInput,
                match=r"average/w: the commit has a content of its own, the target has one tensor "
                r".* model/w",
            ):
                snap.restore({"model": {"w": shared}, "average": {"w": shared}}, strict=strict)
            assert shared.tolist() == [0, 0, 0]
        snap.restore({"model": {"w": shared}}, strict=False)
        assert shared.tolist() == [1, 1, 1]


def test_modules_that_share_weights_across_keys_are_treated_alike(place: Path) -> None:
    with ckptstore.open(place) as store:
        one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        apart = store.commit({"one": one, "other": other})
        tied = store.commit({"one": one, "other": one})
        module = torch.nn.Linear(3, 3)
        with pytest.raises(InvalidInput, match="other/weight"):
            apart.restore({"one": module, "other": module})
        tied.restore({"one": module, "other": module})
        assert torch.equal(module.weight, one.weight)
