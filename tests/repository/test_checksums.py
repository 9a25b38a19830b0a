"""A chunk has an id and a checksum: every reader notices a wrong checksum, and those to whom
identity matters a wrong id."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Corrupt
from ckptstore.commit import write
from ckptstore.core.ids import checksum, digest
from ckptstore.interop.formats.exports import export
from ckptstore.objects.pack import TRAILER_BYTES, encode_tail, entries, parse_footer, parse_trailer
from ckptstore.snapshot import contents_of
from ckptstore.store import internals_of

CHUNK_BYTES = 64 << 10
LARGE = torch.arange(80_000, dtype=torch.float32)


def rewrite(pack: Path, *, data: bool = False) -> None:
    """Flip a bit of the first chunk's checksum in a pack, under a right hash of the footer. With
    `data`, change a bit of its bytes instead, and give it the checksum of the new ones."""
    stored = pack.read_bytes()
    trailer = parse_trailer(stored[-TRAILER_BYTES:], len(stored))
    table = parse_footer(stored[trailer.footer_offset : -TRAILER_BYTES], trailer)
    content = bytearray(stored[: trailer.footer_offset])
    first, *others = entries(table)
    if data:
        content[first.offset] ^= 1
        summed = checksum(bytes(content[first.offset : first.offset + first.stored_bytes]))
    else:
        summed = bytes([first.checksum[0] ^ 1]) + first.checksum[1:]
    tail, _ = encode_tail(
        [first._replace(checksum=summed), *others], len(content), trailer.metadata
    )
    pack.write_bytes(content + tail)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with a tagged commit, whose data lies in one pack."""
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), threads=1
    ) as store:
        store.commit({"m": {"t": LARGE}}, step=1, tag="keep")
    return tmp_path / "store"


def spoil(place: Path, *, data: bool = False) -> None:
    with ckptstore.open(place) as store:
        session = contents_of(store.checkout("keep")).document.session
    (pack,) = place.glob(f"packs/*/{session}-0-0")
    rewrite(pack, data=data)
    shutil.rmtree(place / "index")


def restored(store: ckptstore.Store) -> None:
    store.checkout("keep").restore({"m": {"t": torch.zeros_like(LARGE)}})


READERS: dict[str, Callable[[ckptstore.Store], object]] = {
    "restore": restored,
    "resume": lambda store: store.resume({"m": {"t": torch.zeros_like(LARGE)}}),
    "state_dict": lambda store: store.checkout("keep").state_dict(),
    "read a part": lambda store: store.checkout("keep").read("m/t", slice(0, 4)),
    "mapped and verified": lambda store: store.checkout("keep").open("m/t", verify=True),
    "verify": lambda store: store.checkout("keep").verify(),
    "export": lambda store: export(store.checkout("keep"), Path(store.url + ".safetensors")),
}


@pytest.mark.parametrize("how", READERS)
def test_a_checksum_wrong_by_one_bit_is_found_by_every_reader(place: Path, how: str) -> None:
    spoil(place)
    with ckptstore.open(place) as store, pytest.raises(Corrupt):
        READERS[how](store)


def test_a_wrong_checksum_is_found_by_maintenance(place: Path) -> None:
    spoil(place)
    with ckptstore.open(place) as store:
        assert {finding.kind for finding in store.fsck(read_data="100%").findings} == {"chunk"}
        assert len(store.push(store.url + "-mirror", create=True).damaged) == 1


def test_gc_does_not_copy_a_chunk_with_a_wrong_checksum(place: Path) -> None:
    with ckptstore.open(place) as store:  # most of the first pack is unused soon, so it is copied
        for step in (2, 3):
            store.commit(
                {"m": {"t": torch.cat([LARGE[:20_000], LARGE[20_000:] + step])}}, step=step
            )
    spoil(place)
    with ckptstore.open(place) as store:
        store.untag("keep")
        store.forget("main@1")
        assert len(store.gc(max_unused=0, force=True, grace_s=0).damaged) == 1


