"""Commits of one to four ranks, with everything that differs among them, restored on any others:
each is the pure merge of what the ranks had, by name."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import ckptstore
from tests.distributed.pool import Pool
from tests.net import on_ranks
from tests.net.ranks import (
    GONE,
    RANKS,
    Commit,
    Divided,
    Draw,
    Restore,
    Split,
    T,
    differences,
    flat,
    holders,
    is_container,
    merged,
    view,
)

ACTIONS = 12
MEMORY = Path("/dev/shm")


class Job:
    """A store, the ranks that commit to it, and what each commit must be."""

    def __init__(self, pool: Pool, folder: Path, seed: int, counts: Counter[str]) -> None:
        self.random, self.pool, self.path, self.counts = Random(seed), pool, folder / "s", counts
        self.told: list[str] = []
        self.draw = Draw(self.random)
        self.made: dict[int, Commit] = {}
        codec = self.random.choice(("raw", "zstd"))
        executor = "process" if self.random.random() < 0.06 else None
        self.run(on_ranks.begin, self.path, {"codec": codec, "executor": executor})

    def run(self, task: Any, *args: Any) -> list[Any]:
        return self.pool.run(task, *args)

    def act(self) -> None:
        table = {self.commit: 12, self.restore: 4, self.read: 1, self.reopen: 1}
        action = self.random.choices(list(table), list(table.values()))[0]
        self.counts[action.__name__] += 1
        action()

    def commit(self) -> None:
        changed = self.draw.change() if self.made else []
        commit = self.draw.commit(len(self.made) + 1)
        self.told.append(f"changed {changed}, {commit}")
        self.meet(commit.group, [s for s in commit.state.values() if isinstance(s, Divided)])
        self.run(on_ranks.commit, commit)
        self.made[commit.step] = commit
        if self.random.random() < 0.5:
            self.wait()

    def meet(self, group: tuple[int, ...], slots: list[Divided]) -> None:
        """Groups and meshes, which all ranks make together."""
        meshes = {(mesh, slot.grid(mesh)) for slot in slots for mesh in slot.meshes(group)}
        self.run(on_ranks.meet, group, sorted(meshes))

    def wait(self) -> None:
        """For the commits in the background, in the order in which they were begun."""
        self.run(on_ranks.wait)

    def restore(self) -> None:
        if not self.made:
            return
        self.wait()
        random = self.random
        of = self.made[random.choice(list(self.made))]
        group = random.choice([*self.draw.groups, tuple(sorted(random.sample(range(RANKS), 3)))])
        found, there = merged(of), range(len(of.group))
        private = {i: random.choice(there) for i in range(len(there), len(group))}
        restore = Restore(
            of.step,
            group,
            random.randrange(1 << 30),
            strict=not any(lacks(found, private.get(i, i)) for i in range(len(group))),
            private=private,
            broadcast=random.choice((None, False, True)),
            budget=random.choice((None, 64 << 20)),
        )
        self.told.append(f"{restore}")
        self.meet(group, [s for _, s in flat(restore.targets(found)) if isinstance(s, Divided)])
        for problems in self.run(on_ranks.restore, restore, of):
            assert not problems, problems

    def reopen(self) -> None:
        self.wait()
        ranks = self.random.sample(range(RANKS), self.random.randint(1, RANKS))
        self.told.append(f"reopen on {ranks}")
        self.pool.run(on_ranks.reopen, ranks=ranks)

    def read(self) -> None:
        """By one process, with a store of its own."""
        if self.made:
            self.wait()
            with ckptstore.open(self.path, create=False, threads=1) as store:
                self.look(store, self.made[self.random.choice(list(self.made))])

    def look(self, store: ckptstore.Store, of: Commit) -> None:
        snapshot, wanted = store.checkout(of.step), merged(of)
        where = f"step {of.step}"
        self.told.append(f"read {where}")
        problems = list(differences(wanted, snapshot.state_dict(), where))
        for i in range(len(of.group)):
            seen = {key: node for key, node in view(wanted, i).items() if node is not GONE}
            own = snapshot.of_rank(i)
            problems += differences(seen, own.state_dict(), f"{where}, rank {i}")
            for path, node in flat(seen):
                if isinstance(node, T):
                    problems += differences(node, own.read(path), f"{where}, rank {i}: {path}")
        for path, node in flat(wanted):
            if isinstance(node, T):
                problems += differences(node, snapshot.read(path), f"{where}: {path}")
        assert not problems, problems
        self.check_layout(snapshot, of)

    def check_layout(self, snapshot: ckptstore.Snapshot, of: Commit) -> None:
        layout = snapshot.layout
        if len(of.group) == 1:
            assert layout is None
            return
        assert layout is not None and layout.world == len(of.group)
        numbers = {rank: i for i, rank in enumerate(of.group)}
        for path, placed in layout.leaves.items():
            slot = of.state.get(path)
            ranks = {rank for found in placed.ranks for rank in found}
            if slot is not None:
                held = {numbers[rank] for rank in holders(of.state, path, of.group)}
                assert ranks <= held, f"{path} is said to be of ranks {ranks}, and is of {held}"

    def end(self) -> None:
        self.wait()
        with ckptstore.open(self.path, create=False, threads=1) as store:
            assert sorted(info.step or 0 for info in store.log()) == sorted(self.made)
            for commit in self.made.values():
                self.look(store, commit)
            assert not store.fsck(read_data="100%").findings
        self.run(on_ranks.end)


def lacks(node: Any, i: int) -> bool:
    """Whether others have something of their own where rank number `i` has nothing."""
    if isinstance(node, Split):
        return i not in node
    below = node.values() if isinstance(node, dict) else node if is_container(node) else ()
    return any(lacks(each, i) for each in below)


def walk(pool: Pool, seed: int, counts: Counter[str]) -> None:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        job = None
        try:
            job = Job(pool, Path(folder), seed, counts)
            for _ in range(ACTIONS):
                job.act()
            job.end()
        except BaseException as error:
            told = job.told if job else ["the first commit"]
            error.add_note(f"job of seed {seed}:\n  " + "\n  ".join(told))
            raise


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(RANKS)
    yield pool
    pool.close()


@pytest.mark.parametrize("seconds", [12, pytest.param(1800, marks=pytest.mark.soak)])
@pytest.mark.timeout(4 * 3600)
def test_a_commit_of_ranks_is_the_merge_of_what_they_have(
    pool: Pool, seed: int, seconds: float
) -> None:
    """Each job has a seed of its own, which its failure names: CKPTSTORE_NET_JOB=N runs it."""
    only = os.environ.get("CKPTSTORE_NET_JOB")
    begun, counts, number = time.monotonic(), Counter[str](), 0
    while not number or (not only and time.monotonic() - begun < seconds):
        walk(pool, int(only) if only else seed + number, counts)
        number += 1
    print(f"{number} jobs from seed {seed}: {counts.most_common()}")
