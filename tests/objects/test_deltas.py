"""Differences between chunks: every bit comes back, and no bytes claim more than they hold."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.core.ids import checksum
from ckptstore.errors import Corrupt
from ckptstore.objects.codecs import (
    DELTA,
    RAW,
    SPLIT_ZSTD,
    Base,
    Sample,
    base_of,
    decode_delta,
    decode_into,
    encode,
    encode_delta,
    encode_few,
    encode_planes,
    moved,
    sample,
)
from ckptstore.objects.frames import ENTROPY, compress
from tests.support.mutations import damaged

BASE = Base(4096, 77, SPLIT_ZSTD)
WIDTHS = st.sampled_from([1, 2, 3, 4, 8, 16])

ODD = {
    "<f2": (0x0000, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00, 0xFFFF),
    "<f4": (0x0, 0x80000000, 0x1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF),
    "<f8": (0x0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF),
}
"""Both zeros, the smallest denormal, infinities, signaling and quiet NaNs and their payloads."""


def restored(stored: bytes, base: bytes, width: int) -> bytes:
    out = bytearray(len(base))
    decode_delta(stored, memoryview(base), memoryview(out), width)
    return bytes(out)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two chunks of one length, often alike."""
    base = draw(st.binary(max_size=300)) * draw(st.integers(1, 20))
    if draw(st.booleans()):
        raw = bytearray(base)
        for at, byte in draw(st.lists(st.tuples(st.integers(0, 5999), st.integers(0, 255)))):
            if at < len(raw):
                raw[at] = byte
        return bytes(raw), base
    return draw(st.binary(min_size=len(base), max_size=len(base))), base


@given(pairs(), WIDTHS)
def test_a_difference_gives_back_every_bit(pair: tuple[bytes, bytes], width: int) -> None:
    raw, base = pair
    stored = encode_delta(memoryview(raw), memoryview(base), BASE, width)
    assert base_of(stored) == BASE
    assert restored(stored, base, width) == raw
    assert restored(moved(stored, Base(1, 2, RAW)), base, width) == raw


@pytest.mark.parametrize("dtype", ODD)
def test_every_pair_of_odd_floats_is_kept(dtype: str) -> None:
    bits = np.array(ODD[dtype], dtype.replace("f", "u"))
    raw, base = (part.ravel().tobytes() for part in np.meshgrid(bits, bits))
    stored = encode_delta(memoryview(raw), memoryview(base), BASE, bits.itemsize)
    assert restored(stored, base, bits.itemsize) == raw


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 255)), max_size=40),
    st.integers(0, 2000),
    st.sampled_from([1, 2, 4, 8]),
)
def test_a_chunk_of_which_few_words_moved_comes_back(
    moves: list[tuple[int, int]], rest: int, width: int
) -> None:
    base = np.arange(sum(gap + 1 for gap, _ in moves) + rest, dtype=f"<u{width}")
    raw = base.copy()
    raw[np.cumsum([gap + 1 for gap, _ in moves], dtype=int) - 1] += np.array(
        [step for _, step in moves], dtype=raw.dtype
    )
    stored = encode_delta(memoryview(raw.tobytes()), memoryview(base.tobytes()), BASE, width)
    assert restored(stored, base.tobytes(), width) == raw.tobytes()


def test_a_plane_of_zeros_mostly_takes_less_than_a_bit_per_byte() -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 16, 1 << 18, dtype="<u2")
    large = random.random(len(base)) < 0.05
    steps = random.integers(-128, 128, len(base)) * np.where(large, 200, 1)
    raw, before = memoryview((base + steps.astype("<u2")).tobytes()), memoryview(base.tobytes())
    stored = encode_delta(raw, before, BASE, 2)
    assert restored(stored, before.tobytes(), 2) == raw
    # Of each word 8 bits of noise, 0.29 of where the few large ones are, and 0.4 of how large.
    assert len(stored) * 8 / len(base) < 8.75


def test_words_that_all_moved_alike_leave_next_to_nothing() -> None:
    base = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype="<u4")
    raw = memoryview((base - np.uint32(70_000)).tobytes())
    stored = encode_delta(raw, memoryview(base.tobytes()), BASE, 4)
    assert len(stored) < 250
    assert restored(stored, base.tobytes(), 4) == raw


def summed(stored: bytes) -> bytes:
    """A delta with the checksum of what follows it, as a forger would write it."""
    return stored[:16] + checksum(stored[32:]) + stored[32:]


def sparse_delta(distances: list[int], listed: bytes, nbytes: int) -> bytes:
    """A delta from zeros, of bytes, whose one plane is sparse."""
    zeros = memoryview(bytes(nbytes))
    plain = encode_delta(zeros, zeros, BASE, 1, Sample([ENTROPY], 1))
    coded = encode_few(np.array(distances, "<u4"))
    plane = struct.pack("<2I", len(distances), len(coded)) + coded + compress(listed)
    return summed(plain[:40] + struct.pack("<I", len(plane)) + plane + plain[44:])


