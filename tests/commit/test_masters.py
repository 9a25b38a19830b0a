"""16-bit weights beside float32 masters are stored as their rounding, bit for bit, and whatever
moves, collects or damages chunks knows that they need two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.core.ids import CHECKSUM_BYTES, ChunkId, checksum
from ckptstore.objects import patches
from ckptstore.state import rounding
from tests.support.patching import small_chunks_too

STORAGE = ckptstore.Storage(chunk_bytes=64 << 10)
SHAPES = ((300, 200), (40_001,), (17_000,), (3, 70, 129))
"""Of masters in several chunks, in two and in one, the last of which may be short."""

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def of_small_weights() -> Iterator[None]:
    with small_chunks_too():
        yield


def any_bits(count: int, random: np.random.Generator) -> torch.Tensor:
    """Numbers of all kinds, NaN with their payloads among them; in the middle, ordinary ones."""
    bits = random.integers(0, 1 << 32, count, "u4")
    ties = random.random(count) < 0.2
    bits[ties] &= np.uint32(0xFFFF8000)
    numbers = torch.from_numpy(bits.view("i4")).view(torch.float32)
    numbers[count // 4 : -(count // 4)] = torch.from_numpy(
        random.standard_normal(count - 2 * (count // 4)).astype("f4")
    )
    return numbers


def state(step: int, dtype: torch.dtype, *, masters: bool = True) -> dict[str, Any]:
    """Weights with masters, and moments of the same shapes, all of which change in each step."""
    random = np.random.default_rng(step)
    single = {
        f"w{i}": any_bits(int(np.prod(shape)), random).reshape(shape)
        for i, shape in enumerate(SHAPES)
    }
    moments = {name: torch.randn_like(w) for name, w in single.items()}
    weights = {name: w.to(dtype) for name, w in single.items()}
    found = {"model": weights, "optimizer": {"m": moments, "fp32": single}}
    return found if masters else {"model": weights}


def check(store: ckptstore.Store, ref: int | str, wanted: dict[str, Any]) -> None:
    snapshot = store.checkout(ref)
    for key in wanted:
        where = "model" if key == "model" else "optimizer/fp32"
        leaves = wanted[key] if key == "model" else wanted[key]["fp32"]
        for name, tensor in leaves.items():
            got = snapshot.read(f"{where}/{name}")
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), f"{where}/{name}"


def weights_bytes(step: int, dtype: torch.dtype) -> int:
    return sum(w.nbytes for w in state(step, dtype)["model"].values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_beside_their_masters_take_next_to_nothing(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        for step in (1, 2):
            done = store.commit(state(step, dtype), step=step).stats
            others = done.logical_bytes - weights_bytes(step, dtype)
            # Half of the rest is the gaps before runs.
            assert others < done.new_bytes < others + 0.12 * weights_bytes(step, dtype)
        alone = store.commit(state(3, dtype, masters=False), step=3).stats
        assert alone.new_bytes > weights_bytes(3, dtype)
    with ckptstore.open(tmp_path / "s") as store:
        for step in (1, 2, 3):
            check(store, step, state(step, dtype, masters=step < 3))
        assert not store.fsck("data").findings


def test_weights_that_round_nothing_are_whole(tmp_path: Path) -> None:
    """Nor do those that round other numbers than their masters; few that differ are listed."""
    mixed = state(1, torch.bfloat16)
    mixed["model"]["w0"].view(-1)[:20_000:100] += 1
    mixed["model"]["w1"].view(torch.int16).view(-1)[::3] ^= 1
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        stats = store.commit(mixed, step=1).stats
        saved = stats.logical_bytes - stats.new_bytes
        whole = mixed["model"]["w1"].nbytes
        assert whole * 0.8 < weights_bytes(1, torch.bfloat16) - saved < whole * 1.4
        check(store, 1, mixed)


@pytest.mark.parametrize("way", ["forgotten", "thinned", "compacted", "mirrored", "async"])
def test_weights_outlive_what_others_do_with_their_masters(way: str, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        for step in (1, 2, 3):
            if way == "async":
                store.commit_async(state(step, torch.bfloat16), step=step).wait()
            else:
                store.commit(state(step, torch.bfloat16), step=step)
        kept = state(2, torch.bfloat16)
        if way == "forgotten":
            store.commit({"model": kept["model"]}, step=4)
            store.forget([1, 2, 3])
        elif way == "thinned":
            store.forget(ckptstore.KeepLast(1).thin("optimizer/**"))
        elif way == "compacted":
            store.compact(ckptstore.CompactPolicy(newest=0, every=3))
        elif way == "mirrored":
            ckptstore.clone(tmp_path / "s", tmp_path / "mirror").close()
        for _ in range(2):
            store.gc(grace_s=0, max_unused=0)
        ref = 4 if way == "forgotten" else 1 if way == "thinned" else 2
        check(store, ref, {"model": state(min(ref, 2), torch.bfloat16)["model"]})
        assert not store.fsck("data").findings
        if way == "thinned":
            nbytes = sum(f.stat().st_size for f in (tmp_path / "s/packs").rglob("*") if f.is_file())
            each = weights_bytes(1, torch.bfloat16)
            assert nbytes < 1.1 * (each + 2 * 4 * each)  # the others have masters and moments
    if way == "mirrored":
        with ckptstore.open(tmp_path / "mirror") as mirror:
            check(mirror, 2, kept)


def test_a_damaged_master_is_healed_with_its_weights(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        store.commit(state(1, torch.bfloat16), step=1)
    ckptstore.clone(tmp_path / "s", tmp_path / "mirror").close()
    packs = sorted((tmp_path / "s/packs").rglob("*-*"), key=lambda file: file.stat().st_size)
    data = bytearray(packs[-1].read_bytes())
    data[20_000:20_004] = b"????"
    packs[-1].write_bytes(data)
    with ckptstore.open(tmp_path / "s") as store:
        assert store.fsck("data").findings
        store.repair(tmp_path / "mirror", apply=True, read_data="all")
        check(store, 1, state(1, torch.bfloat16))
        assert not store.fsck("data").findings


@pytest.mark.parametrize("function", [patches.BFLOAT16, patches.FLOAT16])
def test_torch_rounds_as_the_format_states(function: int, seed: int) -> None:
    """But for NaN: then the exact way is taken."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 1 << 17, "u4")
    for some in (bits, np.where(bits & 0x7F800000 == 0x7F800000, np.uint32(7), bits)):
        wanted, found = np.empty(len(some), "u2"), np.empty(len(some), "u2")
        patches.round_exactly(function, some, wanted)
        patches.round_into(function, [memoryview(some).cast("B")], memoryview(found).cast("B"))
        assert np.array_equal(found, wanted), f"seed {seed}"
    assert rounding.round_words(function, some.copy(), found)
    assert np.array_equal(found, wanted), f"seed {seed}"


def forged(stored: bytes, offset: int, new: bytes) -> bytes:
    changed = stored[:offset] + new + stored[offset + len(new) :]
    return checksum(changed[CHECKSUM_BYTES:]) + changed[CHECKSUM_BYTES:]


def test_a_forged_rounding_is_refused_with_bounded_work() -> None:
    raw = memoryview(torch.randn(4096).to(torch.bfloat16).view(torch.uint8).numpy())
    names = [ChunkId(bytes([n]) * 32) for n in (1, 2)]
    scratch, way = memoryview(bytearray(len(raw))), (patches.WHOLE, patches.BFLOAT16)
    stored = patches.encode(raw, raw, 2, patches.NOTHING, names, *way)
    assert stored is not None and patches.head_of(stored).bases == tuple(names)
    for at, new in ((96, b"\3"), (96, b"\0")):
        with pytest.raises(ckptstore.Corrupt):
            patches.head_of(forged(stored, at, new))
    for sizes in ([8192], [8192, 8190], [8192, 8192, 4], []):
        with pytest.raises(ckptstore.Corrupt):
            patches.round_into(1, [memoryview(bytearray(n)) for n in sizes], scratch)
