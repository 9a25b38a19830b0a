"""Tensors that say by attributes which boxes of a whole they have (`CheckpointableTensor` of torch
2.14) are one tensor: on any number of ranks, beside DTensors, and through DCP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import ckptstore
from ckptstore import InvalidInput
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.distributed.layouts import full, group_of, layout, meet, quietly
from tests.distributed.pool import Pool

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

KNOWN_TO_DCP = hasattr(dcp, "CheckpointableTensor")
"""Whether this torch's own DCP looks for the attributes."""

PADDING = -1.0


def part(whole: torch.Tensor, boxes: Sequence[Box]) -> Any:
    """A plain tensor with these boxes of `whole`, between rows and columns of padding."""
    rows = sum(sizes[0] + 1 for _, sizes in boxes)
    columns = max((sizes[1] for _, sizes in boxes), default=0)
    made: Any = torch.full((rows + 1, columns + 2), PADDING, dtype=whole.dtype)
    places, at = [], 1
    for (top, left), (high, wide) in boxes:
        made[at : at + high, 1 : 1 + wide] = whole[top : top + high, left : left + wide]
        places.append((at, 1))
        at += high + 1
    made.global_shape = tuple(whole.shape)
    made.global_offsets = tuple(offsets for offsets, _ in boxes)
    made.local_offsets = tuple(places)
    made.local_sizes = tuple(sizes for _, sizes in boxes)
    return made


def bare(whole: torch.Tensor, offsets: tuple[int, ...], local: torch.Tensor) -> Any:
    """`local` as the one box of `whole` that begins there."""
    made: Any = local
    made.global_shape, made.local_sizes = tuple(whole.shape), (tuple(local.shape),)
    made.global_offsets, made.local_offsets = (offsets,), ((0,) * local.ndim,)
    return made


