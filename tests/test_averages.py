"""The sum of commits: equal to torch's averages, in bounded memory, of commits of any layout."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckptstore
from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.maintenance.compact.plan import CompactPolicy
from ckptstore.plugins.analysis.averages import (
    CommittedLeaf,
    combine,
    mean,
    moving,
    read_in_turn,
    spherical,
    weighted,
)
from ckptstore.plugins.analysis.sums import add_up
from ckptstore.snapshot import contents_of
from ckptstore.storage.local import LocalStorage
from tests.support.torch_release import FLOAT4

COUNT = 5


def states(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """A model of several chunks, whose batch norm counts batches, at some steps of a training."""
    found = []
    for step in range(COUNT):
        torch.manual_seed(step)
        model = torch.nn.Sequential(
            torch.nn.Linear(700, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3)
        ).to(dtype)
        model[1].num_batches_tracked += step
        found.append({"model": model, "progress": {"step": step}})
    return found


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    return ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=64 << 10))


def committed(store: ckptstore.Store, some: list[dict[str, Any]]) -> list[ckptstore.Snapshot]:
    return [store.commit(state, step=step) for step, state in enumerate(some)]


def test_a_leaf_that_lacks_a_chunk_does_not_get_that_of_the_next_commit(
    store: ckptstore.Store,
) -> None:
    count = (64 << 10) // 4
    commits = [store.commit({"x": torch.full((3 * count,), float(n))}, step=n) for n in range(3)]
    leaves = [
        CommittedLeaf(each.reader, each.trees["x"], 0, each.commit)
        for each in map(contents_of, commits)
    ]
    memory = memoryview(bytearray(3 * count * 4))
    got = [each.unique().tolist() for each in read_in_turn(leaves, range(3), memory)]
    assert got == [[0.0], [1.0], [2.0]]
    leaves[1].__dict__["ids"] = leaves[1].ids[:-32]
    with pytest.raises(Corrupt, match=f"2 chunks.*wanted 3|leaf x, commit {commits[1].id[:12]}"):
        list(read_in_turn(leaves, range(3), memory))


@pytest.mark.parametrize("way", ["mean", "moving"])
def test_an_average_is_that_of_torch(store: ckptstore.Store, way: str) -> None:
    some = states()
    commits = committed(store, some)
    rule = {} if way == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    wanted = AveragedModel(some[0]["model"], use_buffers=True, **rule)
    for state in some:
        wanted.update_parameters(state["model"])
    factors = mean(COUNT) if way == "mean" else moving(COUNT, 0.9)
    made = combine(store, commits, factors, tag="average")
    assert made.parents == tuple(commit.id for commit in commits)
    got = made.state_dict("model")
    for name, tensor in wanted.module.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(got[name], some[-1]["model"].state_dict()[name])
    assert made.read("progress/step") == COUNT - 1
    assert store.commit(some[0], step=9).parents == (commits[-1].id,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_stay_and_are_added_in_more_bits(store: ckptstore.Store, dtype: torch.dtype) -> None:
    some = states(dtype)
    made = combine(store, committed(store, some), weighted([1, 2, 3, 4, 0]))
    wide = torch.promote_types(dtype, torch.float32)
    for name, got in made.state_dict("model").items():
        if got.is_floating_point():
            each = [state["model"].state_dict()[name].to(wide) for state in some]
            wanted = sum(x * (i + 1) / 10 for i, x in enumerate(each[:4]))
            assert got.dtype == dtype
            torch.testing.assert_close(got, wanted.to(dtype))


@FLOAT4
def test_floats_of_eight_bits_are_added_and_those_of_four_are_as_in_the_last(
    store: ckptstore.Store,
) -> None:
    small = [torch.randn(500).to(torch.float8_e4m3fn) for _ in range(2)]
    packed = [torch.randint(255, (64,)).byte().view(torch.float4_e2m1fn_x2) for _ in range(2)]
    pairs = zip(small, packed, strict=True)
    commits = [store.commit({"x": x, "packed": y}, step=n) for n, (x, y) in enumerate(pairs)]
    made = combine(store, commits, mean(2))
    wanted = (small[0].float() + small[1].float()) / 2
    assert torch.equal(made.read("x").float(), wanted.to(torch.float8_e4m3fn).float())
    assert torch.equal(made.read("packed").view(torch.uint8), packed[1].view(torch.uint8))


def test_a_task_vector_is_added(store: ckptstore.Store) -> None:
    commits = committed(store, states())
    made = combine(store, commits[:3], [1, 0.5, -0.5], select="model/0.*")
    a, b, c = (commit.read("model/0.weight") for commit in commits[:3])
    torch.testing.assert_close(made.read("model/0.weight"), a + 0.5 * (b - c))
    assert torch.equal(made.read("model/2.weight"), commits[2].read("model/2.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_arc_keeps_the_length_of_its_ends(store: ckptstore.Store, dtype: torch.dtype) -> None:
    a, b = torch.zeros(70_000, dtype=dtype), torch.zeros(70_000, dtype=dtype)
    a[1], b[2] = 3.0, 3.0
    commits = [store.commit({"x": x, "y": a}, step=n) for n, x in enumerate((a, b))]
    made = combine(store, commits, spherical(0.25))
    x = made.read("x")
    assert float(x.norm()) == pytest.approx(3.0)
    angle = math.atan2(float(x[2]), float(x[1]))
    assert angle == pytest.approx(0.25 * math.pi / 2)
    torch.testing.assert_close(made.read("y"), a)


def test_an_arc_between_numbers_whose_squares_vanish_is_found(store: ckptstore.Store) -> None:
    tiny = torch.tensor([1e-100, 0.0], dtype=torch.float64)
    commits = [store.commit({"x": x}, step=n) for n, x in enumerate((tiny, tiny.flip(0)))]
    got = combine(store, commits, spherical(0.5)).read("x")
    torch.testing.assert_close(got * 1e100, torch.full((2,), math.sqrt(0.5)).double())


def test_tensors_that_all_commits_have_stay_as_they_are(store: ckptstore.Store) -> None:
    frozen = torch.randn(300, 400)
    some = [{"frozen": frozen, "w": torch.full((70_000,), float(n))} for n in range(3)]
    commits = [store.commit(state, step=n) for n, state in enumerate(some)]
    made = combine(store, commits, mean(3))
    assert torch.equal(made.read("frozen"), frozen)
    assert made.stats.new_bytes < frozen.nbytes
    torch.testing.assert_close(made.read("w"), torch.ones(70_000))
    doubled = combine(store, commits, [1, 0.5, 0.5])
    torch.testing.assert_close(doubled.read("frozen"), 2 * frozen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 5, 40_000])
def test_sums_are_rounded_as_one_by_one(dtype: torch.dtype, count: int) -> None:
    """Also where memory begins at an odd number, and at both ends of vectors."""
    torch.manual_seed(count)
    some = [torch.randn(count + 3).to(dtype)[3:] for _ in range(6)]
    some[2][count // 2] = math.inf
    some[3][0] = math.nan
    factors = [0.3, -1.5, 1e-3, 2.0, 0.1, 1.0]
    out = torch.empty(count + 3, dtype=dtype)[3:]
    add_up(iter(some), factors, out)
    exact = sum(x.double() * factor for x, factor in zip(some, factors, strict=True))
    wide = torch.promote_types(dtype, torch.float32)
    rounding = torch.finfo(wide).eps * 20 + (0 if wide == dtype else torch.finfo(dtype).eps)
    torch.testing.assert_close(
        out.double(), exact, rtol=rounding, atol=20 * torch.finfo(wide).eps, equal_nan=True
    )


def test_an_average_occupies_no_thread_of_torch(store: ckptstore.Store) -> None:
    """Such threads spin between pieces, at ten times the cost of the average."""
    x = torch.zeros(2_000_000)
    with torch.profiler.profile(record_shapes=True) as profile:
        for dtype in (torch.float32, torch.float16):
            add_up(iter([x.to(dtype, copy=True)] * 2), [0.5, 0.5], torch.empty_like(x, dtype=dtype))
    computed = {"aten::copy_", "aten::mul", "aten::add_", "aten::add"}
    sizes = [math.prod(e.input_shapes[0]) for e in profile.events() if e.name in computed]
    assert sorted(sizes)[-3:-2] == [1 << 15], "but for the two copies of this test"


@pytest.mark.parametrize("how", ["zstd", "deltas"])
def test_commits_may_be_stored_in_any_way(tmp_path: Path, how: str) -> None:
    storage = ckptstore.Storage(chunk_bytes=64 << 10, codec="zstd" if how == "zstd" else None)
    with ckptstore.open(tmp_path / "store", storage=storage) as store:
        base, some = torch.randn(60_000), []
        for step in range(4):
            some.append(base + step * 1e-4)
            store.commit({"w": some[-1]}, step=step)
        if how == "deltas":
            assert store.compact(CompactPolicy(newest=0)).deltas
        made = combine(store, [0, 1, 2, 3], mean(4))
        torch.testing.assert_close(made.read("w"), torch.stack(some).mean(0))


def test_a_damaged_chunk_is_named(store: ckptstore.Store) -> None:
    commits = committed(store, states())
    for pack in Path(store.url.removeprefix("file://")).glob("packs/**/*"):
        if pack.is_file() and pack.stat().st_size > 1 << 20:
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
            break
    with pytest.raises(Corrupt, match=r"leaf model/0\.weight, commit"):
        combine(store, commits, mean(COUNT))


def test_a_chunk_that_is_gone_after_its_look_up_is_looked_up_again(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = states()
    commits = committed(store, some)
    read_into, gone = LocalStorage.read_into, set[tuple[str, int]]()

    def gone_once(self: LocalStorage, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if sum(map(len, buffers)) > 32 << 10 and (key, offset) not in gone:
            gone.add((key, offset))
            raise NotFound(f"{key} is gone")
        read_into(self, key, offset, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read_into", gone_once)
        made = combine(store, commits, mean(COUNT))
    assert gone
    wanted = torch.stack([state["model"][0].weight.detach() for state in some]).mean(0)
    torch.testing.assert_close(made.read("model/0.weight"), wanted, rtol=1e-6, atol=1e-7)


def test_what_is_not_added_is_not_read(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = committed(store, states())
    monkeypatch.setattr("ckptstore.plugins.analysis.averages.add_up", None)
    made = combine(store, commits, mean(COUNT), select="progress/*")
    assert made.content_id == commits[-1].content_id


def test_a_selection_that_matches_no_leaf_is_refused(store: ckptstore.Store) -> None:
    commits = committed(store, states()[:2])
    with pytest.raises(InvalidInput, match=r"no leaf of .* matches 'modle/.'"):
        combine(store, commits, mean(2), select="modle/*")
    assert store.runs() == [store.run]


def test_what_thinning_left_is_averaged(store: ckptstore.Store) -> None:
    commits = committed(store, [{**state, "optimizer": {"m": 1}} for state in states()])
    store.forget(ckptstore.KeepLast(1).thin("optimizer/**"))
    made = combine(store, [0, 1, 2], mean(3))
    assert sorted(made.keys()) == ["model", "progress"]
    wanted = sum(commit.state_dict("model")["0.weight"] for commit in commits[:3]) / 3
    torch.testing.assert_close(made.state_dict("model")["0.weight"], wanted)
    assert combine(store, [0, 4], mean(2)).read("optimizer/m") == 1  # which the last has


def test_a_training_does_not_resume_from_an_average(store: ckptstore.Store) -> None:
    some = states()
    last = committed(store, some)[-1]
    made = combine(store, [0, 1], mean(2), tag="soup")
    assert made.run == "averages" and store.checkout("soup").id == made.id
    resumed = store.resume(some[0])
    assert resumed and resumed.id == store.checkout("latest").id == last.id
    assert combine(store, [0, 1], mean(2), run=store.run).run == store.run
    with pytest.raises(InvalidInput, match="run"):
        combine(store, [0, 1], mean(2), run="no run")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"x": torch.zeros(3)}, r"x is float32\[2\] in .* and float32\[3\] in"),
        ({"x": torch.zeros(2).double()}, "and float64"),
        ({"x": torch.zeros(2), "more": 1}, "more is absent in .* and value in"),
        ({}, "and absent in"),
    ],
)
def test_commits_that_differ_in_form_are_refused(
    store: ckptstore.Store, other: dict[str, Any], said: str
) -> None:
    a = store.commit({"x": torch.zeros(2)}, step=1)
    b = store.commit(other, step=2)
    with pytest.raises(InvalidInput, match=said):
        combine(store, [a, b], mean(2))


def test_a_tensor_that_the_last_commit_alone_ties_to_another_is_refused(
    store: ckptstore.Store,
) -> None:
    """The sum of what it is tied to would take its place."""
    w, other = torch.ones(3), torch.zeros(3)
    tied = store.commit({"m": {"a": w, "b": w, "n": other}}, step=1)
    untied = store.commit({"m": {"a": w, "b": torch.full((3,), 5.0), "n": other}}, step=2)
    with pytest.raises(InvalidInput, match=r"m/b shares the memory of m/a in .*, and not in"):
        combine(store, [untied, tied], mean(2))
    made = combine(store, [tied, untied], mean(2))
    assert (made.read("m/a").tolist(), made.read("m/b").tolist()) == ([1.0] * 3, [3.0] * 3)
    kept = combine(store, [untied, tied], mean(2), select="m/n")
    assert kept.read("m/b").tolist() == [1.0] * 3


def test_numbers_that_make_no_sense_are_refused(store: ckptstore.Store) -> None:
    a = store.commit({"x": torch.zeros(2)}, step=1)
    with pytest.raises(InvalidInput, match="wanted two or more"):
        combine(store, [a], [1])
    with pytest.raises(InvalidInput, match="got 3 factors for 2 commits"):
        combine(store, [a, a], [1, 2, 3])
    with pytest.raises(InvalidInput, match="add up to 0"):
        weighted([1, -1])
    for weights in ([1e308, 1e308], [math.inf, -math.inf], [math.nan, 1]):
        with pytest.raises(InvalidInput, match="wanted a finite sum other than 0"):
            weighted(weights)
    for factor in (math.nan, math.inf):
        with pytest.raises(InvalidInput, match="wanted finite numbers"):
            combine(store, [a, a], [factor, 1])
        with pytest.raises(InvalidInput, match="wanted a finite number"):
            spherical(factor)
    with pytest.raises(InvalidInput, match="decay is 1"):
        moving(3, 1)
    with pytest.raises(InvalidInput, match="two ends; got 3"):
        combine(store, [a, a, a], spherical(0.5))
