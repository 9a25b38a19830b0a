"""gc on real stores: what is deleted, copied or kept waiting, and that a run executes its plan."""

import os
import re
from pathlib import Path
from random import Random

import pytest
import torch

from ckptstore import KeepBest, KeepEverySteps, KeepLast
from ckptstore.core.ids import (
    log_scratch_key,
    new_session_id,
    pack_id,
    pack_key,
    twin_key,
)
from ckptstore.errors import Corrupt
from ckptstore.index.chunks import Locations
from ckptstore.log.entries import Over
from ckptstore.log.sessions import open_session
from ckptstore.log.state import State
from ckptstore.maintenance.check import Severity
from ckptstore.maintenance.gc import GcOptions, collect
from ckptstore.maintenance.gc.costs import MERGE_PACKS
from ckptstore.maintenance.gc.session_monitor import STALE_S, SessionMonitor, Sessions
from tests.maintenance import collecting
from tests.maintenance.collecting import (
    collected,
    garbage,
    leave_half_written,
    make,
    opened,
    size_of,
    state_of,
    verify,
)
from tests.shared.sites import Site, Sites, kinds, sites_of

EVERYWHERE = pytest.mark.parametrize(
    "sites", kinds("local", "memory", "bucket and database"), indirect=True
)
AMONG_PROCESSES = pytest.mark.parametrize(
    "sites", [kind for kind in kinds("local") if "memory" not in str(kind)], indirect=True
)


@pytest.fixture(params=kinds("local"))
def sites(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sites:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "host"))
    return sites_of(request, tmp_path)


@pytest.fixture
def place(sites: Sites) -> Site:
    return sites.new()


@EVERYWHERE
def test_a_run_does_what_the_dry_run_printed_and_frees_exactly_that_much(place: Site) -> None:
    _run_and_compare_with_its_dry_run(place, "raw")


def test_a_run_on_compressed_chunks_does_what_the_dry_run_printed(place: Site) -> None:
    _run_and_compare_with_its_dry_run(place, "zstd")


def _run_and_compare_with_its_dry_run(place: Site, codec: str) -> None:
    make(place, 12, forget=range(0, 10, 2), codec=codec)
    before = size_of(place)
    planned = collected(place, dry_run=True).plan
    assert size_of(place) == before
    report = collected(place)
    assert report.plan == planned
    assert report.freed_bytes == planned.freed_now_bytes
    assert report.copied_bytes == planned.copied_bytes
    assert size_of(place) == before - planned.freed_now_bytes + planned.copied_bytes < before
    assert not garbage(place)
    verify(place, [1, 3, 5, 7, 9, 10, 11])


def test_gc_comes_to_rest(place: Site) -> None:
    """What a run writes may be just enough to be merged by the next, and that is all."""
    make(place, 12, forget=range(0, 10, 2))
    runs = [collected(place).plan for _ in range(3)]
    assert runs[-1].empty
    assert not runs[1].doomed


def test_dead_metadata_packs_are_deleted_with_their_twins(place: Site) -> None:
    make(place, 6, forget=[0, 1, 2, 3])
    collected(place)
    with opened(place) as handle:
        packs = handle.log.replay().packs.values()
    storage = place.storage()
    for pack in packs:
        here = [
            key for key in (pack_key(pack.id), twin_key(pack.id)) if storage.size(key) is not None
        ]
        assert len(here) == (2 if pack.metadata else 1)
        assert len({storage.read(key) for key in here}) == 1


STEPS, FORGOTTEN = 2 * MERGE_PACKS + 8, range(1, MERGE_PACKS + 8)
"""Commits, and those whose packs pay for merging the others'."""


def test_small_packs_are_merged_and_stay_merged(place: Site) -> None:
    make(place, STEPS, forget=FORGOTTEN)
    with opened(place) as handle:
        before = len(handle.log.replay().packs)
    assert before == 2 * STEPS
    report = collected(place, GcOptions(grace_s=0))
    assert report.plan.copies
    with opened(place) as handle:
        assert len(handle.log.replay().packs) < before / 8
    assert collected(place).plan.empty
    verify(place, [0, *range(FORGOTTEN.stop, STEPS)])


