"""Where ranks have values of different kinds under one path, each keeps its own, under paths that
every reader makes alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from tests.distributed.layouts import meet
from tests.distributed.pool import Pool

LARGE = torch.arange(40_000, dtype=torch.int32)


def kinds(rank: int) -> dict[str, Any]:
    """A list, a text, a tensor and an empty dict; lists of one and of no item; a parameter."""
    of_rank: list[Any] = [[LARGE, 3], "text", LARGE + 1, {}]
    lists: list[Any] = [{}, [LARGE], {}, [LARGE + 1, {"a": LARGE + 2}]]
    weight = torch.nn.Parameter(torch.ones(200))
    return {
        "k": of_rank[rank],
        "l": lists[rank],
        "one": [LARGE] if rank == 1 else {},
        "two": [LARGE, LARGE + 1] if rank == 1 else {},
        "p": [weight] if rank else {"w": weight},
        "own": [[rank], {"n": rank}],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def paths(value: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors below a value, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, str | int):
        return {}
    below = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for name, each in below for k, v in paths(each, f"{path}/{name}").items()}


def emptied(value: Any) -> Any:
    """Objects like those of a value, with zeros in the tensors."""
    if isinstance(value, dict):
        return {name: emptied(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(emptied, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def commit_and_restore(rank: int, path: Path, private: list[str]) -> list[str]:
    """Returns what came back other than it was committed."""
    meet(4)
    wrong = []
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        snapshot = store.commit({"x": kinds(rank)}, step=1, ranks=ckptstore.Ranks(private=private))
        for i in range(4):
            own = snapshot.of_rank(i)
            if not same(kinds(i), own.state_dict("x")):
                wrong.append(f"the state of rank {i}")
            wanted = paths(kinds(i), "x")
            found = {leaf.path for leaf in own.leaves() if leaf.kind == "tensor"}
            if found != wanted.keys():
                wrong.append(f"the paths of rank {i}: {found}")
            wrong += [name for name in found if not torch.equal(own.read(name), wanted[name])]
        for leaf in snapshot.leaves():
            if leaf.kind == "tensor":
                snapshot.read(leaf.path)
        state = {"x": emptied(kinds(rank))}
        snapshot.restore(state)
        wrong += [] if same(state["x"], kinds(rank)) else ["what was restored"]
    return wrong


@pytest.mark.parametrize("private", [[], ["x/*"]])
def test_each_rank_keeps_what_it_had_under_the_path_that_it_had(
    pool: Pool, tmp_path: Path, private: list[str]
) -> None:
    assert pool.run(commit_and_restore, tmp_path / "store", private) == [[]] * 4
