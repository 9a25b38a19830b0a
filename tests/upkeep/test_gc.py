"""gc on real stores: what dies, what moves, what waits, and that a plan is what a run does."""

from pathlib import Path

import numpy as np
import pytest

from ckptstore.access import open
from ckptstore.core.ids import new_session_id, pack_id, pack_key, twin_key
from ckptstore.errors import Corrupt
from ckptstore.history.entries import Over
from ckptstore.history.sessions import open_session
from ckptstore.index.chunks import LOCATION_DTYPE
from ckptstore.upkeep.gc import GcOptions, collect
from ckptstore.upkeep.watch import STALE_S
from tests.upkeep import collecting
from tests.upkeep.collecting import collected, garbage, make, opened, size_of, state_of, verify


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_run_does_what_the_dry_run_printed_and_frees_exactly_that_much(tmp_path: Path, codec: str) -> None:
    make(tmp_path, 12, forget=range(0, 10, 2), codec=codec)
    before = size_of(tmp_path)
    planned = collected(tmp_path, dry_run=True).plan
    assert size_of(tmp_path) == before
    report = collected(tmp_path)
    assert report.plan == planned
    assert report.freed_bytes == planned.freed_now_bytes
    assert report.copied_bytes == planned.copied_bytes
    assert size_of(tmp_path) == before - planned.freed_now_bytes + planned.copied_bytes < before
    assert not garbage(tmp_path)
    verify(tmp_path, [1, 3, 5, 7, 9, 10, 11])


def test_gc_comes_to_rest(tmp_path: Path) -> None:
    """What a run writes may be just enough to be merged by the next, and that is all."""
    make(tmp_path, 12, forget=range(0, 10, 2))
    runs = [collected(tmp_path).plan for _ in range(3)]
    assert runs[-1].empty
    assert not runs[1].doomed


def test_the_metadata_and_its_twins_go_together(tmp_path: Path) -> None:
    make(tmp_path, 6, forget=[0, 1, 2, 3])
    collected(tmp_path)
    with opened(tmp_path) as opening:
        packs = opening.log.replay().packs.values()
    for pack in packs:
        here = [key for key in (pack_key(pack.id), twin_key(pack.id)) if (tmp_path / key).exists()]
        assert len(here) == (2 if pack.metadata else 1)
        assert len({(tmp_path / key).read_bytes() for key in here}) == 1


def test_small_packs_are_merged_and_stay_merged(tmp_path: Path) -> None:
    make(tmp_path, 20)
    with opened(tmp_path) as opening:
        before = len(opening.log.replay().packs)
    assert before == 40
    report = collected(tmp_path, GcOptions())
    assert report.plan.copies
    with opened(tmp_path) as opening:
        assert len(opening.log.replay().packs) < before / 4
    assert collected(tmp_path).plan.empty
    verify(tmp_path, range(20))