def test_packs_of_patches_that_commits_need_are_left_alone(place: Site) -> None:
    """They were merged with every gc, to free nothing."""
    changed = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    with place.open() as store:
        for step in range(MERGE_PACKS + 8):
            changed[step::100] += 1
            store.commit({"w": changed}, step=step)
        store.tag("needs-all-before", 62)
        store.forget(KeepLast(4))
        plan = store.gc(dry_run=True, grace_s=0)
        assert re.search("leave 6[4-9] small packs: to merge them would write", str(plan))
        assert store.gc(grace_s=0).copied_bytes == 0
        assert torch.equal(store.checkout("latest").state_dict()["w"], changed)


def test_live_packs_are_not_copied_to_become_larger_ones(place: Site) -> None:
    with place.open() as store:
        for step in range(12):
            store.commit(state_of(step, own=300_000), step=step)
    plan = collected(place, GcOptions(), dry_run=True).plan
    assert plan.empty and plan.copied_bytes == 0
    assert "leave 24 small packs: to merge them would write 14.0 MiB" in str(plan)
    assert collected(place, GcOptions()).copied_bytes == 0
    assert collected(place, GcOptions(max_repack_bytes=10_000_000)).copied_bytes > 9_000_000
    with place.open() as store:
        for step in range(12):
            store.checkout(step).verify()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_gc_chooses_every_commit_that_stays_can_be_read(place: Site, seed: int) -> None:
    """Layers of many sizes, one of them patched, random policies, and random limits."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    layers = {
        f"layer.{n}": torch.randn(random.choice((100, 5_000, 90_000)), generator=generator)
        for n in range(6)
    } | {"patched": torch.randn(90_000, generator=generator)}
    states: dict[int, dict[str, torch.Tensor]] = {}
    with place.open() as store:
        for step in range(30):
            layers = layers | {
                name: torch.randn(len(layers[name]), generator=generator)
                for name in random.sample(sorted(layers.keys() - {"patched"}), 2)
            }
            layers["patched"] = layers["patched"].clone()
            layers["patched"][random.randrange(90_000)] += 1
            states[step] = layers
            store.commit(layers, step=step, metrics={"loss": random.random()})
            if step % 10 < 9:
                continue
            every, best = KeepEverySteps(random.randint(2, 9)), KeepBest("loss", n=3)
            store.forget([KeepLast(random.randint(2, 9)), random.choice((every, best))])
            report = store.gc(
                grace_s=0,
                max_unused=random.choice((0.0, 0.05, 0.5)),
                max_repack_bytes=random.choice((None, None, 0, 1_000_000, 10**9)),
            )
            assert not report.problems
            assert report.copied_bytes == report.plan.copied_bytes
            assert report.freed_bytes == report.plan.freed_now_bytes
            for info in store.log():
                assert info.step is not None
                snapshot = store.checkout(info.id)
                snapshot.verify()
                for name, tensor in states[info.step].items():
                    assert torch.equal(snapshot.read(name), tensor)
        findings = store.fsck("data").findings
        assert all(each.severity is Severity.NOTE for each in findings), findings


def test_of_a_chunk_in_two_packs_one_copy_dies(place: Site) -> None:
    """Two writers that did not see each other's chunks."""
    with place.open() as one, place.open(run="two") as two:
        one.commit(state_of(1), step=1)
        with opened(place) as handle:
            first = size_of(place)
            assert len(handle.log.replay().packs) == 2
        # As if it had looked before the other one was done.
        look = two._handle.objects.locate

        def unknown(ids: bytes) -> Locations:
            where = look(ids)
            where["found"] = 0
            return where

        two._handle.objects.locate = unknown  # type: ignore[method-assign]
        two.commit(state_of(1), step=1)
    assert size_of(place) > 1.9 * first
    collected(place)
    assert size_of(place) < 1.1 * first
    verify(place, [1])
    with place.open(run="two") as store:
        store.checkout(1).verify()


