"""A chunk in two packs is read while one of them has it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import Corrupt, NotFound
from ckptstore.snapshot import contents_of

CHUNK_BYTES = 64 << 10
VALUES = torch.arange(80_000, dtype=torch.float32)


def flip(pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    content[4096] ^= 1
    pack.write_bytes(content)


def truncate(pack: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:8192])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "a truncated pack": truncate,
    "a missing pack": Path.unlink,
}


@pytest.fixture
def packs(tmp_path: Path) -> list[Path]:
    """The two packs of a store that hold the same chunks, that of the older commit first."""
    place, found = tmp_path / "store", []
    storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    with ckptstore.open(place, storage=storage, threads=1) as store:
        for step in range(2):
            for pack in store._handle.log.replay().packs.values():
                store._handle.objects.suspect_packs.add(pack.id)  # the next commit writes anew
            store.commit({"m": {"t": VALUES}}, step=step)
            session = contents_of(store.checkout("latest")).document.session
            found += place.glob(f"packs/*/{session}-0-0")
    first, second = found
    return [first, second]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_chunk_is_read_from_the_pack_that_has_it(
    packs: list[Path], damage: str, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = packs[0].parents[2]
    DAMAGES[damage](packs[which])
    with ckptstore.open(place) as store:
        state = {"m": {"t": torch.zeros_like(VALUES)}}
        store.checkout("latest").restore(state)
        assert torch.equal(state["m"]["t"], VALUES)
        assert torch.equal(store.checkout("latest").read("m/t", slice(0, 4)), VALUES[:4])
    if which == 1:
        assert "another pack has" in caplog.text, "the index names the newer pack"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_chunk_that_no_pack_has_is_an_error(packs: list[Path], damage: str) -> None:
    for pack in packs:
        DAMAGES[damage](pack)
    problem = pytest.raises((Corrupt, NotFound), match="fsck")
    with ckptstore.open(packs[0].parents[2]) as store, problem:
        store.checkout("latest").restore({"m": {"t": torch.zeros_like(VALUES)}})


def test_verify_reports_a_damaged_copy(packs: list[Path]) -> None:
    flip(packs[1])
    problem = pytest.raises(Corrupt, match="fsck")
    with ckptstore.open(packs[0].parents[2]) as store, problem:
        store.checkout("latest").verify()


def test_a_copy_that_a_gc_deleted_does_not_hide_another(tmp_path: Path) -> None:
    """Two writers at once make such copies."""
    more = torch.rand(80_000)
    storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    with ckptstore.open(tmp_path / "store", storage=storage, threads=1) as store:
        store.commit({"t": VALUES, "more": more}, step=0)
        distrust, packs = store._handle.objects.suspect_packs, store._handle.log.state.packs
        for pack in packs.values():
            distrust.add(pack.id)
        store.commit({"t": VALUES, "n": 1}, step=1)  # writes anew
        for pack in packs.values():
            distrust.discard(pack.id)
        assert store.gc(max_unused=0.0).deleted
        assert store.commit({"t": VALUES, "n": 2}, step=2).new_bytes < VALUES.nbytes
