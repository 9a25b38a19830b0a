"""Compacted commits are the same commits in fewer bytes, whatever happens meanwhile."""

import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.core.text import bytes_text
from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.log.entries import Settings
from ckptstore.maintenance import compact as module
from ckptstore.maintenance.compact import remember
from ckptstore.maintenance.compact.coding import Candidates
from ckptstore.maintenance.compact.plan import (
    SETTING,
    CompactPolicy,
    newest_commits,
    plan_groups,
    policy_of,
)
from ckptstore.maintenance.gc.mark import _Marking
from ckptstore.maintenance.retention import KeepLast
from ckptstore.objects import codecs
from ckptstore.restore.reader import RECENT
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.collecting import at, opened
from tests.maintenance.stores import files, flip, heal
from tests.shared.sites import Site
from tests.support.fixtures import scratch

__all__ = ["scratch"]

STEPS = 9
POLICY = CompactPolicy(newest=1, every=4)


@cache
def trained(step: int) -> dict[str, Any]:
    """A state whose weights move a little at each step, with a frozen part and incompressible
    bytes. Nobody changes it."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(60_000, generator=random)
    moves = torch.randn(60_000, generator=torch.Generator().manual_seed(step)) * 1e-4
    return {
        "model": {
            "weight": start * (1 + moves),
            "half": (start[:40_000] * (1 + moves[:40_000] * 10)).to(torch.bfloat16),
            "frozen": torch.arange(30_000, dtype=torch.float32),
            "noise": torch.randint(0, 256, (70_000,), generator=random, dtype=torch.uint8) ^ step,
            "small": torch.full((300,), float(step)),
        },
        "step": step,
    }


def make(place: Path | Site, *, steps: int = STEPS, codec: str = "raw") -> None:
    with at(place).open(codec=codec) as store:
        for step in range(steps):
            store.commit(trained(step), step=step)


def verify(place: Path | Site, steps: Iterable[int] = range(STEPS)) -> None:
    with at(place).open() as store:
        for step in steps:
            got, wanted = store.checkout(step).state_dict()["model"], trained(step)["model"]
            for name, tensor in wanted.items():
                assert torch.equal(got[name], tensor), (step, name)


def packs_bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in (place / "packs").rglob("*") if path.is_file())


@pytest.fixture
def place(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(scratch / "host"))
    return scratch / "store"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that tests copy."""
    made = tmp_path_factory.mktemp("made") / "store"
    make(made)
    return made


@pytest.fixture
def store(place: Path, made: Path) -> Any:
    shutil.copytree(made, place)
    with at(place).open() as found:
        yield found


def test_a_compacted_store_is_smaller_and_holds_the_same(store: Store, place: Path) -> None:
    before, ids = packs_bytes(place), [info.id for info in store.log()]
    report = store.compact(POLICY)
    assert report.deltas > 0
    assert not report.problems
    assert packs_bytes(place) < 0.8 * before
    assert [info.id for info in store.log()] == ids
    verify(place)
    assert not store.fsck("data").findings


def test_a_second_run_finds_nothing_to_do(store: Store, place: Path) -> None:
    store.compact(POLICY)
    before = packs_bytes(place)
    report = store.compact(POLICY)
    assert (report.chunks, report.collected) == (0, ())
    assert packs_bytes(place) == before


def test_the_newest_commits_stay_as_they_are(store: Store, place: Path) -> None:
    store.compact(POLICY)
    newest = store.checkout(STEPS - 1)
    assert torch.equal(newest.open("model/weight"), trained(STEPS - 1)["model"]["weight"])
    with pytest.raises(InvalidInput, match="stored compressed"):
        store.checkout(0).open("model/weight")


