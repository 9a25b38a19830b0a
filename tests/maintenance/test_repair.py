"""repair heals what can be proved, names what cannot, changes nothing in a dry run and deletes
nothing at all."""

import hashlib
import secrets
import shutil
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.cli.main import main as cli
from ckptstore.core.ids import (
    ChunkId,
    digest,
    log_key,
    new_session_id,
    pack_key,
    segment_key,
    twin_key,
)
from ckptstore.errors import Conflict, Corrupt, NotFound
from ckptstore.log.entries import Entry, Moved, Over, encode_entry
from ckptstore.log.log_backend import SEGMENT_ENTRIES
from ckptstore.log.state import Pack
from ckptstore.maintenance import rescue, silent
from ckptstore.maintenance.check import Kind, Level, Share
from ckptstore.maintenance.check.fsck import examine
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.maintenance.repair import (
    Mark,
    PutBack,
    Rebuild,
    SetAside,
    WriteConfig,
    plan_repair,
)
from ckptstore.maintenance.rescue import SavePacks, Source, write_packs
from ckptstore.objects import codecs
from ckptstore.objects.pack import PAGE, SCHEMA, entries
from ckptstore.repository.chunk_reader import keys_of
from ckptstore.repository.footers import read_table
from ckptstore.repository.pack_writer import PackSet, new_chunk
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.maintenance.stopping import Stopped, StoppingBackend
from tests.maintenance.stores import (
    assert_restores,
    check,
    copy_of,
    files,
    flip,
    heal,
    large_state,
    make_store,
)


@pytest.fixture(scope="module")
def large_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("large") / "store", states=large_state)


@pytest.fixture
def large(large_template: Path, tmp_path: Path) -> Path:
    return copy_of(large_template, tmp_path / "large")


def packs_of(store: Path, *, metadata: bool) -> list[Pack]:
    handle = StoreHandle(store)
    try:
        return [
            pack
            for _, pack in sorted(handle.log.replay().packs.items())
            if pack.metadata is metadata
        ]
    finally:
        handle.close()


