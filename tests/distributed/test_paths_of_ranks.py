"""What ranks have under one key in different shapes has one path for each leaf, in every view."""

from pathlib import Path
from typing import Any

import ckptstore
from tests.distributed.layouts import group_of, meet
from tests.distributed.pool import Pool

HAD: dict[str, list[Any]] = {
    "nothing and two": [{}, [b"1", b"2"]],
    "nothing and one": [{}, [b"1"]],
    "one and two": [[b"0"], [b"1", b"2"]],
    "deeper": [{"a": [b"0"]}, {"a": {"b": {"c": b"1"}}}],
    "keys that look alike": [{"1": b"0", "x": b"x"}, {1: b"1", "x": b"x"}],
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
            assert all(isinstance(snapshot.read(path), bytes) for path in paths)
        second = whole.of_rank(1)
        assert [second.read(f"nothing and two/{n}") for n in (0, 1)] == [b"1", b"2"]
        assert second.read("nothing and one/0") == b"1"
        assert whole.read("nothing and one/1/0") == b"1"
        assert second.read("deeper/a/b/c") == b"1"
        assert whole.read("keys that look alike/1") == b"0"
        assert whole.read("keys that look alike/%int:1") == b"1"
