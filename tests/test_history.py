"""The history of tensors: equal to torch's numbers, read once, for every dtype and layout."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.statistics import (
    Moments,
    Statistics,
    added,
    decode_moments,
    decode_statistics,
    is_measured,
)
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.plugins.analysis.measure import squared_distance, statistics_of
from ckptstore.restore.reader import Reader
from ckptstore.snapshot import contents_of
from ckptstore.state.tensors import DTYPES, QUANTIZED, memory_of
from ckptstore.store import internals_of

FLOATS = [name for name in DTYPES if name.startswith(("float", "bfloat")) and is_measured(name)]
INTEGERS = ["bool", "uint8", "int8", "int16", "int32", "int64"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def wanted(x: torch.Tensor) -> dict[str, float]:
    """Statistics by torch, in 64 bits."""
    wide = x.double().flatten()
    finite = wide[wide.isfinite()]
    return {
        "elements": wide.numel(),
        "nan": int(wide.isnan().sum()),
        "inf": int(wide.isinf().sum()),
        "zeros": int((finite == 0).sum()),
        "norm": float(finite.norm()),
        "mean": float(finite.mean()),
        "std": float(finite.std(correction=0)),
        "min": float(finite.min()),
        "max": float(finite.max()),
    }


def check(x: torch.Tensor) -> None:
    found = statistics_of(memory_of(x), str(x.dtype).removeprefix("torch."))
    by_torch = wanted(x)
    # Narrow floats are added in 32 bits: a sum that nearly cancels is exact to its parts' size.
    rounding = 1e-6 * by_torch["std"]
    for name, value in by_torch.items():
        assert getattr(found, name) == pytest.approx(value, rel=2e-5, abs=rounding), name


def test_no_dtype_is_forgotten() -> None:
    left = {name for name, dtype in DTYPES.items() if dtype not in QUANTIZED} - {
        name for name in DTYPES if is_measured(name)
    }
    assert not {name for name in left if DTYPES[name].is_floating_point and "float4" not in name}
    assert set(INTEGERS) <= {name for name in DTYPES if is_measured(name)}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 300, 8192, 70_001])
def test_floats_are_measured_as_by_torch(dtype: str, count: int) -> None:
    torch.manual_seed(count)
    if dtype == "float8_e8m0fnu":  # powers of two, without a sign
        check(torch.rand(count).add(0.5).to(DTYPES[dtype]))
        return
    x = torch.randn(count) * 3 + 0.5
    x[:: max(count // 7, 2)] = 0.0
    x[-1] = -0.0 if count > 1 and "uz" not in dtype else 1.0
    check(x.to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_measured_as_by_torch(dtype: str) -> None:
    check(torch.randint(0, 100, (20_000,)).to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("scale", "offset"), [(1e-25, 0.0), (1e25, 0.0), (1e-4, 1.0), (0.0, 0.0), (0.0, 3.0)]
)
def test_what_32_bits_cannot_add_up_is_added_in_64(
    dtype: torch.dtype, scale: float, offset: float
) -> None:
    x = (torch.randn(50_000).double() * scale + offset).to(dtype)
    found, by_torch = statistics_of(memory_of(x), str(x.dtype)[6:]), wanted(x)
    assert found.norm == pytest.approx(by_torch["norm"], rel=1e-6)
    assert found.std == pytest.approx(by_torch["std"], rel=1e-3, abs=1e-8 * abs(offset))


@pytest.mark.parametrize("at", [0, 8191, 8192, 49_999])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_counted_and_left_out(at: int, odd: float) -> None:
    x = torch.randn(50_000)
    x[at] = odd
    check(x)
    found = statistics_of(memory_of(torch.full((3,), odd)), "float32")
    assert (found.finite, found.norm, math.isnan(found.mean)) == (0, 0.0, True)


def test_statistics_of_parts_add_up() -> None:
    x = torch.randn(100_000)
    parts = [statistics_of(memory_of(part.clone()), "float32") for part in x.split(30_000)]
    assert added(parts).std == pytest.approx(float(x.double().std(correction=0)), rel=1e-5)
    assert added([]).elements == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_distance_is_that_of_torch(dtype: str) -> None:
    a, b = (torch.rand(5_000).add(0.5).to(DTYPES[dtype]) for _ in range(2))
    gap = (a.double() - b.double()).square().sum()
    assert squared_distance(memory_of(a), memory_of(b), dtype) == pytest.approx(float(gap))


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    return ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=64 << 10))


def trained(store: ckptstore.Store, steps: int = 5) -> list[dict[str, Any]]:
    """Commits of a large tensor, one that stays, a small one, an integer; a NaN from step 3 on."""
    torch.manual_seed(0)
    model = {"big": torch.randn(300, 100), "still": torch.randn(200, 200), "bias": torch.randn(5)}
    states = []
    for step in range(steps):
        model["big"][step] += 1
        model["bias"] += 0.5
        if step == 3:
            model["bias"][2] = math.nan
        state = {"model": model, "progress": {"step": step, "seen": torch.tensor(step)}}
        store.commit(state, step=step)
        states.append({key: tensor.clone() for key, tensor in model.items()})
    return states


def test_a_history_has_every_tensor_of_every_commit(store: ckptstore.Store) -> None:
    states = trained(store)
    rows = {(row.step, row.leaf): row for row in store.history()}
    assert len(rows) == 5 * 4
    for step, state in enumerate(states):
        for name, tensor in state.items():
            row = rows[step, f"model/{name}"]
            for field, value in wanted(tensor).items():
                assert getattr(row, field) == pytest.approx(value, rel=1e-5, abs=1e-6), field
            for drift, other in ((row.drift, step - 1), (row.drift_first, 0)):
                if other < 0:
                    assert drift is None
                elif name == "bias" and step >= 3:
                    assert drift is not None
                    assert math.isnan(drift)
                else:
                    far = float((tensor - states[other][name]).double().norm())
                    assert drift == pytest.approx(far, rel=1e-6)


def test_the_first_nan_is_named_leaf_by_leaf(store: ckptstore.Store) -> None:
    trained(store)
    assert [(row.leaf, row.step, row.nan) for row in store.history().first_bad()] == [
        ("model/bias", 3, 1)
    ]
    assert not store.history("model/b*g").first_bad()


def test_a_tensor_without_a_finite_number_has_no_extremes(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "broken") as store:
        store.commit({"model": {"w": torch.full((4,), math.nan)}}, step=1)
        (row,) = store.history("model/w")
        assert all(map(math.isnan, (row.norm, row.mean, row.std, row.min, row.max)))
        assert (row.nan, row.zeros) == (4, 0)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of chunks that are read from now on, together."""
    chunks: list[int] = []
    read = Reader.read

    def counted(self: Reader, requests: Any, *args: Any, **kwargs: Any) -> int:
        chunks.append(len(requests))
        return read(self, requests, *args, **kwargs)

    monkeypatch.setattr(Reader, "read", counted)
    return chunks


