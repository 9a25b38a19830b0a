"""A rank that waits logs the missing ranks long before the timeout."""

import logging
from pathlib import Path
from time import monotonic

import pytest
import torch.distributed as dist

import ckptstore
from tests.distributed.pool import Pool

TIMEOUT_S = 4.0
"""Long enough for a busy machine, which may take a second before a notice is logged."""


def commit_in_vain(path: Path, group: object) -> tuple[list[str], str]:
    """The log records from the first half of the wait, and the error."""
    said: list[tuple[float, str]] = []
    handler = logging.Handler()
    # the shortest handler
    handler.emit = lambda record: said.append((monotonic(), record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("ckptstore")
    logger.addHandler(handler)
    try:
        with ckptstore.open(path) as store, pytest.raises(ckptstore.Unavailable) as caught:
            store.commit(
                {"x": {"a": 1}}, ranks=ckptstore.Ranks(process_group=group, timeout_s=TIMEOUT_S)
            )
        return [text for at, text in said if at < monotonic() - TIMEOUT_S / 2], str(caught.value)
    finally:
        logger.removeHandler(handler)


def wait_for_each_other(rank: int, path: Path) -> list[tuple[list[str], str]]:
    """In three pairs of ranks one is missing: from the start; after one round, the follower; after
    one round, the coordinator.
    """
    unmet, followed, led = (
        group if rank in pair else None
        for pair in ((1, 3), (0, 2), (1, 2))
        for group in (dist.new_group(pair),)
    )
    found = []
    with ckptstore.open(path) as store:
        for group in (followed, led):
            if group is not None:
                store.commit({"x": {"a": 0}}, ranks=ckptstore.Ranks(process_group=group))
    if rank == 1:
        found.append(commit_in_vain(path, unmet))
    if rank == 0:
        found.append(commit_in_vain(path, followed))
    if rank == 2:
        found.append(commit_in_vain(path, led))
    return found


def commit_without_clones(rank: int, path: Path) -> str:
    """Ranks that have not met before, with a torch before 2.8, whose stores have no `clone`."""
    group, kinds = dist.new_group([0, 1, 2]), (dist.Store, dist.PrefixStore)
    known = {kind: kind.__dict__["clone"] for kind in kinds if "clone" in kind.__dict__}
    for kind in known:
        del kind.clone
    try:
        with ckptstore.open(path) as store:
            return (
                store.commit({"x": {"a": 1}}, ranks=ckptstore.Ranks(process_group=group)).id
                if rank < 3
                else ""
            )
    finally:
        for kind, clone in known.items():
            kind.clone = clone


def test_ranks_meet_also_where_a_store_cannot_be_cloned(pool: Pool, tmp_path: Path) -> None:
    first, *others, _ = pool.run(commit_without_clones, tmp_path / "store")
    assert first and others == [first, first]


def test_a_rank_that_does_not_come_is_named_before_the_others_give_up(
    pool: Pool, tmp_path: Path
) -> None:
    leads, unmet, follows, _ = pool.run(wait_for_each_other, tmp_path / "store")
    ((said, error),) = unmet
    assert said == [
        "connecting the ranks has waited 0.4 s for rank 1, which never came; it gives up after 4 s"
    ]
    assert "waited for rank 1, which never came" in error
    ((said, error),) = leads
    assert said == [
        "commit: plan has waited 0.4 s for rank 1, silent so far; it gives up after 4 s"
    ]
    assert "rank 1: Unavailable: gone, or silent for too long" in error
    ((said, _),) = follows
    assert said == [
        "commit: plan has waited 0.4 s for rank 0, which has not called, or waits for others "
        "itself; it gives up after 4 s"
    ]