def fingerprint(store: Path) -> dict[str, str]:
    """Every file but the indexes, which fsck may open."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and "index" not in path.relative_to(store).parts
    }


def assert_whole(store: Path) -> None:
    report = check(store, Level.DATA)
    assert report.findings == (), report.findings
    with ckptstore.open(store) as opened:
        for step in range(3):
            assert_restores(opened, step, step)
        assert_restores(opened, "other@100", 100)
        assert_restores(opened, "first", 0)
        assert_restores(opened, "moved", 1)


def test_a_whole_store_needs_nothing(store: Path) -> None:
    done = heal(store)
    assert (done.plan.actions, done.applied) == ((), ())


def test_a_dry_run_changes_nothing(store: Path, tmp_path: Path) -> None:
    flip(store / "log" / "000000000002", 80)
    flip(store / pack_key(packs_of_damaged(store)), 5)
    before = fingerprint(store)
    done = heal(store, apply=False)
    assert done.plan.actions
    assert done.applied == ()
    assert fingerprint(store) == before


def packs_of_damaged(store: Path) -> str:
    return files(store, "packs")[0].name.removesuffix(".2")  # type: ignore[return-value]


def test_the_chunks_of_a_damaged_twin_are_saved_from_its_sibling(store: Path) -> None:
    for key in (pack_key, twin_key):
        for pack in packs_of(store, metadata=True):
            flip(store / key(pack.id), 3)
        done = heal(store)
        assert {type(action) for action in done.applied} == {SavePacks}
        assert_whole(store)


def test_a_lost_twin_and_a_truncated_one_are_made_again(store: Path) -> None:
    first, second, *_ = packs_of(store, metadata=True)
    (store / twin_key(first.id)).unlink()
    (store / pack_key(second.id)).write_bytes((store / pack_key(second.id)).read_bytes()[:-10])
    heal(store)
    assert_whole(store)


@pytest.mark.parametrize("n", range(1, 6))
def test_a_bit_in_a_log_entry_is_turned_back(store: Path, n: int) -> None:
    path = store / "log" / f"{n:012d}"
    whole = path.read_bytes()
    for offset in (0, 63, 64, 65, 100, len(whole) - 1):
        flip(path, offset, bit=1)
        done = heal(store)
        assert [type(action) for action in done.applied if not isinstance(action, Rebuild)] == [
            PutBack
        ]
        assert path.read_bytes() == whole
    assert_whole(store)


def test_a_lost_log_entry_comes_from_a_mirror_or_not_at_all(store: Path, tmp_path: Path) -> None:
    mirror = copy_of(store, tmp_path / "mirror")
    path = store / "log" / "000000000003"
    path.unlink()
    (store / "index" / "catalog.sqlite").unlink()
    done = heal(store)
    assert not path.exists()
    assert [finding.entry for finding in done.plan.unrepairable] == [3]
    with pytest.raises(Corrupt), ckptstore.open(store) as opened:
        opened.log()
    heal(store, mirror)
    assert path.read_bytes() == (mirror / "log" / path.name).read_bytes()
    assert_whole(store)


@pytest.mark.parametrize("n", range(1, 6))
def test_a_lost_log_entry_comes_from_the_catalog(store: Path, n: int) -> None:
    path = store / "log" / f"{n:012d}"
    whole = path.read_bytes()
    path.unlink()
    done = heal(store)
    assert isinstance(done.applied[0], PutBack)
    assert done.applied[0].origin == "the catalog's copy"
    assert path.read_bytes() == whole
    assert_whole(store)


def test_an_entry_of_a_mirror_with_another_history_is_not_taken(
    store: Path, tmp_path: Path
) -> None:
    mirror = copy_of(store, tmp_path / "mirror")
    for path in (store, mirror):
        with ckptstore.open(path) as opened:
            opened.tag("theirs" if path is mirror else "ours", 2)
            opened.tag("more", 2)
    lost = store / "log" / "000000000006"
    lost.unlink()
    (store / "index" / "catalog.sqlite").unlink()
    done = heal(store, mirror)
    assert not lost.exists()
    assert any(finding.entry == 6 for finding in done.plan.unrepairable)


def test_the_last_log_entry_is_missed_if_the_catalog_remembers_it(
    store: Path, tmp_path: Path
) -> None:
    mirror = copy_of(store, tmp_path / "mirror")
    (store / "log" / "000000000005").unlink()
    assert [f.entry for f in check(store).findings if f.kind is Kind.ENTRY and f.entry] == [5]
    heal(store, mirror)
    assert_whole(store)


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_log_that_lost_its_end_is_not_continued_and_gets_it_back(
    store: Path, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = fingerprint(store)
    for n in range(6 - lost, 6):
        (store / "log" / f"{n:012d}").unlink()
    with pytest.raises(
        Corrupt, match=rf"ends at entry {5 - lost}, .* up to 5, .*`ckptstore repair --apply`"
    ):
        ckptstore.open(store)
    with ckptstore.open(store, read_only=True) as opened:
        assert len(opened.log()) == 5 - lost
    for command in (["tag", "x", "main@0"], ["forget", "main@0"], ["gc"]):
        assert cli(["-s", str(store), *command]) == Exit.DAMAGED
    assert cli(["-s", str(store), "log"]) == Exit.OK
    assert "repair --apply" in caplog.text
    heal(store)
    assert fingerprint(store) == before
    assert_whole(store)


def test_a_store_that_was_set_back_on_purpose_goes_on_after_reindex(store: Path) -> None:
    (store / "log" / "000000000005").unlink()
    assert cli(["-s", str(store), "reindex"]) == Exit.OK
    with ckptstore.open(store) as opened:
        opened.commit({"n": 1}, step=7)
        assert [info.step for info in opened.log(run="main")] == [7, 2, 1, 0]


def test_a_damaged_document_is_recovered_from_its_own_bytes_or_a_mirror(
    store: Path, tmp_path: Path
) -> None:
    mirror = copy_of(store, tmp_path / "mirror")
    one, two, *_ = files(store, "commits")
    flip(one, 40, bit=3)
    two.unlink()
    done = heal(store)
    assert (
        len(done.applied) == 2
    )  # the document that is gone leaves a damaged commit, which is marked
    assert isinstance(done.applied[-1], Mark)
    assert done.applied[-1].commits == (two.name[25:],)
    done = heal(store, mirror)
    assert done.applied[-1] == Mark(())
    assert_whole(store)


@pytest.mark.parametrize("changes", range(4))
def test_a_repair_that_ends_midway_leaves_a_document_that_heals_itself(
    store: Path, changes: int
) -> None:
    """Its damaged bytes are all that is left of it."""
    flip(files(store, "commits")[0], 40, bit=3)
    with open_offline_store(store) as offline_store:
        facts = examine(offline_store, share=None, progress=silent)
        (action,) = plan_repair(facts, []).actions
        stopping = StoppingBackend(offline_store.storage, changes)
        with suppress(Stopped):
            action.apply(replace(offline_store, storage=cast(Storage, stopping)))
    heal(store)
    assert_whole(store)


def test_verified_chunks_are_saved_from_a_damaged_pack(large: Path) -> None:
    pack = max(packs_of(large, metadata=False), key=lambda pack: pack.chunks)
    assert pack.chunks > 3
    flip(large / pack_key(pack.id), 70_000)
    before = check(large, Level.DATA)
    (commit,) = before.damaged_commits
    done = heal(large)
    saved = next(action for action in done.applied if isinstance(action, SavePacks))
    assert len(saved.sources) == pack.chunks - 1
    assert len(saved.lost) == 1
    assert done.applied[-1] == Mark((commit,))
    assert done.after.damaged_commits.keys() == {commit}
    assert not (large / pack_key(pack.id)).exists()
    assert (large / "quarantine" / pack_key(pack.id)).exists()
    with ckptstore.open(large) as opened:
        with pytest.raises((Corrupt, NotFound)):
            opened.checkout(commit).state_dict()
        steps = {info.step: info.id for info in opened.log()}
        for step, other in steps.items():
            if other != commit:
                assert_restores(opened, other, int(step or 0), large_state)


def test_a_rescue_that_is_refused_leaves_no_packs_behind(large: Path) -> None:
    """Each of ten attempts would leave all that was saved, on a disk that may be full."""
    pack = max(packs_of(large, metadata=False), key=lambda pack: pack.chunks)
    flip(large / pack_key(pack.id), 70_000)
    with open_offline_store(large) as offline_store:
        facts = examine(offline_store, share=Share(), progress=silent)
        (save,) = (a for a in plan_repair(facts, []).actions if isinstance(a, SavePacks))
    with ckptstore.open(large, run="aside") as opened:
        first, *_ = (opened.commit({"x": secrets.token_bytes(4096)}).id for _ in range(3))
        opened.forget(first)
        opened.gc(grace_s=0)
    with open_offline_store(large) as offline_store, pytest.raises(Conflict, match="condemned"):
        save.apply(offline_store)
    listed = {
        key for each in (False, True) for p in packs_of(large, metadata=each) for key in keys_of(p)
    }
    there = {str(path.relative_to(large)) for path in large.glob("packs/*/*")}
    assert there == listed


def test_a_lost_chunk_is_healed_from_a_mirror(large: Path, tmp_path: Path) -> None:
    mirror = copy_of(large, tmp_path / "mirror")
    for pack in packs_of(large, metadata=False):
        (large / pack_key(pack.id)).unlink()
    done = heal(large, mirror)
    assert not done.plan.unrepairable
    report = check(large, Level.DATA)
    assert report.findings == ()
    with ckptstore.open(large) as opened:
        for step in range(3):
            assert_restores(opened, step, step, large_state)


def test_a_lost_chunk_is_healed_by_committing_it_again(large: Path) -> None:
    """First repair takes the damaged pack out of the log, so that a commit writes the chunk anew
    instead of reusing it."""
    pack = max(packs_of(large, metadata=False), key=lambda pack: pack.chunks)
    flip(large / pack_key(pack.id), 70_000)
    (commit,) = check(large, Level.DATA).damaged_commits
    heal(large)
    with ckptstore.open(large) as opened:
        step = int(opened.checkout(commit).step or 0)
        opened.commit(large_state(step), step=1000)
        assert_restores(opened, commit, step, large_state)
    done = heal(large)
    assert done.applied == (Mark(()),)
    assert check(large, Level.DATA).findings == ()


def test_a_small_chunk_with_a_flipped_bit_heals_itself(store: Path) -> None:
    pack = packs_of(store, metadata=False)[0]
    flip(store / pack_key(pack.id), 17, bit=6)
    done = heal(store)
    assert not done.plan.unrepairable
    assert_whole(store)


@pytest.mark.parametrize("from_end", [200, 90, 72, 50, 1])
def test_a_footer_with_a_flipped_bit_heals_itself(store: Path, from_end: int) -> None:
    """Bytes of the footer and of each part of the trailer; nothing else knows the chunks."""
    for pack in packs_of(store, metadata=False):
        flip(store / pack_key(pack.id), pack.bytes - from_end, bit=5)
    shutil.rmtree(store / "index")
    done = heal(store)
    assert not done.plan.unrepairable
    assert_whole(store)


def test_twins_that_both_have_a_flipped_bit_in_the_footer_heal(store: Path) -> None:
    for pack in packs_of(store, metadata=True):
        for key in (pack_key, twin_key):
            flip(store / key(pack.id), pack.bytes - 90)
    shutil.rmtree(store / "index")
    done = heal(store)
    assert not done.plan.unrepairable
    assert_whole(store)


def test_a_large_chunk_and_a_chunk_with_two_flipped_bits_stay_lost(
    store: Path, large: Path
) -> None:
    for place, offsets in ((store, (17, 18)), (large, (70_000,))):
        pack = max(packs_of(place, metadata=False), key=lambda pack: pack.chunks)
        for offset in offsets:
            flip(place / pack_key(pack.id), offset)
        done = heal(place)
        assert done.plan.unrepairable
        assert check(place, Level.DATA).damaged_commits


def test_a_repair_searches_once_for_the_bit_that_damaged_a_chunk(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rounds it takes."""
    pack = max(packs_of(store, metadata=False), key=lambda pack: pack.chunks)
    with closing(open_storage(str(store))) as storage:
        first = entries(read_table(storage, pack))[0]
    for offset in (0, 1):
        flip(store / pack_key(pack.id), first.offset + offset)
    taken: list[int] = []
    monkeypatch.setattr(rescue, "digest", lambda data: taken.append(len(data)) or digest(data))
    assert heal(store).plan.unrepairable
    assert len(taken) == 8 * first.stored_bytes


