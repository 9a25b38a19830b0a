"""Any order of commits, checkouts, tags, forgetting, collecting, reopening and lost caches, by two hosts, against a dict."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from ckptstore.core.ids import CommitId
from ckptstore.errors import Conflict
from ckptstore.history.state import NEWEST_KEPT
from ckptstore.store import Store
from ckptstore.upkeep.retention import KeepLast
from tests.servers.postgres import PostgresServer
from tests.servers.s3 import S3Server, new_url
from tests.shared.sites import Site
from tests.upkeep.collecting import state_of
from tests.upkeep.stores import assert_equal

RUNS = ("main", "other")
WHO = st.integers(0, 1)
ANY = st.integers(0, 2**16)


def content(seed: int) -> dict[str, Any]:
    return state_of(seed, own=18_000, shared=17_000)


class SharedMachine(RuleBasedStateMachine):
    """The model: what was committed by whom, in order, what is forgotten, and what tags say."""

    make_site: Callable[[Path], Site]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ckptstore-"))
        self.site = type(self).make_site(self.folder)
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

    @initialize()
    def open_hosts(self) -> None:
        self.stores = [self.site.open(self.host(who), run=run, threads=1) for who, run in enumerate(RUNS)]

    @rule(who=WHO, seed=st.integers(0, 4), tag=st.none() | st.sampled_from(("best", "prod")))
    def commit(self, who: int, seed: int, tag: str | None) -> None:
        commit = self.stores[who].commit(content(seed), step=len(self.contents), tag=tag or ()).id
        self.order.append(commit)
        self.contents[commit], self.runs[commit] = seed, RUNS[who]
        if tag:
            self.tags[tag] = commit

    @precondition(lambda self: self.live())
    @rule(who=WHO, any=ANY)
    def checkout(self, who: int, any: int) -> None:
        commit = self.live()[any % len(self.live())]
        assert_equal(self.stores[who].checkout(commit).state_dict(), content(self.contents[commit]))

    @precondition(lambda self: self.live())
    @rule(who=WHO, any=ANY)
    def forget(self, who: int, any: int) -> None:
        commit = self.live()[any % len(self.live())]
        pinned = {*self.tags.values(), *(c for run in RUNS for c in self.live(run)[-NEWEST_KEPT:])}
        if commit in pinned:
            with pytest.raises(Conflict):
                self.stores[who].forget(commit)
        else:
            self.stores[who].forget(commit)
            self.forgotten.add(commit)

    @rule(who=WHO)
    def forget_all_but_two(self, who: int) -> None:
        self.stores[who].forget(KeepLast(2))
        self.forgotten |= set(self.live(RUNS[who])[:-2]) - set(self.tags.values())

    @precondition(lambda self: self.forgotten)
    @rule(who=WHO, any=ANY)
    def undelete(self, who: int, any: int) -> None:
        commit = sorted(self.forgotten)[any % len(self.forgotten)]
        self.stores[who].undelete(commit)
        self.forgotten.remove(commit)

    @rule(who=WHO)
    def gc(self, who: int) -> None:
        self.stores[who].gc(max_unused=0.0)
        self.order = self.live()
        self.forgotten.clear()

    @rule(who=WHO, lose_cache=st.booleans())
    def reopen(self, who: int, lose_cache: bool) -> None:
        self.stores[who].close()
        if lose_cache:
            shutil.rmtree(self.host(who), ignore_errors=True)
        self.stores[who] = self.site.open(self.host(who), run=RUNS[who], threads=1)

    @invariant()
    def both_hosts_say_what_the_model_says(self) -> None:
        for store, run in zip(self.stores, RUNS, strict=False):
            assert [info.id for info in store.log()] == self.live(run)[::-1]
            assert store.tags() == self.tags

    def teardown(self) -> None:
        try:
            if self.stores:
                assert self.stores[0].fsck().findings == ()
                for commit in self.live():
                    assert_equal(self.stores[1].checkout(commit).state_dict(), content(self.contents[commit]))
        finally:
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)


EVERYWHERE = ("memory", "s3", "local and postgres", "s3 and postgres")
AT_FIRST = EVERYWHERE if "CKPTSTORE_TEST_S3" in os.environ or os.environ.get("CKPTSTORE_TEST_PROFILE") == "soak" else EVERYWHERE[-1:]
"""`make test` has a time limit: it takes the place that has most in it, `make test-real` and `make soak` take all."""


@pytest.fixture(params=AT_FIRST)
def machine(request: pytest.FixtureRequest) -> type[SharedMachine]:
    """The machine on one kind of place; each of its runs makes a store of its own."""
    kind = request.param
    s3: S3Server | None = request.getfixturevalue("s3") if "s3" in kind else None
    postgres: PostgresServer | None = request.getfixturevalue("postgres") if "postgres" in kind else None

    def site(folder: Path) -> Site:
        more = {"index": postgres.new_url()} if postgres else {}
        if s3:
            return Site(new_url(), s3.options(), more)
        return Site(f"memory://{secrets.token_hex(8)}" if kind == "memory" else str(folder / "store"), None, more)

    return type("Machine", (SharedMachine,), {"make_site": staticmethod(site)})


def test_a_shared_store_is_what_a_dict_of_its_commits_says(machine: type[SharedMachine]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=1, stateful_step_count=12, suppress_health_check=list(HealthCheck))
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_shared_store_is_what_a_dict_says_for_long(machine: type[SharedMachine]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    )
