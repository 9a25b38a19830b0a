"""A rank that waits logs the missing ranks long before the timeout."""

import logging
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch.distributed as dist

import ckptstore
from ckptstore.distributed.waiting import EVERY_RANK, SOON_S
from tests.distributed.pool import Pool

LONGEST_S = 60.0
"""Until when a warning is waited for that comes after five seconds."""

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
    warned = [
        "connecting the ranks has waited 0.4 s for rank 1, which did not come; it gives up after "
        f"4 s; {EVERY_RANK}"
    ]
    assert said == (warned if hasattr(dist.Store, "clone") else [])  # since torch 2.8
    assert error.endswith(f"within 4 s: waited for rank 1, which did not come; {EVERY_RANK}")
    ((said, error),) = leads
    assert said == [
        "commit: plan has waited 0.4 s for rank 1, silent so far; it gives up after 4 s; "
        + EVERY_RANK
    ]
    assert "rank 1: Unavailable: gone, or silent for too long" in error
    assert f"if it lives, it did not call store.commit: {EVERY_RANK}" in error
    assert ".cc" not in error
    ((said, error),) = follows
    assert said == [
        "commit: plan has waited 0.4 s for rank 0, which has not called, or waits for others "
        f"itself; it gives up after 4 s; {EVERY_RANK}"
    ]
    assert EVERY_RANK in error and ".cc" not in error


def meet_after_the_warning(rank: int, path: Path, said: Path) -> tuple[str, float]:
    """Rank 0 commits as if `torch.save` were called; rank 1 follows when rank 0 has complained."""
    group = dist.new_group([0, 1])
    if rank > 1:
        return "", 0.0
    handler = logging.Handler()
    handler.emit = lambda record: said.write_text(record.getMessage())  # type: ignore
    logger = logging.getLogger("ckptstore")
    with ckptstore.open(path) as store:
        ranks = ckptstore.Ranks(process_group=group)
        store.commit({"x": {"a": 0}}, step=0, ranks=ranks)
        began = monotonic()
        if rank == 0:
            logger.addHandler(handler)
        while rank == 1 and not said.exists() and monotonic() < began + LONGEST_S:
            sleep(0.05)
        try:
            store.commit({"x": {"a": 1}}, step=1, ranks=ranks)
            return said.read_text(), monotonic() - began
        finally:
            logger.removeHandler(handler)


def test_a_commit_by_one_rank_is_explained_in_seconds_though_the_timeout_is_minutes(
    pool: Pool, tmp_path: Path
) -> None:
    (text, seconds), (_, same), *_ = pool.run(
        meet_after_the_warning, tmp_path / "store", tmp_path / "said"
    )
    assert text == (
        "commit: plan has waited 5 s for rank 1, silent so far; it gives up after 300 s; every "
        "rank has to make this call, not only one under `if rank == 0:`; a rank that works alone "
        "passes ranks=Ranks(process_group='alone')"
    )
    assert SOON_S <= seconds < LONGEST_S and same < LONGEST_S
