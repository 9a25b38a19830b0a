"""Codecs: what goes in comes out, nothing else does, and nothing claims more memory than it is
due."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.objects.codecs import RAW, SPLIT_ZSTD, ZSTD, codec_id, decode_into, encode
from ckptstore.objects.frames import compress, decompress
from tests.support.mutations import damaged

CODECS = [RAW, ZSTD, SPLIT_ZSTD]
CODEC, WIDTH = st.sampled_from(CODECS), st.integers(1, 16)
REPETITIVE = st.tuples(st.binary(max_size=40), st.integers(0, 200)).map(lambda t: t[0] * t[1])


def decoded(codec: int, stored: bytes | memoryview, nbytes: int, width: int) -> bytes:
    out = bytearray(nbytes)
    decode_into(codec, stored, memoryview(out), width)
    return bytes(out)


@given(CODEC, REPETITIVE | st.binary(), WIDTH)
def test_what_is_encoded_comes_back(codec: int, raw: bytes, width: int) -> None:
    used, stored = encode(codec, memoryview(raw), width)
    assert used in (RAW, codec)
    assert len(stored) <= len(raw)
    assert decoded(used, stored, len(raw), width) == raw


@pytest.mark.parametrize("codec", CODECS)
def test_noise_stays_raw_and_is_not_copied(codec: int) -> None:
    raw = memoryview(np.random.bytes(100_000))
    used, stored = encode(codec, raw, 4)
    assert used == RAW
    assert stored is raw


def test_the_bytes_of_small_floats_are_worth_splitting() -> None:
    raw = memoryview(np.random.normal(0, 0.02, 1 << 16).astype("<f4").tobytes())
    _, split = encode(SPLIT_ZSTD, raw, 4)
    assert len(split) < 0.9 * len(raw)
    assert decoded(SPLIT_ZSTD, split, len(raw), 4) == raw


@pytest.mark.parametrize("codec", [ZSTD, SPLIT_ZSTD])
@given(data=st.data())
def test_damaged_bytes_are_corrupt_or_as_many_as_wanted(codec: int, data: st.DataObject) -> None:
    raw, width = b"abcdefgh" * 100 + b"tail", data.draw(WIDTH)
    used, stored = encode(codec, memoryview(raw), width)
    assert used == codec
    bad = data.draw(damaged(bytes(stored)))
    try:
        assert len(decoded(codec, bad, len(raw), width)) == len(raw)
    except Corrupt:
        return


@given(CODEC, st.binary(max_size=100), st.integers(0, 200), WIDTH)
def test_any_bytes_are_corrupt_or_as_many_as_wanted(
    codec: int, stored: bytes, nbytes: int, width: int
) -> None:
    try:
        decoded(codec, stored, nbytes, width)
    except Corrupt:
        return


@pytest.mark.parametrize("nbytes", [0, 799, 801])
@pytest.mark.parametrize("codec", CODECS)
def test_another_length_than_wanted_is_corrupt(codec: int, nbytes: int) -> None:
    used, stored = encode(codec, memoryview(b"abcdefgh" * 100), 2)
    with pytest.raises(Corrupt):
        decoded(used, stored, nbytes, 2)


def test_an_unknown_codec_is_corrupt_and_an_unknown_name_invalid() -> None:
    with pytest.raises(Corrupt):
        decoded(9, b"", 0, 1)
    with pytest.raises(InvalidInput, match="raw, zstd, split-zstd"):
        codec_id("lz4")
    assert [codec_id(name) for name in ("raw", "zstd", "split-zstd")] == CODECS


def test_a_frame_that_claims_too_much_costs_nothing() -> None:
    bomb = compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decompress(bomb, 1 << 20)
        with pytest.raises(Corrupt):
            decoded(ZSTD, bomb, 1000, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"no frame",
        zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100),
        compress(b"x" * 100) + b"more",
        compress(b"x" * 100) * 2,
        compress(b"x" * 100)[:-1],
    ],
)
def test_only_one_whole_frame_of_known_size_is_read(stored: bytes) -> None:
    with pytest.raises(Corrupt):
        decompress(stored, 1000)


def test_an_empty_frame_is_a_frame() -> None:
    assert decompress(compress(b""), 0) == b""


def test_threads_do_not_share_contexts() -> None:
    def there_and_back(i: int) -> bool:
        raw = bytes([i]) * 100_000
        used, stored = encode(SPLIT_ZSTD, memoryview(raw), 2)
        return decoded(used, stored, len(raw), 2) == raw

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(64)))