def test_packs_with_damaged_footers_are_saved_whole(store: Path) -> None:
    for pack in packs_of(store, metadata=False):
        flip(store / pack_key(pack.id), pack.bytes - 90)
    done = heal(store, data=False)
    assert not done.plan.unrepairable
    assert_whole(store)


def test_both_twins_damaged_in_different_chunks_are_saved(store: Path) -> None:
    pack = packs_of(store, metadata=True)[0]
    assert pack.chunks > 1
    flip(store / pack_key(pack.id), 3)
    flip(store / twin_key(pack.id), 700)
    heal(store)
    assert_whole(store)


def test_what_an_earlier_fsck_found_is_repaired_without_reading_everything_again(
    large: Path, tmp_path: Path
) -> None:
    mirror = copy_of(large, tmp_path / "mirror")
    pack = packs_of(large, metadata=False)[0]
    flip(large / pack_key(pack.id), 70_000)
    assert heal(large, data=False).applied == ()
    assert check(large, Level.DATA).damaged
    done = heal(large, mirror, data=False)
    assert any(isinstance(action, SavePacks) for action in done.applied)
    assert check(large, Level.DATA).findings == ()


def test_a_damaged_config_is_written_again_exactly(store: Path) -> None:
    path = store / "ckptstore.json"
    whole = path.read_bytes()
    for offset in range(0, len(whole), 61):
        flip(path, offset, bit=2)
        with pytest.raises(ckptstore.CkptStoreError):
            ckptstore.open(store).close()
        heal(store, data=False)
        assert path.read_bytes() == whole
    assert_whole(store)