def test_of_a_chunk_in_two_packs_one_copy_dies(tmp_path: Path) -> None:
    """Two writers that did not see each other's chunks."""
    with open(tmp_path, chunk_bytes=65536) as one, open(tmp_path, run="two") as two:
        one.commit(state_of(1), step=1)
        with opened(tmp_path) as opening:
            first = size_of(tmp_path)
            assert len(opening.log.replay().packs) == 2
        # As if it had looked before the other one was done.
        two._opening.objects.locate = lambda ids: np.zeros(len(ids) // 32, LOCATION_DTYPE)  # type: ignore[method-assign]
        two.commit(state_of(1), step=1)
    assert size_of(tmp_path) > 1.9 * first
    collected(tmp_path)
    assert size_of(tmp_path) < 1.1 * first
    verify(tmp_path, [1])
    with open(tmp_path, run="two") as store:
        store.checkout(1).verify()


def test_max_repack_limits_what_is_copied(tmp_path: Path) -> None:
    make(tmp_path, 20)
    assert not collected(tmp_path, GcOptions(0.0, max_repack_bytes=0), dry_run=True).plan.copies
    some = collected(tmp_path, GcOptions(0.0, max_repack_bytes=1_000_000), dry_run=True).plan
    assert 0 < some.copied_bytes < 1_100_000


def test_max_unused_leaves_a_little_dead_where_it_is(tmp_path: Path) -> None:
    with open(tmp_path, chunk_bytes=65536) as store:
        for step in range(4):
            store.commit(state_of(step, own=20_000, shared=2_000_000), step=step)
        store.forget([0])
        assert not store.gc(dry_run=True, max_unused=0.05).plan.copies
        assert store.gc(dry_run=True, max_unused=0.0).plan.copies


# -- sessions -----------------------------------------------------------------------------------------------------------------------


def test_what_a_session_in_flight_may_reuse_is_freed_when_it_ends(tmp_path: Path) -> None:
    make(tmp_path, 6, forget=[0, 1, 2])
    before = size_of(tmp_path)
    with opened(tmp_path) as opening, open_session(opening.backend, "commit") as session:
        plan = collect(opening, GcOptions(max_repack_bytes=0), dry_run=True).plan
        later = plan.freed_later_bytes
        assert list(later) == [(session.id,)]
        report = collect(opening, GcOptions(max_repack_bytes=0))
        assert report.freed_bytes == plan.freed_now_bytes
        with open(tmp_path) as store:
            (activity,) = store.sessions()
            assert (activity.info.id, activity.status, activity.bytes) == (session.id, "active", later[session.id,])
    with opened(tmp_path) as opening, open_session(opening.backend, "a later commit"):
        report = collect(opening, GcOptions(max_repack_bytes=0))
        assert report.freed_bytes == later[session.id,]
    assert size_of(tmp_path) == before - plan.freed_now_bytes - later[session.id,]


def test_an_impatient_gc_waits_for_nobody(tmp_path: Path) -> None:
    make(tmp_path, 6, forget=[0, 1, 2])
    with opened(tmp_path) as opening, open_session(opening.backend, "commit"):
        report = collect(opening, GcOptions(0.0, impatient=True))
        assert not report.plan.freed_later_bytes
    assert not garbage(tmp_path)
    verify(tmp_path, [3, 4, 5])


def test_orphans_of_a_session_that_stands_still_go_after_ten_minutes_even_over_several_short_runs(tmp_path: Path) -> None:
    make(tmp_path, 3)
    session = new_session_id()
    orphan = pack_key(pack_id(session, 0, 0))
    for key in (orphan, f"commits/{session}-{'0' * 64}", f"tmp/{session}-00"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"left behind")
    now_s = 1000.0
    assert collected(tmp_path, clock=lambda: now_s).plan.empty
    assert collected(tmp_path, clock=lambda: now_s + STALE_S - 1).plan.empty
    report = collected(tmp_path, clock=lambda: now_s + STALE_S)
    assert report.over == (session,)
    assert report.freed_bytes == report.plan.freed_now_bytes == 3 * len(b"left behind")
    assert not garbage(tmp_path)


def test_an_active_sessions_files_stay_however_long_they_stand_still(tmp_path: Path) -> None:
    make(tmp_path, 3)
    now_s = 1000.0
    with opened(tmp_path) as opening, open_session(opening.backend, "commit") as session:
        key = f"tmp/{session.id}-00"
        (tmp_path / key).write_bytes(b"being written")
        for minutes in range(0, 40, 5):
            session.beat()
            collected(tmp_path, clock=lambda minutes=minutes: now_s + 60 * minutes)
        assert (tmp_path / key).exists()


def test_orphans_of_a_process_that_is_gone_go_at_once(tmp_path: Path) -> None:
    import os

    make(tmp_path, 3)
    if not (child := os.fork()):
        with opened(tmp_path) as opening:
            session = open_session(opening.backend, "commit")
            (tmp_path / pack_key(pack_id(session.id, 0, 0))).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / pack_key(pack_id(session.id, 0, 0))).write_bytes(b"half a pack")
        os._exit(0)
    os.waitpid(child, 0)
    report = collected(tmp_path)
    assert len(report.over) == 1
    assert not garbage(tmp_path)


def test_unlisted_objects_of_closed_sessions_go_at_once(tmp_path: Path) -> None:
    make(tmp_path, 2)
    session = new_session_id()
    with opened(tmp_path) as opening:
        opening.log.append(Over((session,)))
        opening.backend.put(twin_key(pack_id(session, 3, 1)), b"twin")
    assert collected(tmp_path).freed_bytes == 4
    assert not garbage(tmp_path)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, 2)
    for key in ("packs/readme.txt", "commits/notes", "tmp/mine", "sessions/x", "packs/aa/core.1234"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"mine")
    now_s = 1000.0
    for s in (0, 2 * STALE_S):
        assert collected(tmp_path, clock=lambda s=s: now_s + s).plan.empty


# -- others at work meanwhile -------------------------------------------------------------------------------------------------------


class During:
    """Do something once, when a gc reports this phase."""

    def __init__(self, phase: str, action) -> None:  # type: ignore[no-untyped-def]
        self._phase, self._action = phase, action
        self.done = False

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase == self._phase and not self.done:
            self.done = True
            self._action()


