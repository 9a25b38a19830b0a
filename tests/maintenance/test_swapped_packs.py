"""Packs whose files were swapped: every reader finds the bytes, and fsck reports the disagreeing
index."""

from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import pack_key, twin_key
from ckptstore.log.state import Pack
from ckptstore.maintenance.check import Kind, Level, Share
from ckptstore.maintenance.repair import Rebuild
from tests.maintenance.collecting import opened
from tests.maintenance.stores import assert_restores, check, heal, large_state, make_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", states=large_state)


def _of_one_size(store: Path, *, metadata: bool) -> tuple[Pack, Pack]:
    with opened(store) as handle:
        packs = [
            pack
            for _, pack in sorted(handle.log.replay().packs.items())
            if pack.metadata is metadata
        ]
    return next(
        (one, other)
        for one in packs
        for other in packs
        if one.id != other.id and one.bytes == other.bytes
    )


def _swap(one: Path, other: Path) -> None:
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)


def _swap_data(store: Path) -> None:
    one, other = _of_one_size(store, metadata=False)
    _swap(store / pack_key(one.id), store / pack_key(other.id))


def _assert_whole(store: Path) -> None:
    with ckptstore.open(store) as opened_store:
        for step in range(3):
            assert_restores(opened_store, step, step, large_state)
        assert_restores(opened_store, "other@100", 100, large_state)
    assert check(store, Level.DATA, Share()).findings == ()


def test_fsck_says_that_the_index_looks_in_the_wrong_pack_and_repair_mends_it(store: Path) -> None:
    _swap_data(store)
    found = check(store).findings
    assert {finding.kind for finding in found} == {Kind.CHUNK_INDEX}
    assert [type(action) for action in heal(store).applied] == [Rebuild]
    assert check(store, Level.DATA, Share()).findings == ()
    _assert_whole(store)


def test_no_commit_relies_on_a_pack_that_another_has_replaced(store: Path) -> None:
    """Its chunks are nowhere. The index, which knew them, is made anew, so that who commits them
    again stores them."""
    one, other = _of_one_size(store, metadata=False)
    (store / pack_key(one.id)).write_bytes((store / pack_key(other.id)).read_bytes())
    assert Kind.CHUNK_INDEX in {finding.kind for finding in check(store).findings}
    assert heal(store).after.damaged
    with ckptstore.open(store, run="again") as again:
        made = [again.commit(large_state(step), step=step).id for step in (0, 1, 2, 100)]
    with ckptstore.open(store) as opened_store:
        for commit, step in zip(made, (0, 1, 2, 100), strict=True):
            assert_restores(opened_store, commit, step, large_state)


def test_a_restore_finds_what_lies_in_the_other_pack(store: Path) -> None:
    _swap_data(store)
    _assert_whole(store)


def test_a_restore_of_a_store_that_is_open_already_does_so_too(store: Path) -> None:
    with ckptstore.open(store) as trainer:
        assert_restores(trainer, 1, 1, large_state)
        _swap_data(store)
        for step in range(3):
            assert_restores(trainer, step, step, large_state)


def test_metadata_that_changed_places_with_its_twins_sibling_is_saved_from_all_four(
    store: Path,
) -> None:
    one, other = _of_one_size(store, metadata=True)
    _swap(store / pack_key(one.id), store / pack_key(other.id))
    assert {finding.kind for finding in check(store).findings} >= {Kind.TWIN}
    assert not heal(store).after.damaged
    _assert_whole(store)


def test_a_twin_is_not_replaced_by_another_packs_content(store: Path) -> None:
    """The pack was overwritten by another of its size: its twin is all that is left."""
    one, other = _of_one_size(store, metadata=True)
    (store / pack_key(one.id)).write_bytes((store / pack_key(other.id)).read_bytes())
    assert (store / twin_key(one.id)).read_bytes() != (store / pack_key(one.id)).read_bytes()
    assert not heal(store).after.damaged
    _assert_whole(store)
