"""Many processes commit, restore, forget and collect in one store: retained commits restore, and
no process waits long."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptstore.core.ids import CommitId
from tests.maintenance.collecting import opened
from tests.support.checker import assert_no_garbage_after_gc, view_of
from tests.support.fork_server import Nursery
from tests.support.mounts import shared_directory, shared_directory_problem
from tests.support.workloads import small

LONGEST_WAIT_S = 1.0
HOSTS = 2
ROUNDS, ROUNDS_OF_HOSTS = 60, 30
"""What each process does in `make test`, in less time than it has. It is the same on a busy machine
and on an idle one, where six seconds would be filled with more of it."""
COUNTED = ("committed", "restored", "collected", "forgotten", "conflict")


def _share_a_store(
    seats: Sequence[tuple[Path, Path | None]],
    seconds: float,
    nursery: Nursery,
    seed: int,
    rounds: int = sys.maxsize,
) -> list[int]:
    """A process for each of `seats`: a place that leads to the store, and a cache directory if its
    host has one of its own. Returns the steps that were committed."""
    children = [
        nursery.start(
            "churn",
            place=str(place),
            me=me,
            everybody=len(seats),
            seed=seed,
            seconds=seconds,
            rounds=rounds,
            cache=str(cache or ""),
        )
        for me, (place, cache) in enumerate(seats)
    ]
    for child in children:
        child.go()
    codes = [child.wait() for child in children]
    assert codes == [0] * len(seats), f"seed {seed}: exit codes {codes}"
    waits = sorted(float(s) for child in children for _, s in child.reports("waited"))
    counts = {kind: sum(len(child.reports(kind)) for child in children) for kind in COUNTED}
    wait_s = waits[len(waits) * 99 // 100]
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(
        f"{len(seats)} processes, {seconds:.0f} s: {done}; 99 % of {len(waits)} waits <= "
        f"{wait_s:.3f} s, all <= {waits[-1]:.3f} s"
    )
    assert counts["restored"] >= len(seats) and counts["committed"] >= len(seats)
    assert wait_s < LONGEST_WAIT_S, f"seed {seed}"
    return [int(step) for child in children for step, _ in child.reports("committed")]


def _check_what_is_left(place: Path, steps: list[int]) -> None:
    with opened(place) as handle:
        rows = handle.log.replay().commits
    assert {row.step for row in rows.values()} <= set(steps)
    contents: dict[CommitId, dict[str, object]] = {
        commit: small(row.step or 0) for commit, row in rows.items()
    }
    assert {name for name, _ in view_of(place).tags if name.startswith("keep-")}
    assert_no_garbage_after_gc(place, contents)


def _share_among_hosts(
    processes: int,
    seconds: float,
    scratch: Path,
    nursery: Nursery,
    seed: int,
    rounds: int = sys.maxsize,
) -> None:
    if reason := shared_directory_problem():
        pytest.skip(reason)
    caches = [scratch / f"cache-{host}" for host in range(HOSTS)]
    with shared_directory(scratch / "shared", HOSTS) as mountpoints:
        seats = [(mountpoints[n % HOSTS] / "store", caches[n % HOSTS]) for n in range(processes)]
        steps = _share_a_store(seats, seconds, nursery, seed, rounds)
    assert not (scratch / "shared" / "store" / "index").exists()
    assert all(
        list(cache.glob("*/catalog.sqlite")) and list(cache.glob("*/chunks.lmdb"))
        for cache in caches
    )
    _check_what_is_left(scratch / "shared" / "store", steps)


def test_three_processes_share_a_store(scratch: Path, nursery: Nursery, seed: int) -> None:
    steps = _share_a_store([(scratch / "store", None)] * 3, 60.0, nursery, seed, ROUNDS)
    _check_what_is_left(scratch / "store", steps)


def test_two_hosts_share_a_directory(scratch: Path, nursery: Nursery, seed: int) -> None:
    _share_among_hosts(2, 60.0, scratch, nursery, seed, ROUNDS_OF_HOSTS)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_eight_processes_share_a_store_for_a_minute(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    _check_what_is_left(
        scratch / "store", _share_a_store([(scratch / "store", None)] * 8, 60.0, nursery, seed)
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_eight_processes_of_two_hosts_share_a_directory_for_a_minute(
    scratch: Path, nursery: Nursery, seed: int
) -> None:
    _share_among_hosts(8, 60.0, scratch, nursery, seed)
