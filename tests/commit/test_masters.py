"""16-bit weights beside float32 masters are stored as their rounding, bit for bit, and whatever
moves, collects or damages chunks knows that they need two."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptstore
from ckptstore.commit import masters
from ckptstore.commit.plan import Extent, plan_chunks
from ckptstore.core.ids import CHECKSUM_BYTES, ChunkId, checksum, digest
from ckptstore.objects import patches
from ckptstore.objects.pack import entries
from ckptstore.repository.dedup import items_of
from ckptstore.repository.footers import read_table
from ckptstore.repository.pack_writer import NewPatch
from ckptstore.state import rounding
from ckptstore.state.leaf_sources import BytesSource
from ckptstore.storage.local import LocalStorage
from tests.maintenance.stores import heal
from tests.net.training import same
from tests.support.patching import roundings, small_chunks_too

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
        if way == "compacted":
            assert_nearer(store)
            assert any(len(each.bases) == 2 for each in roundings(store)), "none was of two chunks"
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


MASTERS_BYTES = sum(4 * int(np.prod(shape)) for shape in SHAPES)


class Reads(NamedTuple):
    """How many bytes each read of a pack takes, and what happens once the masters were read."""

    nbytes: list[int]
    behind_masters: list[Callable[[], object]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found, read_into = Reads([], []), LocalStorage.read_into

    def reading(self: LocalStorage, key: str, start: int, out: Sequence[memoryview]) -> None:
        if found.behind_masters and sum(found.nbytes) >= MASTERS_BYTES:
            found.behind_masters.pop()()
        read_into(self, key, start, out)
        found.nbytes.append(sum(map(len, out)) if key.startswith("packs/") else 0)

    monkeypatch.setattr(LocalStorage, "read_into", reading)
    return found


def beside(dtype: torch.dtype, *, any_bits: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and their masters, some of which are not what the weights round."""
    single = state(1, dtype)["optimizer"]["fp32"]
    if not any_bits:
        single = {name: each.nan_to_num(1, 2, 3) for name, each in single.items()}
    half = {name: each.to(dtype) for name, each in single.items()}
    half["w0"].view(-1)[4000:8000:100] += 1
    return {"half": half, "single": single}