def test_an_estimate_changes_nothing_and_is_near(store: Store, place: Path) -> None:
    before = packs_bytes(place)
    estimate = store.compact(POLICY, dry_run=True)
    assert packs_bytes(place) == before
    report = store.compact(POLICY)
    assert estimate.coded_bytes == pytest.approx(report.coded_bytes, rel=0.1)
    assert estimate.stored_bytes == pytest.approx(report.stored_bytes, rel=0.1)


def test_the_command_says_what_compaction_would_free_by_run(store: Store, place: Path) -> None:
    with at(place).open(run="other") as other:
        for step in range(20, 25):
            other.commit(trained(step), step=step)
    with opened(place) as handle:
        handle.log.append(Settings(((SETTING, POLICY.setting),)))
    before = packs_bytes(place)
    asked = ("-s", str(place), "stats", "--what-if", "--compact")
    page, document = call(*asked).out, json.loads(call(*asked, "--json").out)
    assert packs_bytes(place) == before
    found = {run["run"]: run for run in document["compact"]}
    assert [(name, run["commits"]) for name, run in found.items()] == [("main", 8), ("other", 4)]
    assert "would free" in page
    both = json.loads(call(*asked, "--keep-last", "2", "--json").out)
    assert both["compact"] == document["compact"] and both["runs"]
    report = store.compact(POLICY)
    for name in ("stored_bytes", "coded_bytes"):
        total = sum(run[name] for run in found.values())
        assert total == pytest.approx(getattr(report, name), rel=0.1)


def test_a_gc_says_what_its_compaction_cannot_read(store: Store, place: Path) -> None:
    with opened(place) as handle:
        remember(handle, POLICY)
    for pack in files(place, "packs"):
        if pack.stat().st_size > 200_000:
            flip(pack, 100_000)
    result = call("gc", "-s", str(place), "--json")
    assert result.code == 3
    assert "being compacted" in result.err
    assert "being compacted" in result.document["done"]["not_compacted"][0]


@pytest.mark.parametrize("gone", [[0, 1, 3], [2], [0, 1, 2, 3, 5, 6]])
def test_a_base_stays_as_long_as_a_difference_needs_it(
    store: Store, place: Path, gone: list[int]
) -> None:
    store.compact(POLICY)
    store.forget(gone)
    store.gc(grace_s=0, max_unused=0)
    kept = [step for step in range(STEPS) if step not in gone]
    verify(place, kept)
    report = store.fsck("data")
    assert not report.findings
    with opened(place) as handle:
        packs = handle.log.replay().packs.values()
        assert all(pack.live for pack in packs)


def test_a_gc_compacts_where_the_settings_say_so(store: Store, place: Path) -> None:
    with opened(place) as handle:
        remember(handle, CompactPolicy(newest=1, every=STEPS))
    before = packs_bytes(place)
    store.gc()
    assert packs_bytes(place) > 0.99 * before, "the group is not full"
    store.compact(POLICY, with_gc=True, dry_run=True)
    store.commit(trained(STEPS), step=STEPS)
    with opened(place) as handle:
        assert policy_of(handle.log.replay()) == CompactPolicy(newest=1, every=STEPS)
    assert store.gc().freed_bytes > 0
    assert packs_bytes(place) < 0.8 * before
    verify(place, range(STEPS + 1))
    store.compact(POLICY, with_gc=True)
    with opened(place) as handle:
        assert policy_of(handle.log.replay()) == POLICY
    store.compact(POLICY, with_gc=False)
    with opened(place) as handle:
        assert policy_of(handle.log.replay()) is None


@pytest.mark.parametrize("setting", ["x", ("newest",), ("newest=x",), ("other=1",), ("every=0",)])
def test_a_setting_that_nobody_understands_is_none(store: Store, setting: Any) -> None:
    with opened(Path(store.url)) as handle:
        handle.log.append(Settings(((SETTING, setting),)))
        assert policy_of(handle.log.replay()) is None


def test_a_wrong_number_of_threads_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInput, match="threads is 0"):
        store.compact(threads=0)