PHASES = ["list objects", "read footers", "read commits", "read pages", "delete packs", "delete orphans", "copy"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_commit_that_reuses_what_gc_is_about_to_delete_keeps_it(tmp_path: Path, phase: str) -> None:
    make(tmp_path, 6, forget=[0, 1, 2])

    def commit() -> None:
        with open(tmp_path) as other:
            other.commit(state_of(1), step=101)

    during = During(phase, commit)
    collected(tmp_path, progress=during)
    assert during.done
    with open(tmp_path) as store:
        assert store.checkout(101).read("model/own").equal(state_of(1)["model"]["own"])
    collected(tmp_path)
    verify(tmp_path, [3, 4, 5])
    assert not garbage(tmp_path)


@pytest.mark.parametrize("phase", PHASES[:4])
def test_an_undelete_during_the_mark_keeps_the_commit(tmp_path: Path, phase: str) -> None:
    commits = make(tmp_path, 6, forget=[0, 1, 2])

    def undelete() -> None:
        with open(tmp_path) as other:
            other.undelete(commits[1])

    report = collected(tmp_path, progress=During(phase, undelete))
    assert set(report.purged) == {commits[0], commits[2]}
    verify(tmp_path, [1, 3, 4, 5])


@pytest.mark.parametrize("phase", PHASES)
def test_another_gc_in_between_makes_this_one_mark_again(tmp_path: Path, phase: str) -> None:
    make(tmp_path, 12, forget=range(0, 10, 2))
    during = During(phase, lambda: collected(tmp_path))
    collected(tmp_path, progress=during)
    assert during.done
    collected(tmp_path)
    assert not garbage(tmp_path)
    verify(tmp_path, [1, 3, 5, 7, 9, 10, 11])


def test_a_reader_that_holds_a_snapshot_finds_chunks_that_moved(tmp_path: Path) -> None:
    make(tmp_path, 12, forget=range(0, 10, 2))
    with open(tmp_path) as reader:
        snapshot = reader.checkout(3)
        collected(tmp_path)
        assert snapshot.state_dict()["model"]["own"].equal(state_of(3)["model"]["own"])


# -- damage -------------------------------------------------------------------------------------------------------------------------


def metadata_packs(place: Path) -> list[str]:
    with opened(place) as opening:
        return [pack_key(pack.id) for pack in opening.log.replay().packs.values() if pack.metadata]


def test_a_damaged_page_is_read_from_the_twin(tmp_path: Path) -> None:
    make(tmp_path, 4, forget=[0])
    for key in metadata_packs(tmp_path):
        data = bytearray((tmp_path / key).read_bytes())
        data[: len(data) // 2] = bytes(len(data) // 2)
        (tmp_path / key).write_bytes(data)
    collected(tmp_path)
    verify(tmp_path, [1, 2, 3])


def test_nothing_is_deleted_if_a_page_cannot_be_read(tmp_path: Path) -> None:
    make(tmp_path, 4, forget=[0])
    for key in metadata_packs(tmp_path):
        (tmp_path / key).unlink()
        (tmp_path / f"{key}.2").unlink()
    before = collecting.objects(tmp_path)
    with pytest.raises(Corrupt, match="cannot be marked"):
        collected(tmp_path)
    assert collecting.objects(tmp_path) == before


def test_a_pack_with_a_damaged_footer_is_left_alone_and_reported(tmp_path: Path) -> None:
    make(tmp_path, 4, forget=[0])
    with opened(tmp_path) as opening:
        data_packs = [pack for pack in opening.log.replay().packs.values() if not pack.metadata]
    bad = max(data_packs, key=lambda pack: pack.bytes)
    path = tmp_path / pack_key(bad.id)
    path.write_bytes(path.read_bytes()[:-1])
    report = collected(tmp_path)
    assert report.plan.unreadable == (bad.id,)
    assert report.plan.missing
    assert path.exists()


def test_a_sparse_pack_with_a_damaged_chunk_stays_and_the_others_move(tmp_path: Path) -> None:
    make(tmp_path, 20)
    with opened(tmp_path) as opening:
        bad = min((n, pack) for n, pack in opening.log.replay().packs.items() if not pack.metadata)[1]
    path = tmp_path / pack_key(bad.id)
    data = bytearray(path.read_bytes())
    data[250_000] ^= 1  # behind what all steps share
    path.write_bytes(data)
    report = collected(tmp_path)
    assert report.damaged == (bad.id,)
    assert path.exists()
    assert report.copied_bytes
    verify(tmp_path, range(1, 20))