def test_a_sparse_plane_that_no_writer_makes_is_refused() -> None:
    assert restored(sparse_delta([3, 60], b"\x02\x04", 64), bytes(64), 1) == (
        bytes(3) + b"\x02" + bytes(59) + b"\x04"
    )
    for distances, listed in (
        ([3, 61], b"\x02\x04"),  # beyond the end
        ([1 << 31, 1 << 31, 3], b"\x02\x04\x06"),
        ([3], b"\x02\x04"),
        ([3, 60], b"\x02"),
        ([0] * 65, bytes(65)),
    ):
        with pytest.raises(Corrupt):
            restored(sparse_delta(distances, listed, 64), bytes(64), 1)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_shift_wider_than_a_word_is_refused(width: int) -> None:
    stored = bytearray(encode_delta(memoryview(bytes(64)), memoryview(bytes(64)), BASE, width))
    stored[32 + width] = 1
    with pytest.raises(Corrupt, match="shifted"):
        restored(summed(bytes(stored)), bytes(64), width)


@given(st.binary(min_size=1, max_size=600), st.sampled_from([1, 2, 3, 4, 8, 16]), st.data())
def test_every_bit_that_turns_is_noticed(raw: bytes, width: int, data: st.DataObject) -> None:
    base = data.draw(st.binary(min_size=len(raw), max_size=len(raw)))
    delta = encode_delta(memoryview(raw), memoryview(base), BASE, width)
    planes = encode_planes(memoryview(raw), width, sample(memoryview(raw), width))
    for stored, decode in (
        (delta[16:], lambda bad: restored(delta[:16] + bad, base, width)),
        (planes, lambda bad: decode_into(SPLIT_ZSTD, bad, memoryview(bytearray(raw)), width)),
    ):
        at = data.draw(st.integers(0, 8 * len(stored) - 1))
        bad = bytearray(stored)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises(Corrupt, match="checksum"):
            decode(bytes(bad))


@given(st.data())
def test_what_a_forger_sums_is_refused_or_as_many_bytes_as_wanted(data: st.DataObject) -> None:
    width = data.draw(WIDTHS)
    raw = np.random.default_rng(0).normal(0, 1, 300).astype("<f4").tobytes()
    stored = encode_delta(memoryview(raw), memoryview(bytes(len(raw))), BASE, width)
    bad = data.draw(damaged(stored[32:]))
    try:
        assert len(restored(summed(stored[:32] + bad), bytes(len(raw)), width)) == len(raw)
    except Corrupt:
        return


def test_weights_that_moved_a_little_shrink_to_less_than_their_planes() -> None:
    random = np.random.default_rng(0)
    base = random.standard_normal(1 << 16).astype("<f4")
    raw = memoryview((base * (1 + 1e-4 * random.standard_normal(1 << 16))).astype("<f4").tobytes())
    planes, delta = sample(raw, 4).share, sample(raw, 4, memoryview(base.tobytes())).share
    stored = encode_delta(raw, memoryview(base.tobytes()), BASE, 4)
    assert delta < 0.6 < planes < 0.9
    assert len(stored) / len(raw) == pytest.approx(delta, abs=0.02)


@pytest.mark.parametrize("nbytes", [0, 1, 7])
def test_a_share_of_next_to_nothing_is_known(nbytes: int) -> None:
    assert sample(memoryview(bytes(nbytes)), 8).share >= 0.5


def test_a_chunk_that_has_lost_its_base_is_stored_as_planes() -> None:
    raw = memoryview(np.arange(10_000, dtype="<f4").tobytes())
    assert encode(DELTA, raw, 4)[0] == SPLIT_ZSTD


@given(st.data())
def test_damaged_differences_are_corrupt_or_as_many_as_wanted(data: st.DataObject) -> None:
    raw, base, width = b"abcdefgh" * 100 + b"tail", bytes(804), data.draw(WIDTHS)
    stored = encode_delta(memoryview(raw), memoryview(base), BASE, width)
    bad = data.draw(damaged(stored))
    try:
        base_of(bad)
        assert len(restored(bad, base, width)) == len(raw)
    except Corrupt:
        return


@pytest.mark.parametrize(
    "base", [Base(0, 1, DELTA), Base(0, 1, 200), Base((1 << 62) + 1, 1, RAW)], ids=str
)
def test_a_base_that_no_reader_could_have_is_refused(base: Base) -> None:
    with pytest.raises(Corrupt, match="base"):
        base_of(encode_delta(memoryview(b"1234"), memoryview(b"1235"), base, 4))