def test_what_the_log_has_settled_is_looked_at_once_however_many_packs_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Site(str(tmp_path / "store"))
    make(place, 12, forget=range(0, 10, 2))
    looked: list[tuple[int, int]] = []
    look = SessionMonitor.look

    def recorded(monitor: SessionMonitor, state: State) -> Sessions:
        before = len(monitor.objects)
        sessions = look(monitor, state)
        looked.append((before, len(monitor.objects)))
        return sessions

    monkeypatch.setattr(SessionMonitor, "look", recorded)
    assert collected(place).copied_bytes
    assert looked[0][0] > 30
    assert len(looked) > 3
    assert {unsettled for _, unsettled in looked} == {0}
    assert {objects for objects, _ in looked[1:]} == {0}


def test_max_repack_limits_what_is_copied(place: Site) -> None:
    make(place, 20)
    assert not collected(place, GcOptions(0.0, max_repack_bytes=0), dry_run=True).plan.copies
    some = collected(place, GcOptions(0.0, max_repack_bytes=1_000_000), dry_run=True).plan
    assert 0 < some.copied_bytes < 1_100_000


def test_max_unused_leaves_a_little_dead_where_it_is(place: Site) -> None:
    with place.open() as store:
        for step in range(4):
            store.commit(state_of(step, own=20_000, shared=2_000_000), step=step)
        store.forget([0])
        assert not store.gc(dry_run=True, max_unused=0.05, grace_s=0).plan.copies
        assert store.gc(dry_run=True, max_unused=0.0, grace_s=0).plan.copies


# -- sessions


def test_what_a_session_in_flight_may_reuse_is_freed_when_it_ends(place: Site) -> None:
    make(place, 6, forget=[0, 1, 2])
    before = size_of(place)
    with opened(place) as handle, open_session(handle.storage, "commit") as session:
        plan = collect(handle, GcOptions(max_repack_bytes=0, grace_s=0), dry_run=True).plan
        later = plan.freed_later_bytes
        assert list(later) == [(session.id,)]
        report = collect(handle, GcOptions(max_repack_bytes=0, grace_s=0))
        assert report.freed_bytes == plan.freed_now_bytes
        with place.open() as store:
            (activity,) = store.sessions()
            assert (activity.info.id, activity.status, activity.bytes) == (
                session.id,
                "active",
                later[session.id,],
            )
    with opened(place) as handle, open_session(handle.storage, "a later commit"):
        report = collect(handle, GcOptions(max_repack_bytes=0, grace_s=0))
        assert report.freed_bytes == later[session.id,]
    assert size_of(place) == before - plan.freed_now_bytes - later[session.id,]


def test_a_forced_gc_waits_for_no_session(place: Site) -> None:
    make(place, 6, forget=[0, 1, 2])
    with opened(place) as handle, open_session(handle.storage, "commit"):
        report = collect(handle, GcOptions(0.0, force=True, grace_s=0))
        assert not report.plan.freed_later_bytes
    assert not garbage(place)
    verify(place, [3, 4, 5])


@EVERYWHERE
def test_orphans_of_a_session_that_stands_still_go_after_ten_minutes_even_over_several_short_runs(
    place: Site,
) -> None:
    make(place, 3)
    session = new_session_id()
    for key in (pack_key(pack_id(session, 0, 0)), f"commits/{session}-{'0' * 64}"):
        place.storage().put(key, b"left behind")
    leave_half_written(place, session)
    left_bytes = sum(size for key, size in collecting.objects(place) if session in key)
    now_s = 1000.0
    assert collected(place, clock=lambda: now_s).plan.empty
    assert collected(place, clock=lambda: now_s + STALE_S - 1).plan.empty
    report = collected(place, clock=lambda: now_s + STALE_S)
    assert (report.over, report.deleted_orphans) == ((session,), 3)
    assert report.freed_bytes == report.plan.freed_now_bytes == left_bytes
    assert not garbage(place)