@pytest.mark.parametrize("bit", [0, None])
def test_a_lost_config_is_not_made_where_the_place_of_the_log_is_lost_too(
    store: Path, bit: int | None
) -> None:
    """Those who appended to the copies of a log in a database would fork it."""
    with ckptstore.open(store) as opened:
        log = opened._handle.log
        n = log.append(Moved("postgresql://host/database#" + "0" * 32, 2)).n
    if bit is None:  # the copies of later entries are there, and it is gone
        state = log.replay()
        later = Entry(n + 1, "0" * 32, 1, state.store, 2, state.hash, state.bytes, Over(()))
        (store / log_key(n + 1)).write_bytes(encode_entry(later))
        (store / log_key(n)).unlink()
    else:
        flip(store / log_key(n), 3, bit)
    (store / "ckptstore.json").unlink()
    with pytest.raises(Corrupt, match="where the log went"), open_offline_store(store):
        pass


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_lost_config_is_inferred_from_the_rest(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path / "store", codec=codec, states=large_state)
    path = store / "ckptstore.json"
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(Corrupt):
        ckptstore.open(store)
    done = heal(store)
    (action,) = done.applied
    assert isinstance(action, WriteConfig)
    assert path.read_bytes() == whole
    with ckptstore.open(store) as opened:
        for step in range(3):
            assert_restores(opened, step, step, large_state)