def test_a_run_with_fewer_commits_than_stay_as_they_are_has_no_groups(
    store: Store, place: Path
) -> None:
    with opened(place) as handle:
        state = handle.log.replay()
        policy = CompactPolicy(newest=STEPS + 4, every=4)
        assert plan_groups(state, policy) == []
        assert set(newest_commits(state, policy)) == set(state.commits)


def test_groups_end_before_the_newest_commits_and_have_their_key_in_the_middle(
    store: Store, place: Path
) -> None:
    store.tag("keep", 1)
    with opened(place) as handle:
        groups = plan_groups(handle.log.replay(), POLICY)
        last = plan_groups(handle.log.replay(), CompactPolicy(newest=0, every=8))
    assert [(len(group.commits), group.key) for group in groups] == [(4, 1), (4, 2)]
    assert [len(group.commits) for group in last] == [8, 1]


@pytest.mark.parametrize("wrong", [{"newest": -1}, {"every": 0}])
def test_a_policy_without_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="wanted"):
        CompactPolicy(**wrong)


def test_a_thinned_commit_keeps_its_place_among_the_compacted(store: Store, place: Path) -> None:
    store.forget([KeepLast(2).thin("model/noise")])
    with opened(place) as handle:
        state = handle.log.replay()
        groups = plan_groups(state, POLICY)
    assert list(store.compact(POLICY).groups) == groups
    with opened(place) as handle:
        steps = [state.commits[commit].step for group in groups for commit in group.commits]
    assert steps == list(range(STEPS - 1))
    for step in range(STEPS - 2):
        weight = store.checkout(step).read("model/weight")
        assert torch.equal(weight, trained(step)["model"]["weight"])
    verify(place, [STEPS - 2, STEPS - 1])
    assert not store.fsck("data").findings


@pytest.mark.parametrize("dry_run", [False, True])
def test_commits_that_are_purged_meanwhile_are_passed_over(place: Path, dry_run: bool) -> None:
    """Of more commits than a reader remembers."""
    steps, kept = 3 * RECENT, 4

    def purge(stage: str, done: int, _total: int) -> None:
        if stage.startswith("compact ") and done and len(store.log()) == steps:
            with at(place).open() as other:
                other.forget(KeepLast(kept))
                other.gc(grace_s=0)

    with at(place).open() as store:
        for step in range(steps):
            store.commit({"x": torch.arange(300.0) + step}, step=step)
        report = store.compact(CompactPolicy(newest=1, every=2), dry_run=dry_run, progress=purge)
        assert report.chunks
        assert len(store.log()) == kept
        assert not store.fsck("data").findings


