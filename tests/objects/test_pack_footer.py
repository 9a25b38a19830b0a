"""Packs say what is inside them, and a pack that does not say it truly is not believed."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import ChunkId, PackId, SessionId, digest, pack_id, pack_key, twin_key
from ckptstore.core.model import PackEntry, PackRecord
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.objects.pack import (
    FOOTER_DTYPE,
    LAYOUT,
    PAGE,
    SCHEMA,
    TENSOR,
    TRAILER_BYTES,
    align,
    encode_tail,
    entries,
    parse_footer,
    parse_trailer,
)
from ckptstore.repository.footers import read_table
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.support.mutations import damaged

PACK = pack_id(SessionId("0" * 24), 0, 1)


def entry(offset: int, nbytes: int, kind: int = TENSOR, **other: int) -> PackEntry:
    return PackEntry(
        ChunkId(digest(f"{offset} {nbytes}".encode())),
        bytes(15) + b"\1",
        offset,
        nbytes,
        nbytes,
        0,
        2,
        kind,
    )._replace(**other)


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[PackEntry], int, bool]:
    metadata = draw(st.booleans())
    found, offset = [], 0
    for gap, raw, codec in draw(
        st.lists(
            st.tuples(st.integers(0, 100), st.integers(1, 2**22), st.integers(0, 2)), max_size=20
        )
    ):
        offset += gap
        stored = draw(st.integers(1, raw)) if codec else raw
        kind = draw(st.sampled_from([SCHEMA, PAGE, LAYOUT])) if metadata else TENSOR
        found.append(
            PackEntry(
                ChunkId(draw(st.binary(min_size=32, max_size=32))),
                draw(st.binary(min_size=16, max_size=16)),
                offset,
                stored,
                raw,
                codec,
                draw(st.integers(1, 16)),
                kind,
            )
        )
        offset += stored
    return found, offset + draw(st.integers(0, 100)), metadata


def parsed(tail: bytes, data_bytes: int) -> list[PackEntry]:
    trailer = parse_trailer(tail[-TRAILER_BYTES:], data_bytes + len(tail))
    return entries(
        parse_footer(tail[-TRAILER_BYTES - trailer.footer_bytes : -TRAILER_BYTES], trailer)
    )


@given(packs(), st.randoms())
def test_what_a_footer_says_comes_back_in_order_of_offset(
    pack: tuple[list[PackEntry], int, bool], random: object
) -> None:
    found, data_bytes, metadata = pack
    tail = encode_tail(sorted(found, key=lambda _: random.random()), data_bytes, metadata)[0]  # type: ignore[attr-defined]
    assert len(tail) == 80 * len(found) + TRAILER_BYTES
    assert parsed(tail, data_bytes) == found
    assert parse_trailer(tail[-TRAILER_BYTES:], data_bytes + len(tail)).metadata == metadata


def test_the_footer_is_laid_out_as_the_format_says() -> None:
    chunk, summed = ChunkId(bytes(range(31)) + b"\0"), bytes(range(100, 116))
    tail, _ = encode_tail(
        [PackEntry(chunk, summed, 0x40, 0x30, 0x50, 1, 4, TENSOR)], 0x70, metadata=False
    )
    assert tail[:80] == chunk + summed + struct.pack(
        "<QIIIBBB9x", 0x40, 0x30, 0x50, 0xFFFFFFFF, 1, 4, 0
    )
    assert tail[80:112] == b"CKPTPACK" + struct.pack("<IIQQ", 2, 0, 0x70, 80)
    assert tail[112:144] == digest(tail[:112])
    assert tail[144:] == b"KCAPTPKC"
    assert FOOTER_DTYPE.itemsize == 80


@given(packs(), st.data())
def test_a_damaged_tail_is_corrupt(
    pack: tuple[list[PackEntry], int, bool], data: st.DataObject
) -> None:
    found, data_bytes, metadata = pack
    with pytest.raises(Corrupt):
        parsed(data.draw(damaged(encode_tail(found, data_bytes, metadata)[0])), data_bytes)


@pytest.mark.parametrize(
    ("found", "metadata"),
    [
        ([entry(0, 100), entry(99, 100)], False),
        ([entry(0, 100), entry(0, 100)], False),
        ([entry(900, 101)], False),
        ([entry(1001, 0)], False),
        ([entry(2**64 - 10, 20)], False),
        ([entry(0, 10, codec=3)], False),
        ([entry(0, 10, kind=4)], True),
        ([entry(0, 10, kind=TENSOR)], True),
        ([entry(0, 10, kind=PAGE)], False),
        ([entry(0, 10, width=0)], False),
        ([entry(0, 10, raw_bytes=11)], False),
        ([entry(0, 2**32)], False),
        ([entry(0, 10, width=256)], False),
        ([entry(-1, 10)], False),
        ([entry(0, 10)._replace(chunk=ChunkId(b"short"))], False),
        ([entry(0, 10)._replace(checksum=b"short")], False),
    ],
)
def test_entries_that_make_no_pack_are_refused_before_they_are_written(
    found: list[PackEntry], metadata: bool
) -> None:
    with pytest.raises(InvalidInput):
        encode_tail(found, 1000, metadata)


@pytest.mark.parametrize(
    ("field", "value"),
    [("base", 0), ("zero", bytes(8) + b"\1"), ("codec", 7), ("offset", 2**64 - 1)],
)
def test_a_record_with_a_true_hash_is_checked_all_the_same(field: str, value: object) -> None:
    table = np.frombuffer(
        encode_tail([entry(0, 10)], 10, metadata=False)[0][:80], FOOTER_DTYPE
    ).copy()
    table[field] = value
    head = encode_tail([entry(0, 10)], 10, metadata=False)[0][64:96]
    tail = table.tobytes() + head + digest(table.tobytes() + head) + b"KCAPTPKC"
    with pytest.raises(Corrupt):
        parsed(tail, 10)


@pytest.mark.parametrize(
    ("offset", "run_bytes", "start"),
    [
        (0, 1, 0),
        (1, 1, 64),
        (64, 65535, 64),
        (65, 65535, 128),
        (1, 65536, 4096),
        (4096, 1 << 23, 4096),
    ],
)
def test_large_runs_start_on_pages_and_small_ones_on_cache_lines(
    offset: int, run_bytes: int, start: int
) -> None:
    assert align(offset, run_bytes) == start


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"memory://footers/{request.node.name}")


def record(*, metadata: bool) -> PackRecord:
    """The pack as the log would list it."""
    return PackRecord(PACK, 0, 0, metadata)


def put_pack(storage: Storage, key: str, count: int, pack: PackId = PACK) -> list[PackEntry]:
    found = [entry(i * 10, 10, PAGE) for i in range(count)]
    storage.put(key, bytes(count * 10) + encode_tail(found, count * 10, metadata=True)[0])
    return found


@pytest.mark.parametrize("count", [0, 1, 1022, 1023, 5000])
def test_a_footer_of_any_length_is_read_from_the_end_of_its_pack(
    storage: Storage, count: int
) -> None:
    found = put_pack(storage, pack_key(PACK), count)
    assert entries(read_table(storage, record(metadata=False))) == found


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_the_twin_answers_for_a_damaged_metadata_pack(storage: Storage, damage: str) -> None:
    found = put_pack(storage, twin_key(PACK), 3)
    whole = storage.read(twin_key(PACK))
    if damage != "gone":
        storage.put(
            pack_key(PACK), whole[:-1] if damage == "cut" else whole[:-100] + b"?" + whole[-99:]
        )
    assert entries(read_table(storage, record(metadata=True))) == found
    with pytest.raises(NotFound if damage == "gone" else Corrupt):
        read_table(storage, record(metadata=False))


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": 1},
        {"base": 2},
        {"base": 9},
        {"codec": 0},
        {"codec": 2},
        {"raw": 41},
        {"width": 4},
        {"base": 0xFFFFFFFF},
    ],
    ids=str,
)
def test_a_base_is_an_earlier_record_like_the_delta_and_no_delta(wrong: dict[str, int]) -> None:
    fields = {"raw": "raw_bytes"}
    good = [entry(0, 40), entry(64, 20, codec=3, raw_bytes=40, base=0)]
    good.append(entry(128, 20, codec=3, raw_bytes=40, base=0))
    assert len(encode_tail(good, 200, metadata=False)[1]) == 3
    changed = {fields.get(name, name): value for name, value in wrong.items()}
    with pytest.raises(InvalidInput, match="base"):
        encode_tail([*good[:2], good[2]._replace(**changed)], 200, metadata=False)