def test_a_second_look_and_one_at_a_longer_run_read_no_known_chunk(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(store)
    first = list(store.history("model/*"))
    chunks = counted_reads(monkeypatch)
    assert list(map(repr, store.history("model/*"))) == list(map(repr, first))
    assert list(map(repr, store.history("model/big"))) == [
        repr(row) for row in first if row.leaf == "model/big"
    ]
    assert chunks == []
    state = {"model": store.checkout().state_dict("model"), "progress": {}}
    state["model"]["big"][-1] = 0
    chunks.clear()
    store.commit(state, step=5)
    longer = store.history("model/*")
    assert list(map(repr, longer[: len(first)])) == list(map(repr, first))
    assert [row.drift for row in longer[-3:] if row.leaf == "model/still"] == [0.0]
    assert chunks == [2], "one chunk, and what it was in all commits before"


def test_a_history_reads_each_chunk_once_for_all_that_is_measured_of_it(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"three chunks": torch.randn(300, 100), "one": torch.randn(4_000)}
    for step in range(5):
        for tensor in model.values():
            tensor += 1
        store.commit({"model": model}, step=step)
    chunks = counted_reads(monkeypatch)
    rows = [row for row in store.history() if row.step]
    assert [round(row.drift_first or 0) for row in rows if row.leaf == "model/one"] == [
        round(math.sqrt(4_000) * step) for step in range(1, 5)
    ]
    assert chunks == [5 * (3 + 1)]


def test_a_lost_or_damaged_catalog_costs_time_alone(store: ckptstore.Store) -> None:
    trained(store)
    before = list(map(repr, store.history()))
    store.reindex()
    assert list(map(repr, store.history())) == before


def test_commits_may_be_named_in_any_order_and_of_any_run(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    trained(store, 3)
    with ckptstore.open(tmp_path / "store", run="other") as other:
        other.commit({"model": {"big": torch.zeros(300, 100), "new": torch.ones(4)}}, step=9)
        rows = other.history("model/*g", [9, "main@0", "main@2"])
        assert [(row.run, row.step) for row in rows] == [("other", 9), ("main", 0), ("main", 2)]
        assert rows[1].drift == pytest.approx(rows[1].norm, rel=1e-6)
        assert [row.leaf for row in other.history()] == ["model/big", "model/new"]
        assert len(other.history(run="main")) == 3 * 4
    with pytest.raises(NotFound, match="none of 3 commits of run main has a tensor"):
        store.history("nothing*")


def test_a_tensor_of_another_shape_has_no_drift(store: ckptstore.Store) -> None:
    for step, shape in enumerate([(4, 4), (16,), (16,)]):
        store.commit({"w": torch.ones(shape)}, step=step)
    rows = store.history()
    assert [row.drift for row in rows] == [None, None, 0.0]
    assert [row.drift_first for row in rows] == [0.0, None, None]


def test_a_store_that_is_only_read_is_measured_too(store: ckptstore.Store, tmp_path: Path) -> None:
    trained(store)
    with ckptstore.open(tmp_path / "store", read_only=True) as reader:
        assert len(reader.history()) == 20


def test_a_frame_has_the_rows(store: ckptstore.Store) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    trained(store)
    frame = store.history().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[frame.leaf == "model/bias"].nan.tolist() == [0, 0, 0, 1, 1]


def test_other_layouts_of_one_tensor_have_one_history(store: ckptstore.Store) -> None:
    """A tensor cut as two ranks hold it, against the same held whole."""
    from dataclasses import replace

    from ckptstore.core.model import Box
    from ckptstore.plugins.analysis.measurements import Measurements, Tensor

    x, y = torch.randn(64, 700), torch.randn(64, 700)
    halves = torch.cat([x[:, :350].reshape(-1), x[:, 350:].reshape(-1)])
    found = []
    for state in ({"w": x}, {"w": y}, {"w": halves.reshape(2, 64, 350)}):
        snap = store.commit(state)
        tree = contents_of(snap).trees["w"]
        found.append((snap.id, tree))
    (a, whole), (b, other), (c, _) = found
    boxes = tuple(Box((0, at), (64, 350)) for at in (0, 350))
    parts = [store.commit({"w": part.clone()}) for part in (x[:, :350], x[:, 350:])]
    ids = b"".join(contents_of(part).trees["w"].content(0).ids for part in parts)
    content = replace(whole.content(0), ids=ids, boxes=boxes)
    sharded = replace(whole, contents=[content])
    known = Measurements(internals_of(store).handle, internals_of(store).threads)
    one, two, three = (
        Tensor.of(a, whole, 0),
        Tensor.of(b, other, 0),
        Tensor.of(c, sharded, 0),
    )
    known.look_up([one, two, three], [(one, three), (two, three), (one, two)])
    assert known.distance(one, three) == 0.0
    assert known.distance(two, three) == pytest.approx(known.distance(one, two), rel=1e-9)
    assert known.statistics(three).norm == pytest.approx(known.statistics(one).norm, rel=1e-6)
    assert known.statistics(three).sum == pytest.approx(float(x.double().sum()), abs=1e-2)


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Reader, requests: Any, *args: Any, **kwargs: Any) -> int:
        assert not list(requests), "a tensor was read to be measured"
        return 0

    monkeypatch.setattr(Reader, "read", read)


@pytest.mark.parametrize("way", ["at once", "behind", "lazily"])
def test_a_commit_measures_what_it_hashes(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    forbid_reading(monkeypatch)
    state = {"big": torch.randn(300, 100), "half": torch.randn(400).bfloat16(), "n": 3}
    for step in range(3):
        state["big"][step] = math.nan if step == 2 else 1.0
        if way == "at once":
            snap = store.commit({"model": state}, step=step, stats=True)
        else:
            how = ckptstore.Async(staging="lazy" if way == "lazily" else "eager")
            pending = store.commit_async({"model": state}, step=step, stats=True, background=how)
            snap = pending.wait()
        assert snap.stats
        assert snap.stats.tensors
        assert snap.stats.tensors["model/half"].elements == 400
        assert snap.stats.tensors["model/big"].nan == (100 if step == 2 else 0)
        assert snap.stats.tensors.keys() == {"model/big", "model/half"}
    assert store.commit({"model": state}, step=3).stats.tensors is None


def test_a_history_reads_once_what_a_commit_measured_in_part(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(300, 100)
    x[7], x[8, 8] = 0, math.nan
    at_commit = store.commit({"w": x}, step=1, stats=True).stats.tensors["w"]
    assert type(at_commit) is Moments
    assert (at_commit.nan, at_commit.elements) == (1, 30_000)
    (row,) = store.history("w")
    assert (row.zeros, row.nan) == (100, 1)
    assert (row.min, row.max) == (float(x.nan_to_num().min()), float(x.nan_to_num().max()))
    assert row.norm == pytest.approx(at_commit.norm, rel=1e-9)
    forbid_reading(monkeypatch)
    assert store.history(["w"])[0].zeros == 100, "another selection finds the chunks' statistics"
    moments = store.commit({"w": x}, step=2, stats=True).stats.tensors["w"]
    assert moments.norm == pytest.approx(at_commit.norm, rel=1e-9)
    assert store.history(["w"])[1].zeros == 100, "moments do not take the place of statistics"


def test_statistics_of_older_versions_are_still_read() -> None:
    row = struct.pack("<4Q4d", 10, 1, 2, 3, 5.0, 30.0, -2.0, 4.0)
    found = decode_statistics(row)
    assert found == Statistics(10, 1, 2, 5.0, 30.0, zeros=3, min=-2.0, max=4.0)
    assert found.encode() == row
    assert decode_moments(row).norm == pytest.approx(math.sqrt(30))
    assert decode_moments(Moments(10, 1, 2, 5.0, 30.0).encode()) == Moments(10, 1, 2, 5.0, 30.0)
    for odd in (b"", row[:-1], bytes(41)):
        with pytest.raises(Corrupt, match="damaged statistics"):
            decode_moments(odd)


def test_what_was_committed_without_statistics_is_read_for_them(store: ckptstore.Store) -> None:
    state = {"w": torch.randn(300, 100)}
    store.commit(state)
    snap = store.commit(state, stats=True)
    assert snap.stats.tensors["w"].norm == pytest.approx(float(state["w"].double().norm()))


def test_a_worker_process_measures_nothing(tmp_path: Path) -> None:
    background = ckptstore.Async(executor="process")
    with (
        ckptstore.open(tmp_path / "store", background=background) as store,
        pytest.raises(InvalidInput, match="stats, cast need executor='thread'"),
    ):
        store.commit_async({"w": torch.ones(3)}, stats=True)