@pytest.mark.parametrize("dry_run", [False, True])
def test_another_compaction_meanwhile_leaves_nothing_to_do_and_no_damage(
    store: Store, place: Path, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another host, which has an index of its own."""
    monkeypatch.setattr(module, "ENTRY_BYTES", 1)
    policy, others = CompactPolicy(newest=1, every=2), list[Any]()

    def compact(stage: str, done: int, _total: int) -> None:
        if stage.startswith("compact ") and done and not others:
            monkeypatch.setenv("CKPTSTORE_CACHE", str(place.parent / "other host"))
            with at(place).open() as other:
                others.append(other.compact(policy))
                other.gc(grace_s=0, force=True)

    report = store.compact(policy, dry_run=dry_run, progress=compact)
    assert report.chunks and others[0].chunks
    assert not report.problems
    verify(place)
    assert not store.fsck("data").findings


def test_another_compaction_may_delete_a_pack_before_its_footer_is_read(
    store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, others = CompactPolicy(newest=0, every=2), list[Any]()
    is_fixed = Candidates._is_fixed

    def compact_and_look(*what: Any) -> Any:
        if not others:
            others.append(None)
            with at(place).open() as other:
                others.append(other.compact(policy))
                other.gc(grace_s=0, max_unused=0.0, force=True)
        return is_fixed(*what)

    monkeypatch.setattr(Candidates, "_is_fixed", compact_and_look)
    assert not store.compact(policy).problems
    assert others[1].chunks
    verify(place)
    assert not store.fsck("data").findings


def test_a_lost_configuration_is_not_taken_for_that_of_a_store_with_zstd(
    store: Store, place: Path
) -> None:
    store.compact(POLICY)
    (place / "ckptstore.json").write_bytes(b"{}")
    heal(place)
    with opened(place) as handle:
        assert handle.config.codec == "raw"
    verify(place)


def test_a_base_that_only_differences_need_is_not_unreferenced(store: Store) -> None:
    store.compact(POLICY)
    store.gc(grace_s=0, max_unused=0)
    rest = store.usage().unreferenced_bytes  # footers, and gaps between runs
    base, *others = (2, 0, 1, 3)
    store.forget([base])
    store.gc(grace_s=0, max_unused=0)
    found = store.usage()
    assert found.unreferenced_bytes < rest + 4096  # the gc that moved raw runs may leave a gap more
    needed = store.forecast([KeepLast(1)], all_runs=True).needed_bytes
    assert needed == found.stored_bytes - found.unreferenced_bytes
    weights = len(trained(0)["model"]["weight"]) * 4
    exclusive = [commit.exclusive_bytes for commit in store.usage().commits]
    store.forget(others[1:])
    store.gc(grace_s=0, max_unused=0)
    grown = store.usage().commits[-1].exclusive_bytes - exclusive[-1]
    assert grown > weights / 2, "the base is now needed by one commit alone"


def test_a_compaction_says_what_it_left_and_why(tmp_path: Path) -> None:
    make(tmp_path, steps=8)
    words = ("-s", str(tmp_path), "compact", "--newest", "2", "--every", "4")
    first = call(*words)
    assert "6 commits in 2 groups" in first.out
    assert "left 2 commits unchanged: the newest 2 of each run (--newest)" in first.out
    again = call(*words, "--json").document
    assert (again["newest"], again["finished"], again["chunks"]) == (2, 4, 0)
    last = call(*words).out
    assert "left 4 commits: compacted before" in last
    assert "left all chunks of these groups: coded already" in last


def test_a_group_that_is_not_full_is_coded_and_goes_on_once_it_has_more(
    store: Store, place: Path
) -> None:
    policy = CompactPolicy(newest=1, every=16)
    before = packs_bytes(place)
    assert store.compact(policy).deltas > 0
    assert packs_bytes(place) < 0.8 * before
    for step in range(STEPS, STEPS + 3):
        store.commit(trained(step), step=step)
    report = store.compact(policy)
    assert (report.groups[0].full, report.commits) == (False, STEPS + 2)
    assert report.deltas > 0
    verify(place, range(STEPS + 3))
    assert not store.fsck("data").findings


def test_a_commit_that_was_coded_alone_gets_differences_later(store: Store, place: Path) -> None:
    """What comes one commit at a time is coded in pairs: the base is coded as planes before."""
    store.compact(CompactPolicy(newest=STEPS - 1, every=4))
    report = store.compact(CompactPolicy(newest=STEPS - 2, every=4))
    assert report.deltas > 0
    verify(place)
    assert not store.fsck("data").findings


def test_a_compaction_of_chunks_that_are_planes_already_makes_the_store_no_larger(
    place: Path,
) -> None:
    make(place, codec="zstd")
    before = packs_bytes(place)
    with at(place).open() as store:
        report = store.compact(POLICY)
        assert report.deltas > 0
        assert report.freed_bytes > 0
    assert packs_bytes(place) < before
    verify(place)


def test_of_old_packs_nothing_stays_for_a_few_chunks_that_were_not_coded(place: Path) -> None:
    """Though what is dead in one of them is little of the store."""
    with at(place).open() as store:
        store.commit({"large": torch.randint(0, 256, (8_000_000,), dtype=torch.uint8)}, step=0)
        for step in range(1, 5):
            store.commit(trained(step), step=step)
        assert store.compact(CompactPolicy(newest=0)).left_bytes == 0
        report = store.gc(max_unused=0, dry_run=True)
        assert not report.plan.copies
    verify(place, range(1, 5))


def test_patches_stay_and_the_chunks_they_begin_with_are_coded(place: Path) -> None:
    """But for those of which the newest commit is made."""
    random = torch.Generator().manual_seed(0)
    wanted = []
    with at(place).open() as store:
        for step in range(6):
            if step in (0, 3):
                weight = torch.randn(300_000, generator=random)
            weight[torch.randint(len(weight), (300,), generator=random)] += 1e-3
            wanted.append(weight.clone())
            store.commit({"weight": weight}, step=step)
        before = packs_bytes(place)
        whole = before // weight.nbytes
        assert 2 <= whole < 6
        report = store.compact(CompactPolicy(newest=1))
        assert report.raw_bytes == (whole - 1) * weight.nbytes
        assert packs_bytes(place) < 0.95 * before
        for step, tensor in enumerate(wanted):
            assert torch.equal(store.checkout(step).read("weight"), tensor)
        assert not store.fsck("data").findings


@pytest.mark.parametrize(
    ("name", "turned"), [("encode_planes", 0), ("encode_delta", 0), ("encode_delta", 1)]
)
def test_a_bit_that_turns_in_memory_while_a_chunk_is_coded_is_noticed(
    store: Store, place: Path, monkeypatch: pytest.MonkeyPatch, name: str, turned: int
) -> None:
    """In the chunk, or in the base of its difference: what is made of it comes back as that."""
    encode = getattr(codecs, name)

    def after(*given: Any) -> Any:
        given[turned][-1] ^= 1
        return encode(*given)

    monkeypatch.setattr(codecs, name, after)
    before = {path.name for path in files(place, "packs")}
    with pytest.raises(Corrupt, match="does not come back"):
        store.compact(POLICY)
    assert before == {path.name for path in files(place, "packs")}
    assert not store.fsck("data").findings


@pytest.mark.parametrize("name", ["encode_planes", "encode_delta"])
def test_a_codec_whose_chunks_do_not_come_back_writes_none(
    store: Store, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    encode = getattr(codecs, name)

    def wrong(raw: memoryview, *others: Any) -> bytes:
        return encode(memoryview(bytes(raw[:-1]) + bytes([raw[-1] ^ 1])), *others)

    monkeypatch.setattr(codecs, name, wrong)
    before = {path.name for path in files(place, "packs")}
    with pytest.raises(Corrupt, match="does not come back"):
        store.compact(POLICY)
    assert {path.name for path in files(place, "packs")} == before
    verify(place)


def test_a_gc_reads_no_chunk_that_this_compaction_has_just_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()
    damaged = _Marking._damaged

    def counting(marking: Any, i: int, rows: list[int]) -> list[int]:
        read.extend(rows)
        return damaged(marking, i, rows)

    monkeypatch.setattr(_Marking, "_damaged", counting)
    assert store.compact(POLICY).chunks
    assert not read


def test_what_was_freed_is_what_the_disk_gained(tmp_path: Path) -> None:
    make(tmp_path)

    def packs() -> int:
        return sum(path.stat().st_size for path in files(tmp_path, "packs"))

    before = packs()
    with at(tmp_path).open() as store:
        report = store.compact(POLICY)
    assert report.written_bytes > 0
    orphans = report.deleted_bytes - (before - packs() + report.written_bytes)
    assert report.freed_bytes == before - packs() + orphans
    assert abs(orphans) < 20_000  # session files and documents, which are no packs
    assert f"deleted {bytes_text(report.deleted_bytes)}, wrote " in str(report)