def test_an_index_that_disagrees_is_rebuilt(store: Path) -> None:
    import sqlite3

    with sqlite3.connect(store / "index" / "catalog.sqlite") as connection:
        connection.execute("UPDATE tags SET commit_id = (SELECT id FROM commits WHERE step = 2)")
    connection.close()
    done = heal(store)
    assert [type(action) for action in done.applied] == [Rebuild]
    assert_whole(store)


def test_a_segment_of_the_log_gives_back_an_entry_and_is_set_aside_when_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path))
    place = f"memory://{secrets.token_hex(8)}"
    with ckptstore.open(place) as store:
        store.commit({"x": 1}, step=1)
        for i in range(SEGMENT_ENTRIES):
            store.tag(f"t{i}", 1)
    storage = open_storage(place)
    lost, segment = storage.read(log_key(7)), segment_key(SEGMENT_ENTRIES)
    storage.delete(log_key(7))
    shutil.rmtree(tmp_path)  # the catalog has copies, too
    (action,) = heal(place).applied
    assert isinstance(action, PutBack) and action.origin == "a segment of the log"
    assert storage.read(log_key(7)) == lost
    storage.put(segment, storage.read(segment)[:-1])
    (finding,) = check(place).findings
    assert finding.key == segment
    (action,) = heal(place).applied
    assert isinstance(action, SetAside)
    assert storage.size(segment) is None and storage.size(f"quarantine/{segment}") is not None
    assert check(place).findings == ()


def test_saved_metadata_keeps_its_kinds(tmp_path: Path) -> None:
    """A page that is recorded as the schema beside it, which has as many bytes, is a page that no
    gc finds."""
    storage = open_storage(str(tmp_path / "store"))
    packs = PackSet(storage, new_session_id(), ThreadPool(1), codec=codecs.RAW)
    with packs.writing(metadata=True) as writer:
        for kind in (SCHEMA, PAGE):
            data = secrets.token_bytes(64)
            chunk = new_chunk(ChunkId(digest(data)), memoryview(data))
            writer.add([chunk], 1, kind, codec=codecs.ZSTD, run_bytes=len(data))
    packs.wait()
    (closed,) = packs.closed
    there = entries(closed.table)
    sources = [Source(storage, pack_key(closed.record.id), entry) for entry in there]
    (saved,) = (pack.record for pack in write_packs(storage, sources, new_session_id()).closed)
    kinds = {entry.chunk: entry.kind for entry in entries(read_table(storage, saved))}
    assert kinds == {entry.chunk: entry.kind for entry in there}


def test_what_a_gc_deletes_while_it_is_set_aside_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log does not list it any more, so both may take it."""
    storage, key, name = open_storage(str(tmp_path)), "packs/ab/pack", rescue.give_name
    storage.put(key, b"what it was")

    def late(root: str, source: str, target: str) -> None:
        storage.delete(key)
        name(root, source, target)

    monkeypatch.setattr(rescue, "give_name", late)
    rescue.quarantine(storage, key)
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == []
