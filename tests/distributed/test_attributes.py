"""Attributes of divided tensors come back with them, or the commit is refused by name, as those of
plain tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from tests.distributed.layouts import full, group_of, layout, local, meet, quietly, sharded
from tests.distributed.pool import Pool, RankFailed

ATTRIBUTES = {"partition_dim": 0, "stage": ["a", 1]}


def tensors_of(n: int, tensor: torch.Tensor) -> dict[str, Any]:
    rows = layout("rows", tensor, n)
    return {
        "rows": rows,
        "parameter": torch.nn.Parameter(layout("rows", tensor, n)),
        "replicate": layout("replicate", tensor, n),
        "sharded": sharded(tensor, n),
    }


def commit(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    state = {"x": tensors_of(n, full())}
    for tensor in state["x"].values():
        vars(tensor).update(ATTRIBUTES)
    with ckptstore.open(path) as store:
        store.commit(state, step=n, ranks=ckptstore.Ranks(process_group=group_of(n)))


def restore(rank: int, path: Path, committed: int, n: int) -> list[Any]:
    meet(n)
    if rank >= n:
        return []
    state = {"x": tensors_of(n, torch.zeros_like(full()))}
    before = dict(state["x"])
    wanted = tensors_of(n, full())
    with ckptstore.open(path) as store:
        store.checkout(committed).restore(state, ranks=ckptstore.Ranks(process_group=group_of(n)))
    for name, tensor in state["x"].items():
        assert tensor is before[name], name
        assert torch.equal(local(tensor), local(wanted[name])), name
    return [{key: vars(each).get(key) for key in ATTRIBUTES} for each in state["x"].values()]


@pytest.mark.parametrize(("committed", "n"), [(1, 2), (2, 1), (2, 2)])
def test_attributes_of_divided_tensors_come_back_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, committed: int, n: int
) -> None:
    pool.run(quietly, commit, tmp_path / "store", committed)
    found = pool.run(quietly, restore, tmp_path / "store", committed, n)
    assert found[:n] == [[ATTRIBUTES] * 4] * n
    with ckptstore.open(tmp_path / "store") as store:
        read = store.checkout(committed).state_dict("x")
    for tensor in read.values():
        assert {key: vars(tensor)[key] for key in ATTRIBUTES} == ATTRIBUTES
        assert torch.equal(tensor, full())


def commit_one(rank: int, path: Path, name: str, own: str) -> None:
    meet(2)
    if rank >= 2:
        return
    tensor = tensors_of(2, full())[name]
    vars(tensor)["hook"] = {"object": print, "rank": rank, "one": "only"}[own]
    if own == "one" and rank:
        del vars(tensor)["hook"]
    with ckptstore.open(path) as store:
        store.commit({"x": {"w": tensor}}, step=1, ranks=ckptstore.Ranks(process_group=group_of(2)))


@pytest.mark.parametrize("name", ["rows", "parameter", "sharded"])
@pytest.mark.parametrize("own", ["object", "rank", "one"])
def test_an_attribute_that_divided_tensors_cannot_keep_is_refused_by_name(
    pool: Pool, tmp_path: Path, name: str, own: str
) -> None:
    with pytest.raises(RankFailed, match=r"x/w.*hook"):
        pool.run(quietly, commit_one, tmp_path / "store", name, own)


def test_a_tensor_that_each_rank_has_whole_keeps_what_each_set(pool: Pool, tmp_path: Path) -> None:
    pool.run(quietly, commit_one, tmp_path / "store", "replicate", "rank")
    with ckptstore.open(tmp_path / "store") as store:
        read = store.checkout(1).state_dict("x")["w"]
    assert [(each.hook, torch.equal(each, full())) for each in read.values()] == [
        (0, True),
        (1, True),
    ]