def rows(n: int, rank: int) -> list[Box]:
    """As `Shard(0)` divides."""
    high, wide = full().shape
    each = -(-high // n)
    return [((rank * each, 0), (min(each, high - rank * each), wide))]


def scattered(n: int, rank: int) -> list[Box]:
    """Every n-th stretch of rows, in two halves; those of the last rank are the wrong way round."""
    high, wide = full().shape
    half, found = wide // 2, []
    for top in range(rank * 50, high, n * 50):
        deep = min(50, high - top)
        found += [((top, 0), (deep, half)), ((top, half), (deep, wide - half))]
    return found[::-1] if rank == n - 1 else found


def on_last(n: int, rank: int) -> list[Box]:
    """All of it on the last rank; the others have a box without elements, or none."""
    return [((0, 0), tuple(full().shape))] if rank == n - 1 else [((517, 0), (0, 0))][:rank]


WAYS = {"rows": rows, "scattered": scattered, "on_last": on_last}


def state(n: int, rank: int, whole: torch.Tensor) -> dict[str, Any]:
    found = {name: part(whole, boxes(n, rank)) for name, boxes in WAYS.items()}
    small = whole[:2, :3].clone()
    lead = part(small, [((0, 0), (1, 3))] if rank == 0 else [((1, 0), (1, 3))] if rank == 1 else [])
    return {"x": {**found, "small": lead if n > 1 else small}, "top": part(whole, rows(n, rank))}


def is_like(got: Any, wanted: Any) -> bool:
    """Bit by bit, padding as it was, and the same boxes."""
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    alike = all(getattr(got, name, None) == getattr(wanted, name, None) for name in names)
    return alike and got.dtype == wanted.dtype and torch.equal(got, wanted)


def commit(rank: int, path: Path, n: int, background: bool) -> str | None:
    meet(n)
    if rank >= n:
        return None
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        ranks, given = ckptstore.Ranks(process_group=group_of(n)), state(n, rank, full())
        if background:
            pending = store.commit_async(given, step=n, ranks=ranks)
            snapshot = pending.wait()
        else:
            snapshot = store.commit(given, step=n, ranks=ranks)
        divided: dict[str, Any] = {"w": layout("rows", full(), n)}
        ids = [store.commit({"x": divided}, ranks=ranks).content_id]
        divided = {"w": part(full(), rows(n, rank))}
        ids.append(store.commit({"x": divided}, ranks=ranks).content_id)
        assert len(set(ids)) == 1, "a DTensor and a tensor with attributes are one tensor"
        return snapshot.id


def restore(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    ranks, wanted = ckptstore.Ranks(process_group=group_of(n)), state(n, rank, full())
    with ckptstore.open(path) as store:
        for step in (2, 4):
            target = state(n, rank, torch.zeros_like(full()))
            memory = {name: each.data_ptr() for name, each in target["x"].items()}
            store.checkout(step).restore(target, ranks=ranks)
            for name, value in wanted["x"].items():
                assert is_like(target["x"][name], value), (step, n, name)
                assert target["x"][name].data_ptr() == memory[name], "filled in place"
            assert is_like(target["top"], wanted["top"])
            other = {"x": {name: layout("columns", full() * 0, n) for name in WAYS}}
            store.checkout(step).restore(other, ranks=ranks, strict=False)
            for name in WAYS:
                columns = layout("columns", full(), n).to_local()
                assert torch.equal(other["x"][name].to_local(), columns)


def test_shards_of_any_number_of_ranks_are_one_tensor(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    for n in (2, 4):
        ids = pool.run(commit, path, n, n == 4)
        assert len({each for each in ids if each}) == 1
    for n in (1, 2, 3, 4):
        pool.run(restore, path, n)
    with ckptstore.open(path) as store:
        for n in (2, 4):
            snapshot = store.checkout(n)
            for name in (*WAYS, "small"):
                wanted = full() if name in WAYS else full()[:2, :3]
                assert torch.equal(snapshot.read(f"x/{name}"), wanted), (n, name)
            assert snapshot.keys() == ["x", "top"]
            snapshot.verify()
            plain = {"x": {name: torch.zeros_like(full()) for name in WAYS}}
            snapshot.restore(plain, strict=False)
            assert all(torch.equal(plain["x"][name], full()) for name in WAYS)
            alone = {"x": {"rows": part(full() * 0, rows(3, 1))}}  # without the other ranks
            snapshot.restore(alone, strict=False)
            assert is_like(alone["x"]["rows"], part(full(), rows(3, 1)))


def refused(rank: int, path: Path, case: str) -> tuple[str, str]:
    """What a commit by two ranks says of boxes that are not the tensor exactly once."""
    meet(2)
    if rank > 1:
        return "", ""
    high, wide = full().shape
    boxes: dict[str, list[list[Box]]] = {
        "missing": [[((0, 0), (100, wide))], [((101, 0), (high - 101, wide))]],
        "overlapping": [[((0, 0), (100, wide))], [((99, 0), (high - 99, wide))]],
        "overlapping here": [[((0, 0), (9, wide)), ((8, 0), (9, wide))], []],
    }
    given: Any = part(full(), boxes.get(case, [rows(2, 0), rows(2, 1)])[rank])
    if case == "outside":
        given.global_offsets = ((high - 1, 0),)
    elif case == "outside of its memory":
        given.local_offsets = ((2, 3),)
    elif case == "counts":
        given.local_sizes = ()
    elif case == "dimensions":
        given.global_shape = (high, wide, 1)
    elif case == "numbers":
        given.global_shape = (high, 0.5)
    elif case == "one memory":
        given.global_offsets, given.local_sizes = ((0, 0), (1, 0)), ((1, wide), (1, wide))
        given.local_offsets = ((1, 1), (1, 1))
    elif case == "no block":
        given = bare(full(), (0, 0), full().to_sparse())
    elif case == "attributes" and rank:
        given.scale = 3
    with ckptstore.open(path) as store:
        ranks = ckptstore.Ranks(process_group=group_of(2))
        try:
            store.commit({"x": {"w": given}}, ranks=ranks)
        except ckptstore.CkptStoreError as error:
            return type(error).__name__, str(error)
    raise AssertionError("committed")


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("missing", "Conflict", "the boxes hold 77,400 of 77,550 elements"),
        ("overlapping", "Conflict", "[0:100, 0:150] and [99:517, 0:150] overlap"),
        ("overlapping here", "Conflict", "[0:9, 0:150] and [8:17, 0:150] overlap"),
        ("outside", "InvalidInput", "lies outside of its global_shape [517, 150]"),
        ("outside of its memory", "InvalidInput", "lies outside of its own shape [261, 152]"),
        ("counts", "InvalidInput", "1 global_offsets, 1 local_offsets and 0 local_sizes"),
        ("dimensions", "InvalidInput", "[517, 150, 1], its global_shape"),
        ("numbers", "InvalidInput", "'float' object cannot be interpreted as an integer"),
        ("one memory", "InvalidInput", "the local_offsets [1, 1] and [1, 1]"),
        ("no block", "InvalidInput", "no plain block of memory"),
        ("attributes", "Conflict", "different attributes on it: scale"),
    ],
)
def test_boxes_that_are_not_the_tensor_exactly_once_are_refused_in_words(
    pool: Pool, tmp_path: Path, case: str, kind: str, words: str
) -> None:
    for found, text in pool.run(refused, tmp_path / "store", case)[:2]:
        assert found == kind and words in text and "x/w" in text, text


def test_a_process_alone_commits_what_is_whole_and_refuses_a_part(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        given = {"x": {"w": part(full(), [((0, 0), (517, 150))])}}
        first = store.commit(given, step=1)
        assert torch.equal(first.read("x/w"), full())
        assert first.content_id == store.commit({"x": {"w": full()}}, step=2).content_id
        for boxes in (rows(2, 0), []):
            with pytest.raises(InvalidInput, match=r"x/w: this rank holds . shards of a Checkpoi"):
                store.commit({"x": {"w": part(full(), boxes)}}, step=3)
        target = {"x": {"w": part(full()[:5], [((0, 0), (5, 150))])}}
        with pytest.raises(InvalidInput, match=r"float32\[517, 150\].*float32\[5, 150\]"):
            first.restore(target)
        target["x"]["w"].local_offsets = ((9, 9),)
        with pytest.raises(InvalidInput, match="lies outside of its own shape"):
            first.restore(target)


class Net(torch.nn.Module):
    """One weight of which each rank has some rows, and one that all have."""

    def __init__(self, n: int, rank: int, value: float) -> None:
        super().__init__()
        own = rows(n, rank)[0]
        self.shard: Any = torch.nn.Parameter(torch.full(own[1], value * (1 + rank)))
        self.tied = self.shard
        self.whole = torch.nn.Parameter(torch.full((40,), value))
        bare(full(), own[0], self.shard)


def trained(n: int, rank: int, value: float) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(n, rank, value)
    optimizer = torch.optim.Adam(net.parameters())
    (net.shard.sum() + net.whole.sum()).backward()
    return net, optimizer


def train(rank: int, path: Path, n: int) -> None:
    """Two ranks commit a module and its optimizer; others go on with them."""
    meet(n)
    if rank >= n:
        return
    ranks = ckptstore.Ranks(process_group=group_of(n))
    with ckptstore.open(path) as store:
        net, optimizer = trained(n, rank, 2.0 if n == 2 else 0.0)
        if n != 3:
            optimizer.step()  # else there are no moments to fill
        if n != 2:
            store.checkout(2).restore({"model": net, "optimizer": optimizer}, ranks=ranks)
            whole = store.checkout(2).state_dict()
            first, high = rows(n, rank)[0][0][0], len(net.shard)
            assert torch.equal(net.shard, whole["model"]["shard"][first : first + high])
            assert net.tied is net.shard and net.shard.global_shape == tuple(full().shape)
            for name in ("exp_avg", "exp_avg_sq"):
                there = whole["optimizer"]["state"]["shard"][name]
                assert there.shape == full().shape
                moment = optimizer.state[net.shard][name]
                assert torch.equal(moment, there[first : first + high])
            optimizer.step()
        store.commit({"model": net, "optimizer": optimizer}, step=n, ranks=ranks)


def test_a_module_with_such_parameters_and_its_optimizer_go_on_on_other_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    for n in (2, 3, 1):
        pool.run(train, tmp_path / "store", n)
    with ckptstore.open(tmp_path / "store") as store:
        first, *others = ({leaf.path for leaf in store.checkout(n).leaves()} for n in (2, 3, 1))
        assert others == [first, first] and "optimizer/state/shard/exp_avg" in first


def save_by_dcp(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    given = {"x": {name: part(full(), boxes(n, rank)) for name, boxes in WAYS.items()}}
    dcp.save(given, storage_writer=StoreWriter(path, step=n), process_group=group_of(n))


def load_by_dcp(rank: int, path: Path, n: int) -> None:
    meet(n)
    if rank >= n:
        return
    for step in (2, 4):
        found = {"x": {name: part(full() * 0, boxes(n, rank)) for name, boxes in WAYS.items()}}
        reader = StoreReader(path, step)
        dcp.load(found, storage_reader=reader, process_group=group_of(n))
        for name, boxes in WAYS.items():
            assert is_like(found["x"][name], part(full(), boxes(n, rank))), (step, n, name)


def overlap_by_dcp(rank: int, path: Path) -> str:
    meet(2)
    if rank > 1:
        return ""
    high, wide = full().shape
    boxes: list[list[Box]] = [[((0, 0), (100, wide))], [((99, 0), (high - 99, wide))]]
    given = {"w": part(full(), boxes[rank])}
    try:
        dcp.save(given, storage_writer=StoreWriter(path), process_group=group_of(2))
    except CheckpointException as error:
        return str(error)
    raise AssertionError("saved")


@pytest.mark.skipif(not KNOWN_TO_DCP, reason="torch before 2.14 takes it for a plain tensor")
def test_dcp_saves_and_loads_such_tensors_on_a_store(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    for n in (2, 4):
        pool.run(quietly, save_by_dcp, path, n)
    for n in (1, 2, 3):
        pool.run(quietly, load_by_dcp, path, n)
    with ckptstore.open(path) as store:
        assert all(torch.equal(store.checkout(2).read(f"x/{name}"), full()) for name in WAYS)
    for text in pool.run(quietly, overlap_by_dcp, tmp_path / "other")[:2]:
        assert "Failed to validate global plan" in text or "overlap" in text, text


def save_alone(rank: int, path: Path, tensor: torch.Tensor) -> None:
    dcp.save({"w": tensor}, storage_writer=StoreWriter(path, step=1))


@pytest.mark.skipif(KNOWN_TO_DCP, reason="this torch divides it")
def test_a_dcp_that_takes_such_a_tensor_for_a_plain_one_saves_no_part_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    with pytest.raises(CheckpointException, match=r"since torch 2\.14"):
        quietly(0, save_alone, path, part(full(), rows(2, 0)))
    quietly(0, save_alone, path, bare(full(), (0, 0), full()))
    with ckptstore.open(path) as store:
        assert torch.equal(store.checkout(1).read("model/w"), full())
