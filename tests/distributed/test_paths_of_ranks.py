"""What ranks have under one key in different shapes has one path for each leaf, in every view."""

from pathlib import Path
from typing import Any

import torch

import ckptstore
from tests.distributed.layouts import group_of, meet
from tests.distributed.pool import Pool

A, B, X = (torch.full((2,), float(n)) for n in range(3))
HAD: dict[str, list[Any]] = {
    "nothing and two": [{}, [A, B]],
    "nothing and one": [{}, [A]],
    "one and two": [[X], [A, B]],
    "deeper": [{"a": [A]}, {"a": {"b": {"c": B}}}],
    "keys that look alike": [{"1": A, "x": X}, {1: B, "x": X}],
}


def commit(rank: int, path: Path) -> None:
    meet(2)
    if rank < 2:
        ranks = ckptstore.Ranks(process_group=group_of(2))
        with ckptstore.open(path) as store:
            store.commit({key: had[rank] for key, had in HAD.items()}, step=1, ranks=ranks)


def test_a_path_names_one_leaf_of_the_commit_and_of_what_each_rank_had(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(commit, tmp_path / "store")
    with ckptstore.open(tmp_path / "store") as store:
        whole = store.checkout(1)
        for snapshot in (whole, whole.of_rank(0), whole.of_rank(1)):
            paths = [leaf.path for leaf in snapshot.leaves()]
            assert len(set(paths)) == len(paths)
            assert all(isinstance(snapshot.read(path), torch.Tensor) for path in paths)
        second = whole.of_rank(1)
        assert same(second, "nothing and two/0", A) and same(second, "nothing and two/1", B)
        assert same(second, "nothing and one/0", A) and same(whole, "nothing and one/1/0", A)
        assert same(second, "deeper/a/b/c", B) and same(whole, "deeper/a/1/b/c", B)
        assert same(whole, "keys that look alike/1", A)
        assert same(whole, "keys that look alike/%int:1", B)


def same(snapshot: ckptstore.Snapshot, path: str, wanted: torch.Tensor) -> bool:
    return torch.equal(snapshot.read(path), wanted)
