"""Random commits, checkouts, tags, thinnings, compactions, gcs, mirrors, crashes and reopenings, by
two writers, against a dict."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import Conflict, NotFound, Thinned
from ckptstore.log.state import NEWEST_KEPT
from ckptstore.maintenance.compact.plan import CompactPolicy
from ckptstore.maintenance.retention import KeepLast
from ckptstore.store import Store
from tests.maintenance.collecting import state_of
from tests.support.checker import (
    View,
    assert_no_garbage_after_gc,
    assert_same,
    assert_sound,
    view_of,
)
from tests.support.recording import record
from tests.support.workloads import CHUNK_BYTES

STORE = "store"
RUNS = ("main", "other")
TAGS = st.sampled_from(("best", "prod", "v1"))
WRITERS = st.integers(0, 1)
CONTENTS = st.integers(0, 5)
"""Few, so that most commits find chunks of others."""

GLOBS = st.sampled_from(("model/own", "step"))

POLICIES = st.builds(CompactPolicy, newest=st.integers(0, 2), every=st.integers(1, 4))

ANY = st.integers(0, 2**16)
MEMORY = Path("/dev/shm")
MACHINES = int(os.environ.get("CKPTSTORE_TEST_MACHINES", "600"))
COUNTS = Counter[str]()
"""What the machines of this process did."""


def content(seed: int) -> dict[str, Any]:
    """Contents that are near each other, so that a compaction finds differences."""
    state = state_of(0, own=18_000, shared=17_000)
    state["model"]["own"] *= 1 + seed * 2**-16
    return state | {"step": seed}


def without(state: dict[str, Any], glob: str) -> dict[str, Any]:
    """`state` as a thinning by `glob`, which is a path, leaves it."""
    key, _, name = glob.partition("/")
    rest = {each: value for each, value in state.items() if each != key}
    if name and key in state:
        rest[key] = {each: value for each, value in state[key].items() if each != name}
    return rest


def has(state: dict[str, Any], glob: str) -> bool:
    key, _, name = glob.partition("/")
    return key in state and (not name or name in state[key])


class StoreMachine(RuleBasedStateMachine):
    """The model: what was committed by whom, in the order of places, what is forgotten, and what
    tags say. A thinned commit has the `origin` of the commit that it replaced, and its place.

    No rule has a precondition: whether a crash leaves a commit differs from run to run, and
    Hypothesis must be able to draw the same again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(
            tempfile.mkdtemp(prefix="ckptstore-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.disk = self.folder / "disk-0"
        self.disk.mkdir()
        self.stores: list[Store] = []
        self.order: list[CommitId] = []
        self.contents: dict[CommitId, Any] = {}
        self.runs: dict[CommitId, str] = {}
        self.origin: dict[CommitId, CommitId] = {}
        self.forgotten: set[CommitId] = set()
        self.tags: dict[str, CommitId] = {}

    # -- the model --

    @property
    def place(self) -> Path:
        return self.disk / STORE

    @property
    def mirror(self) -> Path:
        return self.folder / "mirror"

    @property
    def live(self) -> list[CommitId]:
        return [commit for commit in self.order if commit not in self.forgotten]

    def live_in(self, run: str) -> list[CommitId]:
        return [commit for commit in self.live if self.runs[commit] == run]

    def pinned(self) -> set[CommitId]:
        return {
            *self.tags.values(),
            *(commit for run in RUNS for commit in self.live_in(run)[-NEWEST_KEPT:]),
        }

    def view(self) -> View:
        return View(frozenset(self.live), frozenset(self.forgotten), frozenset(self.tags.items()))

    def committed(self, commit: CommitId, run: str, seed: int, tag: str | None) -> None:
        COUNTS["commits"] += 1
        self.order.append(commit)
        self.contents[commit], self.runs[commit] = content(seed), run
        self.origin[commit] = commit
        if tag:
            self.tags[tag] = commit

    def to_thin(self, run: str, keep: int, glob: str) -> list[CommitId]:
        """The commits that `KeepLast(keep).thin(glob)` replaces in a run."""
        kept = {*self.live_in(run)[-keep:], *self.pinned()}
        live = self.live_in(run)
        return [
            commit for commit in live if commit not in kept and has(self.contents[commit], glob)
        ]

    def thinned(self, run: str, glob: str, planned: list[CommitId]) -> list[CommitId]:
        """Take over from the store which of the planned commits were replaced, and return them: the
        history is as long as before, with the others where they were."""
        before, done = self.live_in(run), []
        after = [info.id for info in self.stores[0].log(run=run)][::-1]
        for old, new in zip(before, after, strict=True):
            if old != new:
                assert old in planned and new not in self.contents
                self.order.insert(self.order.index(old) + 1, new)
                self.contents[new], self.runs[new] = without(self.contents[old], glob), run
                self.origin[new] = self.origin[old]
                self.forgotten.add(old)
                done.append(old)
        COUNTS["thinned commits"] += len(done)
        return done

    def purged(self) -> None:
        self.order = self.live
        self.forgotten.clear()

    # -- ordinary life --

    @initialize(seeds=st.lists(st.tuples(WRITERS, CONTENTS), max_size=10))
    def begin(self, seeds: list[tuple[int, int]]) -> None:
        """With some commits: a store that has none until the end shows little, and the newest of a
        run are not thinned, and forgotten by name alone."""
        COUNTS["machines"] += 1
        self.open_writers()
        for who, seed in seeds:
            self.commit(who, seed, None)

    def open_writers(self) -> None:
        self.stores = [
            ckptstore.open(
                self.place, run=run, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), threads=1
            )
            for run in RUNS
        ]

    @rule(who=WRITERS, seed=CONTENTS, tag=st.none() | TAGS)
    def commit(self, who: int, seed: int, tag: str | None) -> None:
        snapshot = self.stores[who].commit(content(seed), step=len(self.contents), tag=tag or ())
        self.committed(snapshot.id, RUNS[who], seed, tag)

    @rule(who=WRITERS, any=ANY)
    def checkout(self, who: int, any: int) -> None:
        if not self.live:
            return
        commit = self.live[any % len(self.live)]
        snapshot = self.stores[who].checkout(commit)
        leaves = snapshot.leaves()
        there = {leaf.path for leaf in leaves if not leaf.gone}
        state = snapshot.state_dict(select=there.__contains__)
        assert_same(state, self.contents[commit], "checkout")
        if len(there) < len(leaves):
            with pytest.raises(Thinned):
                snapshot.state_dict()

    @rule(who=WRITERS)
    def resume(self, who: int) -> None:
        target = content(99)
        snapshot = self.stores[who].resume(target)
        newest = self.live_in(RUNS[who])[-1:]
        assert ([snapshot.id] if snapshot else []) == newest
        if snapshot:
            assert_same(target, self.contents[snapshot.id], "resume")

    @rule(who=WRITERS, name=TAGS, any=ANY)
    def tag(self, who: int, name: str, any: int) -> None:
        if not self.live:
            return
        commit = self.live[any % len(self.live)]
        self.stores[who].tag(name, commit)
        self.tags[name] = commit

    @rule(who=WRITERS, name=TAGS)
    def untag(self, who: int, name: str) -> None:
        if name in self.tags:
            self.stores[who].untag(name)
            del self.tags[name]
        else:
            with pytest.raises(NotFound):
                self.stores[who].untag(name)

    @rule(who=WRITERS, any=ANY)
    def forget(self, who: int, any: int) -> None:
        if not self.live:
            return
        commit = self.live[any % len(self.live)]
        if commit in self.tags.values() or len(self.live_in(self.runs[commit])) == 1:
            with pytest.raises(Conflict):
                self.stores[who].forget(commit)
        else:
            self.stores[who].forget(commit)
            self.forgotten.add(commit)

    @rule(who=WRITERS, keep=st.integers(1, 4))
    def forget_by_policy(self, who: int, keep: int) -> None:
        kept = {*self.live_in(RUNS[who])[-keep:], *self.pinned()}
        plan = self.stores[who].forget(KeepLast(keep))
        gone = set(self.live_in(RUNS[who])) - kept
        assert {decision.commit for decision in plan.forgotten} == gone
        self.forgotten |= gone

    @rule(who=WRITERS, any=ANY)
    def undelete(self, who: int, any: int) -> None:
        if not self.forgotten:
            return
        commit = sorted(self.forgotten)[any % len(self.forgotten)]
        there = {other for other in self.live if self.origin[other] == self.origin[commit]}
        if there & {*self.tags.values()}:
            with pytest.raises(Conflict):
                self.stores[who].undelete(commit)
            return
        self.stores[who].undelete(commit)
        self.forgotten.remove(commit)
        self.forgotten |= there

    @rule(who=WRITERS, keep=st.integers(1, 2), glob=GLOBS)
    def thin(self, who: int, keep: int, glob: str) -> None:
        planned = self.to_thin(RUNS[who], keep, glob)
        self.stores[who].forget(KeepLast(keep).thin(glob))
        assert self.thinned(RUNS[who], glob, planned) == planned

    @rule(who=WRITERS)
    def push(self, who: int) -> None:
        """The mirror forgets nothing: it has a commit of each place, and of no place two."""
        self.stores[who].push(self.mirror, create=True, force=True)
        COUNTS["pushes"] += 1
        origins = [self.origin[commit] for commit in view_of(self.mirror).live]
        assert len(origins) == len(set(origins))
        assert {self.origin[commit] for commit in self.live} <= set(origins)

    @rule(who=WRITERS, any=ANY)
    def push_one(self, who: int, any: int) -> None:
        """Tags of the others in the mirror stay as they are."""
        if not self.live or not self.mirror.is_dir():
            return
        before = view_of(self.mirror)
        commit = self.live[any % len(self.live)]
        self.stores[who].push(self.mirror, commit, force=True)
        after, own = view_of(self.mirror), {n for n, c in self.tags.items() if c == commit}
        assert {each for each in after.tags ^ before.tags if each[0] not in own} == set()

    @rule(who=WRITERS)
    def pull(self, who: int) -> None:
        """What was purged comes again, as the newest; nothing that is here goes."""
        if not self.mirror.is_dir():
            return
        for commit in self.stores[who].pull(self.mirror, tags=False).sent:
            origin = self.origin[commit]
            assert origin not in {self.origin[other] for other in self.order}
            self.order.append(commit)
            COUNTS["came again"] += 1
        here = {self.origin[commit] for commit in self.order}
        assert {self.origin[commit] for commit in view_of(self.mirror).live} <= here

    @rule(who=WRITERS, max_unused=st.sampled_from((0.0, 0.3)), grace_s=st.sampled_from((0, 3600)))
    def gc(self, who: int, max_unused: float, grace_s: int) -> None:
        """With a grace, everything that is forgotten stays: this test takes less than an hour."""
        self.stores[who].gc(max_unused=max_unused, grace_s=grace_s)
        COUNTS["gcs"] += 1
        if not grace_s:
            self.purged()

    @rule(who=WRITERS, policy=POLICIES)
    def compact(self, who: int, policy: CompactPolicy) -> None:
        report = self.stores[who].compact(policy)
        assert not report.problems
        COUNTS["differences"] += report.deltas

    @rule(who=WRITERS)
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = ckptstore.open(self.place, run=RUNS[who], threads=1)

    @rule()
    def lose_the_indexes(self) -> None:
        for store in self.stores:
            store.close()
        rmtree(self.place / "index")
        self.open_writers()

    # -- crashes --

    @rule(who=WRITERS, seed=CONTENTS, tag=st.none() | TAGS, any=ANY, power=st.booleans())
    def crash_in_a_commit(
        self, who: int, seed: int, tag: str | None, any: int, power: bool
    ) -> None:
        step = len(self.contents)

        def work(store: Store) -> CommitId:
            return store.commit(content(seed), step=step, tag=tag or ()).id

        commit = self._crash(who, work, any, power)
        if commit in view_of(self.place).commits:
            self.committed(commit, RUNS[who], seed, tag)

    @rule(who=WRITERS, any=ANY, power=st.booleans())
    def crash_in_a_gc(self, who: int, any: int, power: bool) -> None:
        self._crash(who, lambda store: store.gc(max_unused=0.0, grace_s=0), any, power)
        if not view_of(self.place).forgotten:
            self.purged()

    @rule(who=WRITERS, policy=POLICIES, any=ANY, power=st.booleans())
    def crash_in_a_compaction(self, who: int, policy: CompactPolicy, any: int, power: bool) -> None:
        self._crash(who, lambda store: store.compact(policy), any, power)

    @rule(who=WRITERS, keep=st.integers(1, 3), glob=GLOBS, any=ANY, power=st.booleans())
    def crash_in_a_thinning(self, who: int, keep: int, glob: str, any: int, power: bool) -> None:
        planned = self.to_thin(RUNS[who], keep, glob)
        self._crash(who, lambda store: store.forget(KeepLast(keep).thin(glob)), any, power)
        done = self.thinned(RUNS[who], glob, planned)
        assert set(done) <= set(planned)

    def _crash(self, who: int, work: Callable[[Store], Any], any: int, power: bool) -> Any:
        """Do `work`, but let the machine stop after any of its changes: both writers are gone, the
        disk is as it was then."""
        for store in self.stores:
            store.close()

        def works(disk: Path) -> Any:
            with ckptstore.open(disk / STORE, run=RUNS[who], threads=1) as store:
                return work(store)

        COUNTS["crashes"] += 1
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            recording, result = record(self.disk, Path(scratch), works)
            n = any % len(recording.points)
            wreck = recording.cut(n, Random(any)) if power else recording.kill(n)
            self.disk = wreck.lay_out(
                self.folder / f"disk-{int(self.disk.name.removeprefix('disk-')) + 1}"
            )
        self.open_writers()
        return result

    # -- what always holds --

    @invariant()
    def log_says_what_the_model_says(self) -> None:
        if self.stores:
            COUNTS["steps"] += 1
            assert view_of(self.place) == self.view()

    @invariant()
    def queries_say_what_the_model_says(self) -> None:
        for store, run in zip(self.stores, RUNS, strict=False):
            assert [info.id for info in store.log(run=run)] == self.live_in(run)[::-1]
            assert store.tags() == self.tags

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        try:
            if self.stores:
                assert_sound(self.place, self.contents)
                assert_no_garbage_after_gc(self.place, self.contents)
                if self.mirror.is_dir():
                    assert_sound(self.mirror, self.contents)
        finally:
            rmtree(self.folder)


@pytest.mark.timeout(900)
def test_a_store_is_what_a_dict_of_its_commits_says() -> None:
    """Some hundred steps, the first commits of each machine not counted, beside the walks of
    tests/net; the long test makes three hundred times as many."""
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=2, stateful_step_count=60)
    )  # type: ignore[no-untyped-call]


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_store_is_what_a_dict_says_for_very_long() -> None:
    long = settings(
        max_examples=MACHINES, stateful_step_count=60, suppress_health_check=list(HealthCheck)
    )
    before = COUNTS.copy()
    run_state_machine_as_test(StoreMachine, settings=long)  # type: ignore[no-untyped-call]
    assert (COUNTS - before)["thinned commits"] > 0
    print(", ".join(f"{count} {what}" for what, count in (COUNTS - before).items()))