def test_an_active_sessions_files_stay_however_long_they_stand_still(place: Site) -> None:
    make(place, 3)
    now_s = 1000.0
    with opened(place) as handle, open_session(handle.storage, "commit") as session:
        key = leave_half_written(place, session.id)
        for minutes in range(0, 40, 5):
            session.beat()
            collected(place, clock=lambda minutes=minutes: now_s + 60 * minutes)
        assert [found for found, _ in handle.storage.list("tmp/")] == [key]


@pytest.mark.parametrize("trial", ["probe", "doctor"])
def test_a_trial_that_was_broken_off_leaves_nothing_for_good(place: Site, trial: str) -> None:
    make(place, 1)
    key = f"tmp/{new_session_id()}-{trial}"
    with opened(place) as handle:
        handle.storage.put(key, b"is this storage any good?")
    for now_s in (0.0, STALE_S):
        collected(place, clock=lambda now_s=now_s: 1000.0 + now_s)
    with opened(place) as handle:
        assert handle.storage.size(key) is None


@AMONG_PROCESSES
def test_orphans_of_a_process_that_is_gone_go_at_once(place: Site) -> None:
    make(place, 3)
    if not (child := os.fork()):
        try:
            with opened(place) as handle:
                session = open_session(handle.storage, "commit")
                handle.storage.put(pack_key(pack_id(session.id, 0, 0)), b"half a pack")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert garbage(place)
    report = collected(place)
    assert len(report.over) == 1
    assert not garbage(place)


def test_unlisted_objects_of_closed_sessions_go_at_once(place: Site) -> None:
    make(place, 2)
    session = new_session_id()
    with opened(place) as handle:
        handle.log.append(Over((session,)))
        handle.storage.put(twin_key(pack_id(session, 3, 1)), b"twin")
    assert collected(place).freed_bytes == 4
    assert not garbage(place)


def test_what_a_look_at_the_log_left_behind_goes_and_is_no_finding(place: Site) -> None:
    make(place, 2)
    left = log_scratch_key("0123456789abcdef01234567")
    place.storage().put(left, b"", durable=False)
    with place.open() as store:
        assert store.fsck().findings == ()
    assert garbage(place) == {left}
    collected(place)
    assert not garbage(place)


def test_foreign_files_are_left_alone(place: Site) -> None:
    make(place, 2)
    for key in (
        "packs/readme.txt",
        "commits/notes",
        "tmp/mine",
        "sessions/x",
        "packs/aa/core.1234",
    ):
        place.storage().put(key, b"mine")
    now_s = 1000.0
    for s in (0, 2 * STALE_S):
        assert collected(place, clock=lambda s=s: now_s + s).plan.empty


# -- others at work meanwhile


class During:
    """Do something once, when a gc reports this phase."""

    def __init__(self, phase: str, action) -> None:  # type: ignore[no-untyped-def]
        self._phase, self._action = phase, action
        self.done = False

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase == self._phase and not self.done:
            self.done = True
            self._action()


PHASES = [
    "list objects",
    "read footers",
    "read commits",
    "read pages",
    "delete packs",
    "delete orphans",
    "copy",
]


@pytest.mark.parametrize("phase", PHASES)
def test_a_commit_that_reuses_what_gc_is_about_to_delete_keeps_it(place: Site, phase: str) -> None:
    make(place, 6, forget=[0, 1, 2])

    def commit() -> None:
        with place.open() as other:
            other.commit(state_of(1), step=101)

    during = During(phase, commit)
    collected(place, progress=during)
    assert during.done
    with place.open() as store:
        assert store.checkout(101).read("model/own").equal(state_of(1)["model"]["own"])
    collected(place)
    verify(place, [3, 4, 5])
    assert not garbage(place)


