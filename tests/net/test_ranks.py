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
from tests.net import on_ranks, registry
from tests.net.ranks import (
    RANKS,
    Commit,
    Divided,
    Draw,
    Restore,
    Split,
    flat,
    is_container,
    merged,
)
from tests.shared.sites import Site

ACTIONS = 12
MEMORY = Path("/dev/shm")


class Job:
    """A store, the ranks that commit to it, and what each commit must be."""

    def __init__(self, pool: Pool, folder: Path, seed: int, counts: Counter[str]) -> None:
        self.random, self.pool, self.path, self.counts = Random(seed), pool, folder / "s", counts
        self.told: list[str] = []
        self.draw = Draw(self.random)
        self.made: dict[int, Commit] = {}
        self.site, self.mirror = Site(str(self.path)), Site(str(folder / "mirror"))
        self.store: ckptstore.Store
        self.leaving = set[int | None]()
        self.step = 0
        codec = self.random.choice(("raw", "zstd"))
        executor = "process" if self.random.random() < 0.06 else None
        self.run(on_ranks.begin, self.path, {"codec": codec, "executor": executor})

    def run(self, task: Any, *args: Any) -> list[Any]:
        return self.pool.run(task, *args)

    def act(self) -> None:
        table = {
            self.commit: 12,
            self.fail: 1,
            self.restore: 4,
            self.read: 1,
            self.reopen: 1,
            self.keep: 3,
        }
        action = self.random.choices(list(table), list(table.values()))[0]
        self.counts[action.__name__] += 1
        action()

    def commit(self) -> None:
        commit = self.drawn()
        self.run(on_ranks.commit, commit)
        self.made[commit.step] = commit
        if self.random.random() < 0.5:
            self.wait()

    def drawn(self) -> Commit:
        changed = self.draw.change() if self.step else []
        self.step += 1
        commit = self.draw.commit(self.step)
        self.told.append(f"changed {changed}, {commit}")
        self.meet(commit.group, [s for s in commit.state.values() if isinstance(s, Divided)])
        return commit

    def fail(self) -> None:
        """One rank fails: all say the same, and the commit is there as a whole, or not at all."""
        self.wait()
        commit, random = self.drawn(), self.random
        on = random.choice(commit.group)
        how = random.choice(("raises", "storage", "storage", "late"))
        call = random.randint(1, 20)
        self.told.append(f"rank {on} fails: {how} {call}")
        outcomes = set(self.run(on_ranks.commit_failing, commit, on, how, call)) - {""}
        self.counts[f"{how}: {sorted(outcomes)}"] += 1
        if how == "late":  # all but that rank may know that it was made
            assert outcomes <= {"made", "KeyboardInterrupt"}
        else:
            assert len(outcomes) == 1, f"ranks differ in the outcome: {outcomes}"
            assert how == "storage" or "made" not in outcomes
        with ckptstore.open(self.path, create=False, threads=1) as store:
            there = any(info.step == commit.step for info in store.log())
            assert there or (how != "late" and "made" not in outcomes)
            if there:
                self.made[commit.step] = commit
                self.look(store, commit)

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

    def keep(self) -> None:
        """What one process does to the history, whose chunks ranks know from commits before."""
        self.wait()
        way = self.random.choice(registry.RANKED_UPKEEP)
        self.told.append(f"{way.name}")
        with self.site.open(create=False, threads=1) as self.store:
            if self.store.log():
                self.leaving.clear()
                way.act(self)
            there = {info.step for info in self.store.log()}
        lost = self.made.keys() - there - self.leaving
        assert not lost, f"steps {lost} are gone"
        self.made = {step: commit for step, commit in self.made.items() if step in there}
        if self.has_mirror():
            with self.mirror.open(create=False, threads=1) as store:
                for info in store.log():
                    if info.step in self.made:
                        self.look(store, self.made[info.step])

    def commits(self) -> list[Any]:
        """The commits that are there, the newest first."""
        return self.store.log()

    def has_mirror(self) -> bool:
        return (Path(self.mirror.place) / "ckptstore.json").exists()

    def look(self, store: ckptstore.Store, of: Commit) -> None:
        snapshot = store.checkout(of.step)
        self.told.append(f"read step {of.step}")
        for way in registry.RANKED:
            problems = list(way.act(snapshot, of))
            assert not problems, f"{way.name}: {problems}"

    def end(self) -> None:
        self.wait()
        with ckptstore.open(self.path, create=False, threads=1) as store:
            assert sorted(info.step or 0 for info in store.log()) == sorted(self.made)
            for commit in self.made.values():
                self.look(store, commit)
            findings = store.fsck(read_data="100%").findings
            findings = [each for each in findings if each.kind != "orphan"]  # of what failed
            assert not findings, findings
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


@pytest.mark.parametrize("seconds", [10, pytest.param(1800, marks=pytest.mark.soak)])
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
