"""Tensors mapped into memory: loaded on access, and no file changes."""

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import Corrupt, InvalidInput
from ckptstore.restore.mmap import (
    COPIED_BYTES,
    PAGE_BYTES,
    MapPlan,
    MemoryMap,
    Stretch,
    Unmappable,
    plan_map,
)
from ckptstore.snapshot import contents_of
from tests.restore.counting import least_bytes_read

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(place) as opened:
        yield opened


def packs(place: Path) -> list[Path]:
    return sorted(
        path
        for path in (place / "packs").rglob("*")
        if path.is_file() and path.stat().st_size > 64 << 10
    )


def evict(place: Path) -> None:
    for path in packs(place):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_pages(tensor: torch.Tensor) -> int:
    """How many of the pages under a tensor are in memory (mincore(2)), without touching them."""
    start = tensor.data_ptr() // PAGE_BYTES * PAGE_BYTES
    nbytes = tensor.data_ptr() + tensor.nbytes - start
    vector = (ctypes.c_ubyte * (-(-nbytes // PAGE_BYTES)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), vector) == 0
    return sum(page & 1 for page in vector)


def mappings() -> int:
    return sum("/packs/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def in_several_packs(store: ckptstore.Store, rows: int = 6144) -> torch.Tensor:
    """A tensor of 24 MiB of which three commits wrote a part each."""
    whole = torch.randn(rows, 1024)
    for share in (1, 2, 3):
        store.commit({"part": whole[: rows * share // 3]})
    return whole


def test_a_tensor_that_lies_in_several_packs_is_stitched(store: ckptstore.Store) -> None:
    whole = in_several_packs(store)
    tensor = store.checkout().open("part")
    assert torch.equal(tensor, whole)
    assert mappings() >= 3
    assert tensor.shape == whole.shape and tensor.is_contiguous()


@pytest.mark.parametrize("background", [False, True])
def test_a_run_is_mapped_as_one_though_its_windows_end_within_pages(
    store: ckptstore.Store, background: bool
) -> None:
    tensor = torch.randn(1900, 1001)  # 7.6 MB in one run; chunks end with rows, of 4,004 bytes
    state = {"before": torch.randn(30_000), "part": tensor}
    snapshot = store.commit_async(state).wait() if background else store.commit(state)
    mapped = snapshot.open("part")
    assert mappings() == 1
    assert torch.equal(mapped, tensor)
    tensor[1000] += 1  # of the third window; what follows it lies in the first commit's pack
    store.commit(state).verify()


def test_opening_reads_nothing_and_touching_a_row_reads_its_pages(
    place: Path, store: ckptstore.Store
) -> None:
    whole = in_several_packs(store)
    snap = store.checkout()
    assert contents_of(snap).trees
    nbytes, tensor = least_bytes_read(lambda: snap.open("part"), before=lambda: evict(place))
    assert nbytes == 0
    resident = resident_pages(tensor)
    assert resident == 0, (
        f"{resident} of {tensor.nbytes // PAGE_BYTES} pages were brought into memory"
    )
    assert torch.equal(tensor[3000], whole[3000])
    # The kernel reads ahead around a fault.
    assert 0 < resident_pages(tensor) < tensor.nbytes // PAGE_BYTES // 2


def test_a_write_stays_with_its_tensor(place: Path, store: ckptstore.Store) -> None:
    whole = in_several_packs(store)
    before = {path: path.read_bytes() for path in packs(place)}
    snap = store.checkout()
    one, other = snap.open("part"), snap.open("part")
    one.fill_(3)
    assert (one == 3).all() and torch.equal(other, whole)
    assert {path: path.read_bytes() for path in packs(place)} == before
    snap.verify()


def test_mapped_tensors_outlive_gc_and_the_store(place: Path) -> None:
    with ckptstore.open(place) as store:
        whole = in_several_packs(store)
        tensor = store.checkout().open("part")
        for step in range(3):
            store.commit({"other": step}, step=step)
        store.forget([info.id for info in store.log() if info.step is None])
        store.gc(force=True, grace_s=0)
        assert not packs(place)
    assert torch.equal(tensor, whole)


def test_a_freed_tensor_is_unmapped_and_no_file_stays_open(store: ckptstore.Store) -> None:
    in_several_packs(store)
    snap = store.checkout()
    gc.collect()  # what other tests have mapped goes first
    before = mappings()
    row = snap.open("part")[5]
    assert mappings() > before
    assert row.sum().isfinite()  # a view keeps the mapping
    del row
    gc.collect()
    assert mappings() == before


def test_a_chunk_that_is_wrong_is_found_when_asked_for(place: Path, store: ckptstore.Store) -> None:
    snap = store.commit({"w": torch.zeros(3 * MIB)})
    with packs(place)[0].open("r+b") as file:
        file.write(b"\1")
    assert snap.open("w")[0] != 0
    with pytest.raises(Corrupt, match="leaf w"):
        snap.open("w", verify=True)


def test_a_verified_one_is_the_same_tensor(store: ckptstore.Store) -> None:
    whole = in_several_packs(store)
    assert torch.equal(store.checkout().open("part", verify=True), whole)


def test_a_pack_that_is_too_short_is_corrupt_and_does_not_kill_the_process(
    place: Path, store: ckptstore.Store
) -> None:
    snap = store.commit({"w": torch.randn(3 * MIB)})
    for path in packs(place):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(Corrupt, match="ends after"):
        snap.open("w")


def test_small_and_short_leaves_come_as_tensors(store: ckptstore.Store) -> None:
    state = {
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "small": torch.randn(300),
        "alias": None,
        "odd": torch.randn(2 * MIB + 5000),
    }
    state["alias"] = state["odd"]
    snap = store.commit(state)
    for name, tensor in state.items():
        assert torch.equal(snap.open(name), tensor), name


REFUSALS: list[tuple[str, Any, str]] = [
    ("zstd", torch.zeros(3 * MIB), "stored compressed; use read"),
    ("raw", torch.randn(400, 30001), "cannot be laid side by side; use read"),
    ("raw", 5, "no tensor; use read"),
]


@pytest.mark.parametrize(("codec", "value", "message"), REFUSALS)
def test_unmappable_leaves_are_refused_with_a_hint_to_read(
    place: Path, codec: str, value: Any, message: str
) -> None:
    with ckptstore.open(place, storage=ckptstore.Storage(codec=codec)) as store:
        snap = store.commit({"w": value})
        with pytest.raises(InvalidInput, match=message):
            snap.open("w")
        whole = snap.state_dict(mmap=True)["w"]
        assert torch.equal(whole, value) if isinstance(value, torch.Tensor) else whole == value


def test_a_remote_store_is_refused() -> None:
    with ckptstore.open(f"memory://{os.urandom(8).hex()}") as store:
        snap = store.commit({"w": torch.zeros(3 * MIB)})
        for call in (lambda: snap.open("w"), lambda: snap.state_dict(mmap=True)):
            with pytest.raises(InvalidInput, match=r"no local directory.*use read"):
                call()


def test_a_model_on_the_meta_device_takes_mapped_weights(
    place: Path, store: ckptstore.Store
) -> None:
    trained = nn.Sequential(nn.Linear(1024, 2048), nn.LayerNorm(2048), nn.Linear(2048, 3))
    snap = store.checkout(store.commit({"model": trained}).id)
    assert contents_of(snap).trees
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 2048), nn.LayerNorm(2048), nn.Linear(2048, 3))
    nbytes, state = least_bytes_read(lambda: snap.state_dict("model", mmap=True))
    assert nbytes < 64 << 10
    model.load_state_dict(state, assign=True)
    assert torch.equal(model[0].weight, trained[0].weight)
    x = torch.randn(2, 1024)
    assert torch.equal(model(x), trained(x))
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()
    with pytest.raises(InvalidInput, match="mmap"):
        snap.state_dict("model", mmap=True, dtype=torch.bfloat16)


# -- the plan --

PLANS: list[tuple[list[Stretch], MapPlan]] = [
    # In one piece anywhere: the page before it comes along.
    ([Stretch(0, "p", 4160, 9000)], MapPlan(64, 9000, (Stretch(0, "p", 4096, 9064),), ())),
    # Two pieces that meet at a page.
    (
        [Stretch(0, "p", 8192, 2 * PAGE), Stretch(2 * PAGE, "q", 0, 100)],
        MapPlan(
            0, 2 * PAGE + 100, (Stretch(0, "p", 8192, 2 * PAGE), Stretch(2 * PAGE, "q", 0, 100)), ()
        ),
    ),
    # A short last run begins anywhere: it is copied.
    (
        [Stretch(0, "p", 8192, 2 * PAGE), Stretch(2 * PAGE, "q", 64, 100)],
        MapPlan(
            0,
            2 * PAGE + 100,
            (Stretch(0, "p", 8192, 2 * PAGE),),
            (Stretch(2 * PAGE, "q", 64, 100),),
        ),
    ),
    # They meet within a page, which is copied from both.
    (
        [Stretch(0, "p", 0, PAGE + 100), Stretch(PAGE + 100, "q", 100, 2 * PAGE)],
        MapPlan(
            0,
            3 * PAGE + 100,
            (Stretch(0, "p", 0, PAGE), Stretch(2 * PAGE, "q", PAGE, PAGE + 100)),
            (Stretch(PAGE, "p", PAGE, 100), Stretch(PAGE + 100, "q", 100, PAGE - 100)),
        ),
    ),
]


@pytest.mark.parametrize(("parts", "plan"), PLANS)
def test_a_plan_says_which_pages_are_laid_where(parts: list[Stretch], plan: MapPlan) -> None:
    assert plan_map(parts, 4, PAGE) == plan


def test_any_plan_brings_each_byte_to_its_place(seed: int) -> None:
    """Stretches of any length, which meet within pages or at their bounds, in the same pack or in
    others. A page is laid as a whole."""
    random, page = Random(seed), 64
    packs = {key: random.randbytes(64 * page) for key in "pqr"}
    for _ in range(500):
        parts, start = list[Stretch](), 0
        skew = random.randrange(0, page, 4)
        for _ in range(random.randint(1, 6)):
            nbytes = random.randrange(4, random.choice((page, 6 * page)), 4)
            at = (start + skew) % page if random.random() < 0.7 else random.randrange(0, page, 4)
            offset = random.randrange(20) * page + at
            parts.append(Stretch(start, random.choice("pqr"), offset, nbytes))
            start += nbytes
        plan = plan_map(parts, 4, page)
        memory = bytearray(plan.skew + plan.nbytes + page)
        for part in plan.mapped:
            assert part.start % page == part.offset % page == 0
            whole = -(-part.nbytes // page) * page
            memory[part.start : part.start + whole] = packs[part.key][part.offset :][:whole]
        data = memoryview(memory)[plan.skew : plan.skew + plan.nbytes]
        for part in plan.copied:
            data[part.start : part.stop] = packs[part.key][part.offset :][: part.nbytes]
        wanted = b"".join(packs[part.key][part.offset :][: part.nbytes] for part in parts)
        assert data == wanted, parts


def test_no_more_than_a_little_is_copied_and_elements_are_aligned() -> None:
    with pytest.raises(Unmappable, match="side by side"):
        plan_map(
            [Stretch(0, "p", 0, MIB + 64), Stretch(MIB + 64, "q", 0, COPIED_BYTES + 4)], 4, PAGE
        )
    with pytest.raises(Unmappable, match="multiples of 8"):
        plan_map([Stretch(0, "p", 4, MIB)], 8, PAGE)


def test_a_mapping_keeps_to_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2 * PAGE_BYTES)
    memory = MemoryMap(3 * PAGE_BYTES)
    with path.open("rb") as file:
        memory.put(PAGE_BYTES, file.fileno(), PAGE_BYTES, 10, "file")
        for at, offset, nbytes in ((1, 0, 10), (0, 1, 10), (2 * PAGE_BYTES, 0, 2 * PAGE_BYTES)):
            with pytest.raises(ValueError, match="cannot map"):
                memory.put(at, file.fileno(), offset, nbytes, "file")
        with pytest.raises(Corrupt, match="file ends after"):
            memory.put(0, file.fileno(), 2 * PAGE_BYTES, 1, "file")
    assert bytes(memory.view(PAGE_BYTES - 2, PAGE_BYTES + 2)) == b"\0\0xx"
    assert mmap.ALLOCATIONGRANULARITY == PAGE_BYTES


@pytest.mark.soak
def test_opening_one_tensor_of_a_large_commit_takes_three_milliseconds(
    place: Path, store: ckptstore.Store
) -> None:
    store.commit(
        {
            "model": {f"layer{i}": torch.randn(1 << 20) for i in range(170)}
            | {"table": torch.randn(50_257, 3968)}
        }
    )
    times, first = [], []
    for _ in range(21):
        snap = store.checkout()
        evict(place)
        started = time.perf_counter()
        snap.open("model/table")
        first.append(time.perf_counter() - started)
        started = time.perf_counter()
        tensor = snap.open("model/layer100")
        times.append(time.perf_counter() - started)
        assert resident_pages(tensor) == 0
    print(f"first {sorted(first)[10] * 1e3:.2f} ms, one tensor {sorted(times)[10] * 1e3:.2f} ms")
    assert sorted(times)[10] <= 3e-3