@pytest.mark.parametrize("phase", PHASES[:4])
def test_an_undelete_during_the_mark_keeps_the_commit(place: Site, phase: str) -> None:
    commits = make(place, 6, forget=[0, 1, 2])

    def undelete() -> None:
        with place.open() as other:
            other.undelete(commits[1])

    report = collected(place, progress=During(phase, undelete))
    assert set(report.purged) == {commits[0], commits[2]}
    verify(place, [1, 3, 4, 5])


@pytest.mark.parametrize("phase", PHASES)
def test_another_gc_in_between_makes_this_one_mark_again(place: Site, phase: str) -> None:
    make(place, 12, forget=range(0, 10, 2))
    during = During(phase, lambda: collected(place))
    collected(place, progress=during)
    assert during.done
    collected(place)
    assert not garbage(place)
    verify(place, [1, 3, 5, 7, 9, 10, 11])


@pytest.mark.parametrize("phase", PHASES[:4])
def test_what_another_gc_moves_meanwhile_is_not_said_to_be_missing(place: Site, phase: str) -> None:
    """A plan that condemns nothing is never refused, so only the plan itself can notice."""
    make(place, 12, forget=range(0, 10, 2))
    during = During(phase, lambda: collected(place))
    report = collected(place, dry_run=True, progress=during)
    assert during.done and not report.problems


def test_a_reader_that_holds_a_snapshot_finds_chunks_that_moved(place: Site) -> None:
    make(place, 12, forget=range(0, 10, 2))
    with place.open() as reader:
        snapshot = reader.checkout(3)
        collected(place)
        assert snapshot.state_dict()["model"]["own"].equal(state_of(3)["model"]["own"])


# -- damage


def metadata_packs(place: Path) -> list[str]:
    with opened(place) as handle:
        return [pack_key(pack.id) for pack in handle.log.replay().packs.values() if pack.metadata]


def test_a_damaged_page_is_read_from_the_twin(place: Site) -> None:
    make(place, 4, forget=[0])
    storage = place.storage()
    for key in metadata_packs(place):
        data = storage.read(key)
        storage.put(key, bytes(len(data) // 2) + data[len(data) // 2 :])
    collected(place)
    verify(place, [1, 2, 3])


def test_nothing_is_deleted_if_a_page_cannot_be_read(place: Site) -> None:
    make(place, 4, forget=[0])
    for key in metadata_packs(place):
        place.storage().delete(key)
        place.storage().delete(f"{key}.2")
    before = collecting.objects(place)
    with pytest.raises(Corrupt, match="cannot be marked"):
        collected(place)
    assert collecting.objects(place) == before


def test_a_pack_with_a_damaged_footer_is_left_alone_and_reported(place: Site) -> None:
    make(place, 4, forget=[0])
    with opened(place) as handle:
        data_packs = [pack for pack in handle.log.replay().packs.values() if not pack.metadata]
    bad = max(data_packs, key=lambda pack: pack.bytes)
    storage, key = place.storage(), pack_key(bad.id)
    storage.put(key, storage.read(key)[:-1])
    report = collected(place)
    assert report.plan.unreadable == (bad.id,)
    assert report.plan.missing
    assert storage.size(key) == bad.bytes - 1


def test_a_sparse_pack_with_a_damaged_chunk_stays_and_the_others_move(place: Site) -> None:
    make(place, STEPS, forget=FORGOTTEN)
    with opened(place) as handle:
        bad = min((n, pack) for n, pack in handle.log.replay().packs.items() if not pack.metadata)[
            1
        ]
    storage, key = place.storage(), pack_key(bad.id)
    data = bytearray(storage.read(key))
    data[250_000] ^= 1  # behind what all steps share
    storage.put(key, bytes(data))
    report = collected(place)
    assert report.damaged == (bad.id,)
    assert storage.read(key) == data
    assert report.copied_bytes
    verify(place, range(FORGOTTEN.stop, STEPS))