def zeros(
    like: dict[str, dict[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    return {
        key: {name: torch.zeros_like(each, dtype=dtype) for name, each in some.items()}
        for key, some in like.items()
    }


def alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(same(found[name], each) for name, each in wanted.items())


@pytest.mark.parametrize("to", [None, torch.float32], ids=str)
def test_a_restore_reads_masters_once(to: torch.dtype | None, tmp_path: Path, reads: Reads) -> None:
    """For themselves and for the weights, be these converted or not."""
    wanted = beside(torch.bfloat16)
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        stored = store.commit(wanted, step=1).new_bytes
        assert stored < 1.3 * MASTERS_BYTES
        reads.nbytes.clear()
        target = zeros(wanted, to)
        store.checkout(1).restore(target, dtype=to)
        assert MASTERS_BYTES < sum(reads.nbytes) < 1.01 * stored
        assert alike(target["single"], wanted["single"])
        assert alike(
            target["half"], {name: w.to(to or w.dtype) for name, w in wanted["half"].items()}
        )


@pytest.mark.parametrize("any_bits", [False, True], ids=["numbers", "any bits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masters_that_others_write_to_meanwhile_cost_no_weights(
    dtype: torch.dtype, any_bits: bool, tmp_path: Path, reads: Reads
) -> None:
    """Nor is their pack distrusted. What NaN round to is as the format states."""
    wanted = beside(dtype, any_bits=any_bits)
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        store.commit(wanted, step=1)
        target = zeros(wanted)
        reads.nbytes.clear()
        reads.behind_masters.append(lambda: [each.fill_(7) for each in target["single"].values()])
        store.checkout(1).restore(target)
        assert not reads.behind_masters and not alike(target["single"], wanted["single"])
        assert alike(target["half"], wanted["half"])
        assert not store._handle.objects.suspect_packs.packs()
        store.checkout(1).restore(target)
        assert all(alike(target[key], wanted[key]) for key in wanted)


def test_chunks_whose_memory_overlaps_are_made_aside(tmp_path: Path, reads: Reads) -> None:
    """Else the words that no rounding makes were added twice, and the masters were read again."""
    wanted = beside(torch.bfloat16)
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        store.commit(wanted, step=1)
        raw = memoryview(wanted["half"]["w0"].view(-1).view(torch.uint8).numpy())
        first = next(each for each in roundings(store) if each.id == digest(raw[: each.raw_bytes]))
        memory = memoryview(bytearray(first.raw_bytes))
        reads.nbytes.clear()
        store._handle.objects.read_into(first.id * 2, [memory, memory])
        assert memory == raw[: first.raw_bytes]
        assert sum(reads.nbytes) < 3 * first.raw_bytes


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


def test_weights_whose_masters_are_lost_are_healed_by_a_mirror_that_has_them_alone(
    tmp_path: Path,
) -> None:
    wanted = state(1, torch.bfloat16)
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        lost = store.commit(wanted, step=1).id
        alone = store.commit({"model": wanted["model"]}, step=2).id
        store.push(tmp_path / "mirror", alone, create=True)
    max((tmp_path / "s/packs").rglob("*-*"), key=lambda file: file.stat().st_size).unlink()
    heal(tmp_path / "s", tmp_path / "mirror")
    with ckptstore.open(tmp_path / "s") as store:
        check(store, 2, {"model": wanted["model"]})
        assert store.fsck("data").damaged_commits.keys() == {lost}


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


def sparse(count: int, random: np.random.Generator) -> torch.Tensor:
    """Numbers of which most are zero."""
    numbers = torch.zeros(count)
    numbers[torch.from_numpy(random.permutation(count)[: count // 50])] = 1 / 3
    return numbers


def test_two_roundings_of_the_same_masters_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """They differ in few words, so that each could be a patch of the other."""
    masters = sparse(40_000, np.random.default_rng(0))
    both = {"a": masters.to(torch.bfloat16), "b": masters.to(torch.float16), "m": masters}
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        store.commit({"model": {"a": both["a"], "b": both["b"]}, "optimizer": {"m": masters}})
    with ckptstore.open(tmp_path / "s") as store:
        for path, wanted in (("model/a", both["a"]), ("model/b", both["b"])):
            assert torch.equal(store.checkout().read(path), wanted)


@given(st.lists(st.tuples(st.integers(512, 90_000), st.sampled_from(DTYPES)), max_size=6))
def test_each_run_of_a_plan_comes_once_and_weights_follow_their_masters(
    leaves: list[tuple[int, torch.dtype]],
) -> None:
    tensors = [t for n, dtype in leaves for t in (torch.ones(n, dtype=dtype), torch.ones(n))]
    extents = [Extent(tuple(t.shape), t.itemsize, t.nbytes, str(t.dtype)[6:]) for t in tensors]
    plan = plan_chunks(extents, STORAGE.chunk_bytes, 128 << 10)
    sources = [BytesSource(t.view(torch.uint8).numpy().tobytes()) for t in tensors]
    pairs = masters.find(plan, sources)
    assert len({part.leaf for part in pairs.values()}) == len(pairs) == len(leaves)
    batches = masters.beside(plan, pairs)
    runs = [run for batch in batches for run in batch]
    assert sorted(map(id, runs)) == sorted(id(run) for batch in plan.batches for run in batch)
    for batch in batches:
        for n, run in enumerate(batch):
            if run.part.leaf in pairs:
                before = [r for r in batch[:n] if r.part.leaf == pairs[run.part.leaf].leaf]
                assert 2 * run.cuts[0] in {cut for r in before for cut in r.cuts}


class Walk:
    """Commits of weights and masters that change in all ways, beside each other, and what is done
    to their store."""

    def __init__(self, store: ckptstore.Store, random: Random) -> None:
        self.store, self.random, self.step = store, random, 0
        self.numbers = np.random.default_rng(random.getrandbits(32))
        self.wanted = dict[int, dict[str, torch.Tensor]]()
        self.pending = list[Any]()
        self.leaves = dict[str, tuple[torch.Tensor, torch.Tensor]]()
        self.earlier = defaultdict[str, list[tuple[torch.Tensor, torch.Tensor]]](list)
        for i, shape in enumerate(SHAPES):
            self.leaves[f"w{i}"] = self.trained(shape, DTYPES[i % 2])

    def trained(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        single = any_bits(int(np.prod(shape)), self.numbers).reshape(tuple(shape))
        return single, single.to(dtype)

    def change(self, name: str) -> None:
        single, half = (tensor.clone() for tensor in self.leaves.pop(name))
        few = torch.from_numpy(self.numbers.integers(0, single.numel(), single.numel() // 40))
        match self.random.choice(("train", "few", "few", "off", "alone", "form", "no", "back")):
            case "train":
                single, half = self.trained(single.shape, half.dtype)
            case "few":
                single.view(-1)[few] = torch.randn(len(few))
                half = single.to(half.dtype)
            case "off":
                half.view(-1)[few] = 0.5
            case "alone":
                half = self.trained(half.shape, half.dtype)[1]
            case "back" if self.earlier[name]:
                single, half = self.random.choice(self.earlier[name])
            case "form":
                single = single.reshape(-1)
                half = half.reshape(-1) if self.random.random() < 0.5 else half
        name = f"v{self.step}" if self.random.random() < 0.1 else name
        self.leaves[name] = single, half
        self.earlier[name].append((single, half))

    def save(self) -> None:
        for name in list(self.leaves):
            self.change(name)
        self.step += 1
        tensors = {f"half/{name}": half for name, (_, half) in self.leaves.items()}
        if self.random.random() < 0.9:
            tensors |= {f"single/{name}": single for name, (single, _) in self.leaves.items()}
        self.wanted[self.step] = tensors
        state = defaultdict[str, dict[str, Any]](dict)
        for path, tensor in tensors.items():
            key, name = path.split("/")
            state[key][name] = tensor
        if self.random.random() < 0.5:
            self.pending.append(self.store.commit_async(dict(state), step=self.step))
        else:
            self.store.commit(dict(state), step=self.step)

    def keep(self) -> None:
        """Forget, thin, compact and collect beside what is being saved."""
        match self.random.choice(("no", "no", "forget", "thin", "compact", "gc")):
            case "forget" if len(self.wanted) > 1:
                step = self.random.choice(list(self.wanted))
                self.wait()
                self.store.forget([step])
                del self.wanted[step]
            case "thin" if any("single/" in path for each in self.wanted.values() for path in each):
                self.wait()
                self.store.forget(ckptstore.KeepLast(1).thin("single/**"))
            case "compact":
                self.store.compact(ckptstore.CompactPolicy(newest=self.random.randint(0, 1)))
            case "gc":
                self.store.gc(grace_s=0, max_unused=0)

    def wait(self) -> None:
        for each in self.pending:
            each.wait()
        self.pending = []


def assert_nearer(store: ckptstore.Store) -> None:
    """Of each chunk that is a base of patches there is a copy that fewer patches make, or none: gc
    may have taken the base of a patch that no commit needs (docs/gc.md)."""
    handle = store._handle
    tables = [read_table(handle.storage, pack) for pack in handle.log.replay().packs.values()]
    every = [entry for table in tables for entry in entries(table)]
    nearest = dict[bytes, int]()
    for entry in every:
        nearest[entry.chunk] = min(nearest.get(entry.chunk, 99), entry.depth)
    patched = [entry for entry in every if entry.patch_of]
    assert all(
        nearest.get(base, -1) < entry.depth
        for entry in patched
        for base in items_of(entry.patch_of)
    )


@pytest.mark.parametrize("n", range(2))
def test_whatever_weights_and_masters_do_every_commit_stays(
    n: int, seed: int, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        walk = Walk(store, Random(f"{seed} {n}"))
        for _ in range(12):
            walk.save()
            walk.keep()
        walk.wait()
        assert_nearer(store)
        for _ in range(2):
            store.gc(grace_s=0, max_unused=0)
        assert not store.fsck("data").findings, f"seed {seed}"
    with ckptstore.open(tmp_path / "s") as store:
        for step, tensors in walk.wanted.items():
            snapshot = store.checkout(step)
            gone = {leaf.path for leaf in snapshot.leaves() if leaf.gone}
            assert all(path.startswith("single/") for path in gone)
            for path in tensors.keys() - gone:
                assert same(snapshot.read(path), tensors[path]), f"seed {seed}: {step} {path}"


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


def needing(monkeypatch: pytest.MonkeyPatch, bases: dict[ChunkId, tuple[ChunkId, ...]]) -> None:
    """Commits name these chunks as the masters of others."""
    make = masters.Rounder.make

    def forging(*given: Any) -> NewPatch | None:
        made = make(*given)
        if made is None or made.id not in bases:
            return made
        named = bases[made.id]
        stored = forged(forged(made.stored, 16, named[0]), 64, named[1])
        return made._replace(bases=named, stored=stored)

    monkeypatch.setattr(masters.Rounder, "make", forging)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deep", [False, True], ids=["in a circle", "too deep"])
def test_a_rounding_of_roundings_is_refused_with_bounded_work(
    deep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a row of weights is made of the two before, and the first of the two last, or of
    none: to follow all ways to the end would take 2^12 reads."""
    numbers = torch.Generator().manual_seed(0)
    single = {f"w{i}": torch.randn(16_000, generator=numbers) for i in range(12)}
    half = {name: each.to(torch.bfloat16) for name, each in single.items()}
    ids = [ChunkId(digest(each.view(torch.uint8).numpy())) for each in half.values()]
    row = {each: (ids[i - 1], ids[i - 2]) for i, each in enumerate(ids) if i > 1 or not deep}
    needing(monkeypatch, row)
    with ckptstore.open(tmp_path / "s", storage=STORAGE) as store:
        store.commit({"half": half, "single": single}, step=1)
        store.commit({"half": half}, step=2)
    reads, read_into = 0, LocalStorage.read_into

    def counting(*given: Any, **named: Any) -> None:
        nonlocal reads
        reads += 1
        read_into(*given, **named)

    monkeypatch.setattr(LocalStorage, "read_into", counting)
    with ckptstore.open(tmp_path / "s") as store:
        snapshot = store.checkout(1)
        for i, name in enumerate(half):
            reads = 0
            if deep and i < 2:
                assert same(snapshot.read(f"half/{name}"), half[name])
            else:
                with pytest.raises(ckptstore.Corrupt):
                    snapshot.read(f"half/{name}")
            assert reads < 20
            assert same(snapshot.read(f"single/{name}"), single[name])
        found = store.fsck("data").findings
        assert len(found) >= (1 if deep else len(row)), found
        store.usage()
        store.compact(ckptstore.CompactPolicy(newest=1))
        store.forget([1])
        store.gc(grace_s=0, max_unused=0)
        assert not store.push(tmp_path / "mirror", create=True).sent
        store.repair(apply=True, read_data="all")
        with pytest.raises(ckptstore.CkptStoreError):
            store.checkout(2).state_dict()