def test_bytes_with_a_forged_checksum_are_found_by_their_id(place: Path) -> None:
    spoil(place, data=True)
    with ckptstore.open(place) as store:
        forged = store.checkout("keep").read("m/t")
        assert not torch.equal(forged, LARGE)
        for wrong in (
            lambda: store.checkout("keep", verify="id").read("m/t"),
            lambda: store.checkout("keep", verify="id").open("m/t", verify=True),
            store.checkout("keep").verify,
        ):
            with pytest.raises(Corrupt, match="its id"):
                wrong()
        assert {finding.kind for finding in store.fsck(read_data="100%").findings} == {"chunk"}
        assert len(store.push(store.url + "-mirror", create=True).damaged) == 1


def test_what_is_verified_is_one_of_two_words(place: Path) -> None:
    with (
        ckptstore.open(place) as store,
        pytest.raises(ckptstore.InvalidInput, match="wanted 'checksum' or 'id'"),
    ):
        store.checkout("keep", verify="everything")  # type: ignore[arg-type]


# -- commits --


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each chunk of a tensor that is hashed by BLAKE3."""
    found: list[int] = []

    def counted(data: memoryview) -> bytes:
        found.append(len(data))
        return digest(data)

    monkeypatch.setattr(write, "digest", counted)
    return found


@pytest.mark.parametrize("way", ["commit", "commit_async", "lazy", "strided"])
def test_only_chunks_that_changed_are_hashed(tmp_path: Path, hashed: list[int], way: str) -> None:
    tensor = torch.rand(200, 2000)
    state = {"m": {"t": tensor.t() if way == "strided" else tensor}}
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:

        def commit(step: int) -> ckptstore.Snapshot:
            if way in ("commit", "strided"):
                return store.commit(state, step=step)
            staging = "lazy" if way == "lazy" else "eager"
            return store.commit_async(
                state, step=step, background=ckptstore.Async(staging=staging)
            ).wait()

        first = commit(1)
        assert sum(hashed) == tensor.nbytes
        hashed.clear()
        assert commit(2).content_id == first.content_id and not hashed
        tensor[100, 1000] += 1
        third = commit(3)
        assert len(hashed) == 1 and third.stats is not None and third.stats.new_chunks == 1
        assert torch.equal(third.read("m/t"), state["m"]["t"])
        third.verify()
        hashed.clear()
        tensor[100, 1000] -= 1
        tensor[:] = tensor.roll(1, 0)
        fourth = commit(4)
        assert torch.equal(fourth.read("m/t"), state["m"]["t"])
        fourth.verify()


def test_chunks_that_gc_has_taken_are_written_again_though_they_did_not_change(
    tmp_path: Path,
) -> None:
    state = {"m": {"t": LARGE.clone()}}
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(state, step=1)
        with ckptstore.open(tmp_path / "store") as other:
            for step in (2, 3):
                other.commit({"n": step}, step=step)
            other.forget("main@1")
            other.gc(force=True, grace_s=0)
        again = store.commit(state, step=4)
        assert again.stats is not None and again.stats.new_chunks == 5
        again.verify()


def test_a_state_that_changes_while_it_is_recognised_is_never_written_under_a_wrong_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is recognised, then changes, and no pack has it any more: its bytes are compared
    with its id before they are written."""
    state = {"m": {"t": LARGE.clone()}}
    with ckptstore.open(
        tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(state, step=1)
        monkeypatch.setattr(internals_of(store).handle.objects, "is_there", lambda pack: False)
        fetch = write.ChunkWriter._fetch

        def late(*args: object) -> memoryview:
            state["m"]["t"][0] += 1
            return fetch(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(write.ChunkWriter, "_fetch", late)
        with pytest.raises(ckptstore.Conflict, match="changed after they were hashed"):
            store.commit(state, step=2)


def test_the_index_and_the_footers_hold_the_checksums_of_the_raw_bytes(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store",
        storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec="zstd"),
    ) as store:
        snapshot = store.commit({"m": {"t": torch.zeros(80_000)}}, step=1)
        raw = np.zeros(CHUNK_BYTES, np.uint8).tobytes()
        where = internals_of(store).handle.objects.located(digest(raw))
        assert where["checksum"].tolist() == [checksum(raw)]
        assert int(where["stored"][0]) < int(where["raw"][0])
        snapshot.verify()
