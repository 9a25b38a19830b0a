"""Random commits, checkouts, tags, gcs, crashes, reopenings and lost caches, by two hosts,
against a dict."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
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

from ckptstore.core.ids import CommitId
from ckptstore.core.settings import Settings
from ckptstore.errors import Conflict
from ckptstore.maintenance.gc.session_monitor import STALE_S
from ckptstore.maintenance.retention import KeepLast
from ckptstore.store import Store
from tests.maintenance.collecting import collected, garbage, state_of
from tests.maintenance.stopping import Stopped, stop_after
from tests.maintenance.stores import assert_equal
from tests.shared.sites import KINDS, Sites, kinds, on, sites_of

RUNS = ("main", "other")
WHO = st.integers(0, 1)
CONTENTS = st.integers(0, 4)
TAGS = st.none() | st.sampled_from(("best", "prod"))
ANY = st.integers(0, 2**16)
MEMORY = Path("/dev/shm")
MACHINES = int(os.environ.get("CKPTSTORE_TEST_MACHINES", "60"))
"""The long test's, on each kind of place."""


def content(seed: int) -> dict[str, Any]:
    return state_of(seed, own=18_000, shared=17_000)


class SharedMachine(RuleBasedStateMachine):
    """The model: what was committed by whom, in order, what is forgotten, and what tags say.

    No rule has a precondition: whether a crash leaves a commit differs from run to run, and
    Hypothesis must be able to draw the same again.
    """

    sites: Sites

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(
            tempfile.mkdtemp(prefix="ckptstore-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self.site = replace(self.sites, folder=self.folder).new()
        self.stores: list[Store] = []
        self.order: list[CommitId] = []
        self.contents: dict[CommitId, int] = {}
        self.runs: dict[CommitId, str] = {}
        self.forgotten: set[CommitId] = set()
        self.tags: dict[str, CommitId] = {}

    def host(self, who: int) -> Path:
        return self.folder / f"host-{who}"

    def live(self, run: str | None = None) -> list[CommitId]:
        return [c for c in self.order if c not in self.forgotten and run in (None, self.runs[c])]

    def committed(self, who: int, commit: CommitId, seed: int, tag: str | None) -> None:
        self.order.append(commit)
        self.contents[commit], self.runs[commit] = seed, RUNS[who]
        if tag:
            self.tags[tag] = commit

    def purged(self) -> None:
        self.order = self.live()
        self.forgotten.clear()

    @initialize()
    def open_hosts(self) -> None:
        self.stores = [
            self.site.open(self.host(who), run=run, threads=1) for who, run in enumerate(RUNS)
        ]

    @rule(who=WHO, seed=CONTENTS, tag=TAGS)
    def commit(self, who: int, seed: int, tag: str | None) -> None:
        self.committed(
            who,
            self.stores[who].commit(content(seed), step=len(self.contents), tag=tag or ()).id,
            seed,
            tag,
        )

    @rule(who=WHO, any=ANY)
    def checkout(self, who: int, any: int) -> None:
        if not self.live():
            return
        commit = self.live()[any % len(self.live())]
        assert_equal(self.stores[who].checkout(commit).state_dict(), content(self.contents[commit]))

    @rule(who=WHO, any=ANY)
    def forget(self, who: int, any: int) -> None:
        if not self.live():
            return
        commit = self.live()[any % len(self.live())]
        lasts = {self.live(run)[0] for run in RUNS if len(self.live(run)) == 1}
        if commit in self.tags.values() or commit in lasts:
            with pytest.raises(Conflict):
                self.stores[who].forget(commit)
        else:
            self.stores[who].forget(commit)
            self.forgotten.add(commit)

    @rule(who=WHO)
    def forget_all_but_two(self, who: int) -> None:
        self.stores[who].forget(KeepLast(2))
        self.forgotten |= set(self.live(RUNS[who])[:-2]) - set(self.tags.values())

    @rule(who=WHO, any=ANY)
    def undelete(self, who: int, any: int) -> None:
        if not self.forgotten:
            return
        commit = sorted(self.forgotten)[any % len(self.forgotten)]
        self.stores[who].undelete(commit)
        self.forgotten.remove(commit)

    @rule(who=WHO)
    def gc(self, who: int) -> None:
        self.stores[who].gc(max_unused=0.0, grace_s=0)
        self.purged()

    @rule(who=WHO, lose_cache=st.booleans())
    def reopen(self, who: int, lose_cache: bool) -> None:
        self.stores[who].close()
        if lose_cache:
            shutil.rmtree(self.host(who), ignore_errors=True)
        self.stores[who] = self.site.open(self.host(who), run=RUNS[who], threads=1)

    @rule(who=WHO, seed=CONTENTS, tag=TAGS, changes=st.integers(0, 16))
    def crash_in_a_commit(self, who: int, seed: int, tag: str | None, changes: int) -> None:
        self._crash(
            who,
            changes,
            lambda store: store.commit(content(seed), step=len(self.contents), tag=tag or ()),
        )
        made = {info.id for info in self.stores[who].log(run=RUNS[who])} - self.contents.keys()
        assert len(made) <= 1
        for commit in made:
            self.committed(who, commit, seed, tag)

    @rule(who=WHO, changes=st.integers(0, 30))
    def crash_in_a_gc(self, who: int, changes: int) -> None:
        self._crash(who, changes, lambda store: store.gc(max_unused=0.0, grace_s=0))
        with self.site.opened(self.host(who)) as handle:
            left = handle.log.replay().commits
        if self.forgotten.isdisjoint(left):
            self.purged()

    def _crash(self, who: int, changes: int, work: Callable[[Store], object]) -> None:
        """Do `work` on one host, which ends after so many changes to the store."""
        self.stores[who].close()
        with on(self.host(who)):
            handle = self.site.handle()
            stop_after(handle, changes)
            store = Store(handle, Settings.of(run=RUNS[who], threads=1))
            with suppress(Stopped):
                work(store)
            with suppress(Stopped):
                store.close()
        self.stores[who] = self.site.open(self.host(who), run=RUNS[who], threads=1)

    @invariant()
    def both_hosts_say_what_the_model_says(self) -> None:
        for store, run in zip(self.stores, RUNS, strict=False):
            assert [info.id for info in store.log(run=run)] == self.live(run)[::-1]
            assert store.tags() == self.tags

    def teardown(self) -> None:
        try:
            if self.stores:
                assert self.stores[0].fsck().findings == ()
                self._collect_what_crashes_left()
                for commit in self.live():
                    assert_equal(
                        self.stores[1].checkout(commit).state_dict(), content(self.contents[commit])
                    )
        finally:
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)

    def _collect_what_crashes_left(self) -> None:
        now_s = time.monotonic()
        with on(self.host(0)):
            for s in (0.0, 2 * STALE_S):
                collected(self.site, clock=lambda s=s: now_s + s)
            assert not garbage(self.site)


@pytest.fixture(params=kinds("local", "memory", "bucket and database"))
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> type[SharedMachine]:
    """The machine on one kind of place; each of its runs makes a store of its own."""
    return type("Machine", (SharedMachine,), {"sites": sites_of(request, tmp_path)})


def test_a_shared_store_is_what_a_dict_of_its_commits_says(machine: type[SharedMachine]) -> None:
    """The first example of Hypothesis is always one rule over and over; only those behind it are
    drawn."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=3, stateful_step_count=12, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", KINDS, indirect=True)
def test_a_shared_store_is_what_a_dict_says_for_long(machine: type[SharedMachine]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=MACHINES, stateful_step_count=40, suppress_health_check=list(HealthCheck)
        ),
    )
