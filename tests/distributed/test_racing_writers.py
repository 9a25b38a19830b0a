"""Threads write to the states of two ranks during a common commit: every stored chunk still matches
its id.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.errors import Conflict
from tests.distributed.layouts import group_of, layout, meet
from tests.distributed.pool import Pool
from tests.stress.test_racing_writers import writing_to

N = 2
PART = 50
"""Commits within one task. The pool waits for a task, not for the race."""

OWN = ["own/*"]


def race(rank: int, path: Path, commits: int) -> int:
    """Commits of shards that end within chunks, of a private leaf and of a compared one; returns
    the number of refusals.
    """
    meet(N)
    if rank >= N:
        group_of(N)
        return 0
    refused = 0
    shards = layout("rows", torch.zeros(2001, 1500), N)
    own, unknown = torch.zeros(300_000), torch.zeros(300_000)
    planned = {"model": {"shards": shards}}
    compared = {**planned, "own": {"t": own}, "other": {"t": unknown}}
    with ckptstore.open(path) as store:
        with ExitStack() as writers:
            for tensor in (shards._local_tensor, own, unknown):
                writers.enter_context(writing_to(tensor))
            for step in range(commits):
                state = compared if step % 4 == 3 else planned
                try:
                    if step % 4 == 2:
                        store.commit_async(
                            state,
                            step=step,
                            ranks=ckptstore.Ranks(private=OWN, process_group=group_of(N)),
                        ).wait()
                    else:
                        store.commit(
                            state,
                            step=step,
                            ranks=ckptstore.Ranks(private=OWN, process_group=group_of(N)),
                        )
                except Conflict:  # the compared content changed before it was written
                    refused += 1
        for tensor in (shards._local_tensor, own, unknown):
            tensor.fill_(1)
        store.commit(
            compared, step=commits, ranks=ckptstore.Ranks(private=OWN, process_group=group_of(N))
        )
    return refused


def _race(pool: Pool, place: Path, commits: int) -> None:
    ckptstore.open(place).close()
    parts = [min(PART, commits - done) for done in range(0, commits, PART)]
    refused = sum(pool.run(race, place, part)[0] for part in parts)
    with ckptstore.open(place) as store:
        infos = store.log()
        assert len(infos) == commits + len(parts) - refused > commits // 2
        assert not store.fsck("data").findings
        clean = store.checkout(infos[0].id).state_dict()
        assert all(
            torch.equal(tensor, torch.ones_like(tensor))
            for tensor in (clean["model"]["shards"], clean["other"]["t"])
        )
    print(
        f"2 ranks: {commits - refused} commits beside racing writers, {refused} refused; no chunk "
        "differs from its id"
    )


def test_racing_writes_on_two_ranks_tear_a_state_and_never_damage_the_store(
    pool: Pool, tmp_path: Path
) -> None:
    _race(pool, tmp_path / "store", 6)


@pytest.mark.soak
def test_a_thousand_commits_of_two_ranks_beside_racing_writers(pool: Pool, tmp_path: Path) -> None:
    _race(pool, tmp_path / "store", 1_000)
