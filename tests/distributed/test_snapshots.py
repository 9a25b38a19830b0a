"""TorchSnapshot's snapshots on 2 and 4 ranks: replicated, divided and private state, and which
ranks can restore it.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptstore
from ckptstore.interop.torchsnapshot import PendingSnapshot, RNGState, Snapshot, StateDict
from ckptstore.interop.torchsnapshot.manifest import ShardedTensorEntry, is_replicated
from ckptstore.interop.torchsnapshot.tricks import FSDPOptimizerAdapter
from tests.distributed.layouts import full, group_of, layout, meet, mesh_of
from tests.distributed.pool import Pool, RankFailed
from tests.support.torch_release import FSDP2


def group(rank: int, n: int) -> Any:
    """The first `n` ranks, None on the others; every rank must call this."""
    meet(n)
    return group_of(n) if rank < n else None


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 20) + rank).sum().backward()
        optimizer.step()


# -- the documentation's distributed examples --


def take_ddp(rank: int, path: str, n: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    model = DistributedDataParallel(network(), process_group=ranks)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    progress = StateDict(current_epoch=3)
    torch.manual_seed(rank)
    train(rank, model, optimizer)
    app_state = {"rng_state": RNGState(), "model": model, "optim": optimizer, "progress": progress}
    Snapshot.take(path, app_state, pg=ranks, replicated=["**"])
    return model.module[0].weight.detach().clone(), torch.rand(1)


def restore_ddp(rank: int, path: str, n: int) -> tuple[torch.Tensor, int, torch.Tensor, int] | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    plain = network()
    model = DistributedDataParallel(plain, process_group=ranks) if n > 1 else plain
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    progress = StateDict(current_epoch=0)
    Snapshot(path, pg=ranks).restore(
        {"rng_state": RNGState(), "model": model, "optim": optimizer, "progress": progress}
    )
    return (
        plain[0].weight.detach(),
        progress["current_epoch"],
        torch.rand(1),
        int(optimizer.state_dict()["state"][0]["step"]),
    )


@pytest.mark.parametrize("taken", [2, 4])
def test_a_replicated_snapshot_is_restored_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, taken: int
) -> None:
    path = str(tmp_path / "runs" / "epoch-3")
    took = pool.run(take_ddp, path, taken)[:taken]
    for n in (1, 2, 4):
        found = pool.run(restore_ddp, path, n)[:n]
        assert len({float(drawn) for _, _, drawn, _ in found}) == n, "no rank repeats another"
        for rank, got in enumerate(found):
            weight, epoch, drawn, steps = got
            assert torch.equal(weight, took[0][0]) and epoch == 3 and steps == 2
            if rank < taken:
                assert torch.equal(drawn, took[rank][1]), "each rank's generator goes on as its own"
    with ckptstore.open_pointer(path) as commit:
        assert torch.equal(commit.read("model/0.weight"), took[0][0])
        assert commit.tags == ("epoch-3",)


def take_own(rank: int, path: str, n: int, replicated: list[str]) -> None:
    ranks = group(rank, n)
    if ranks is not None:
        app_state = {
            "own": StateDict(number=rank, same=torch.ones(600), tensor=torch.full((600,), rank)),
            "lin": nn.Linear(4, 4),
        }
        torch.nn.init.constant_(app_state["lin"].weight, 5)
        Snapshot.take(path, app_state, pg=ranks, replicated=replicated)


def restore_own(rank: int, path: str, n: int, strict: bool) -> Any:
    ranks = group(rank, n)
    if ranks is None:
        return None
    own = StateDict(number=-1, same=torch.zeros(600), tensor=torch.full((600,), -1), added=7)
    Snapshot(path, pg=ranks).restore({"own": own}, strict=strict)
    return own["number"], int(own["tensor"][0]), float(own["same"][0]), own["added"]


def test_what_is_neither_replicated_nor_divided_is_for_the_rank_that_had_it(
    pool: Pool, tmp_path: Path
) -> None:
    path = str(tmp_path / "snap")
    pool.run(take_own, path, 2, ["own/same"])
    for n in (1, 2):
        assert pool.run(restore_own, path, n, True)[:n] == [
            (rank, rank, 1.0, 7) for rank in range(n)
        ]
    with pytest.raises(
        RankFailed, match=r"own/number .* is private to ranks \[0, 1\], and rank 2 has none"
    ):
        pool.run(restore_own, path, 4, True)
    assert pool.run(restore_own, path, 4, False) == [
        (0, 0, 1.0, 7),
        (1, 1, 1.0, 7),
        (-1, -1, 1.0, 7),
        (-1, -1, 1.0, 7),
    ]
    manifest = Snapshot(path).get_manifest()
    assert [key for key, entry in manifest.items() if is_replicated(entry)] == ["0/own/same"]
    assert manifest["0/own"] == manifest["1/own"]
    assert [manifest[f"{rank}/own/number"].get_value() for rank in (0, 1)] == [0, 1]  # type: ignore[attr-defined]
    snapshot = Snapshot(path)
    assert [int(snapshot.read_object(f"{rank}/own/tensor")[0]) for rank in (0, 1)] == [0, 1]
    assert torch.equal(snapshot.read_object("1/lin/weight"), torch.full((4, 4), 5.0))
    assert float(snapshot.read_object("3/own/same")[0]) == 1.0
    with pytest.raises(RuntimeError, match=r"own/number"):
        snapshot.read_object("3/own/number")
    assert snapshot.metadata.world_size == 2
    commit = snapshot.commit
    assert commit.of_rank(1).state_dict("own")["number"] == 1 and set(
        commit.state_dict("own")["number"]
    ) == {0, 1}
    assert commit.of_rank(2).state_dict("own").keys() == {"same"} and commit.only(
        ["lin", "x"]
    ).keys() == ["lin"]
    assert commit.layout is not None and commit.layout.leaves["own/same"].ranks == ((0, 1),)


def take_globs(rank: int, path: str, globs: list[list[str]]) -> list[str] | None:
    ranks = group(rank, 2)
    if ranks is None:
        return None
    one = torch.ones(1)
    state = StateDict(
        foo=one,
        bar=one.clone(),
        baz=[one.clone(), one.clone()],
        qux={"quux": one.clone(), "quuz": one.clone()},
    )
    snapshot = Snapshot.take(path, {"my_stateful": state}, pg=ranks, replicated=globs[rank])
    return [key for key, entry in snapshot.get_manifest().items() if is_replicated(entry)]


@pytest.mark.parametrize(
    ("globs", "replicated"),
    [
        ([["**"]] * 2, ["foo", "bar", "baz/0", "baz/1", "qux/quux", "qux/quuz"]),
        (
            [["my_stateful/baz/*", "my_stateful/qux/*"]] * 2,
            ["baz/0", "baz/1", "qux/quux", "qux/quuz"],
        ),
        (
            [["my_stateful/foo", "my_stateful/qux/*"], ["my_stateful/foo", "my_stateful/bax/*"]],
            ["foo"],
        ),
        ([[], ["**"]], []),
    ],
)
def test_globs_count_where_every_rank_gave_them(
    pool: Pool, tmp_path: Path, globs: list[list[str]], replicated: list[str]
) -> None:
    got = pool.run(take_globs, str(tmp_path / "snap"), globs)[:2]
    assert got == [[f"0/my_stateful/{name}" for name in replicated]] * 2


# -- divided tensors --


def sharded_tensor(spec_ranks: int, ranks: Any, rank: int, fill: torch.Tensor | None) -> Any:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(spec_ranks)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch would rather have DTensors
        made = sharded_tensor.zeros(spec, 517, 150, process_group=ranks)
    for shard in made.local_shards() if fill is not None else ():
        start, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(fill[start : start + rows])
    return made


def divided(rank: int, n: int, ranks: Any, fill: torch.Tensor) -> dict[str, Any]:
    return {
        "rows": layout("rows", fill, n),
        "columns": layout("columns", fill, n),
        "st": sharded_tensor(n, ranks, rank, fill),
    }


def take_divided(rank: int, path: str, n: int, pending: bool) -> bool | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    state = StateDict(**divided(rank, n, ranks, full()))
    if not pending:
        Snapshot.take(path, {"s": state}, pg=ranks)
        return True
    made = Snapshot.async_take(path, {"s": state}, pg=ranks)
    assert isinstance(made, PendingSnapshot)
    for value in (state["rows"].to_local(), state["columns"].to_local()):
        value.zero_()
    return made.wait().path == path and made.done()


def restore_divided(rank: int, path: str, n: int) -> list[bool] | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    got = StateDict(**divided(rank, n, ranks, torch.zeros_like(full())))
    snapshot = Snapshot(path, pg=ranks)
    snapshot.restore({"s": got})
    wanted = divided(rank, n, ranks, full())
    equal = [
        torch.equal(got[name].to_local(), wanted[name].to_local()) for name in ("rows", "columns")
    ]
    into = sharded_tensor(n, ranks, rank, None)
    assert snapshot.read_object("0/s/st", obj_out=into) is into
    for each in (got["st"], into):
        shards = zip(each.local_shards(), wanted["st"].local_shards(), strict=True)
        equal.append(all(torch.equal(mine.tensor, theirs.tensor) for mine, theirs in shards))
    plain = torch.zeros_like(full())
    assert snapshot.read_object("1/s/columns", obj_out=plain) is plain
    return [
        *equal,
        torch.equal(plain, full()),
        torch.equal(snapshot.get_state_dict_for_key("s")["rows"], full()),
    ]


@pytest.mark.parametrize(("taken", "pending"), [(2, False), (4, True)])
def test_divided_tensors_are_divided_anew(
    pool: Pool, tmp_path: Path, taken: int, pending: bool
) -> None:
    path = str(tmp_path / "snap")
    assert pool.run(take_divided, path, taken, pending)[:taken] == [True] * taken
    for n in (2, 4):
        assert pool.run(restore_divided, path, n)[:n] == [[True] * 6] * n
    manifest = Snapshot(path).get_manifest()
    shards = [manifest[f"{rank}/s/rows"] for rank in range(taken)]
    assert all(isinstance(entry, ShardedTensorEntry) and len(entry.shards) == 1 for entry in shards)
    assert sum(entry.shards[0].sizes[0] for entry in shards) == 517  # type: ignore[attr-defined]
    assert torch.equal(Snapshot(path).read_object("0/s/st"), full())


def take_fsdp(rank: int, path: str) -> list[Any]:
    meet(4)
    torch.manual_seed(0)
    module = nn.Linear(33, 70)
    fully_shard(module, mesh=mesh_of(4, False))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 33)).sum().backward()
    optimizer.step()
    Snapshot.take(f"{path}/two", {"model": module, "optim": optimizer})
    fresh = nn.Linear(33, 70)
    fully_shard(fresh, mesh=mesh_of(4, False))
    state = {"model": fresh, "optim": torch.optim.AdamW(fresh.parameters())}
    Snapshot(f"{path}/two").restore(state)
    moments = [
        each.state_dict()["state"][0]["exp_avg"].to_local() for each in (optimizer, state["optim"])
    ]
    return [torch.equal(module.weight.to_local(), fresh.weight.to_local()), torch.equal(*moments)]


def take_fsdp1(rank: int, path: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # FSDP1's warnings about its own code
        return take_and_restore_fsdp1(path)


def take_and_restore_fsdp1(path: str) -> list[Any]:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)), device_id=torch.device("cpu")
        )
        return module, torch.optim.Adam(module.parameters())

    module, optimizer = made()
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    Snapshot.take(
        f"{path}/one", {"optim": FSDPOptimizerAdapter(module, optimizer)}, replicated=["**"]
    )
    fresh, other = made()
    Snapshot(f"{path}/one").restore({"optim": FSDPOptimizerAdapter(fresh, other)})
    pairs = zip(optimizer.state.values(), other.state.values(), strict=True)
    return [torch.equal(mine["exp_avg"], theirs["exp_avg"]) for mine, theirs in pairs]


@FSDP2
def test_fsdp_modules_and_their_optimizers_come_back(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(take_fsdp, str(tmp_path)) == [[True, True]] * 4
    got = pool.run(take_fsdp1, str(tmp_path))
    assert all(got) and all(all(each) for each in got)


# -- ranks that do not agree, and failures --


def take_elsewhere(rank: int, path: str) -> tuple[str, list[str]]:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("ckptstore").addHandler(handler)
    try:
        snapshot = Snapshot.take(f"{path}/{rank}", {"s": StateDict(x=rank)})
    finally:
        logging.getLogger("ckptstore").removeHandler(handler)
    return snapshot.path, records


def test_the_first_ranks_path_counts(pool: Pool, tmp_path: Path) -> None:
    got = pool.run(take_elsewhere, str(tmp_path / "runs"))
    assert [path for path, _ in got] == [str(tmp_path / "runs" / "0")] * 4
    assert got[0][1] == [] and all(
        "the path of rank 0 is used" in warnings[0] for _, warnings in got[1:]
    )
    assert Snapshot(got[0][0]).read_object("3/s/x") == 3


class Failing(StateDict):
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise OSError("no such sensor")
        return super().state_dict()


def take_failing(rank: int, path: str) -> str:
    Snapshot.take(path, {"s": StateDict(x=torch.full((700,), rank))})
    with pytest.raises(ckptstore.CkptStoreError, match="rank 1: OSError: no such sensor") as caught:
        Snapshot.take(path, {"s": Failing(x=torch.zeros(700))})
    assert list(caught.value.causes) == [1]
    with pytest.raises(ckptstore.CkptStoreError):
        Snapshot(f"{path}-nothing").restore({"s": StateDict()})
    state = StateDict(x=torch.zeros(700))
    Snapshot(path).restore({"s": state})
    return str(int(state["x"][0]))


def test_a_sync_failure_on_one_rank_is_raised_on_all_and_nobody_waits_in_a_barrier(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(take_failing, str(tmp_path / "snap")) == ["0", "1", "2", "3"]


def take_diverged(rank: int, path: str) -> bool:
    torch.manual_seed(rank)
    model = DistributedDataParallel(network())
    model(torch.rand(4, 20) + rank)
    Snapshot.take(path, {"model": model}, replicated=["**"])
    with pytest.raises(ckptstore.Conflict, match="own/x should be the same on all ranks"):
        Snapshot.take(path, {"own": StateDict(x=rank)}, replicated=["**"])
    return bool(
        (
            model.module[1].running_mean
            == Snapshot(path).read_object("0/model/module.1.running_mean")
        ).all()
    )


def test_buffers_of_ddp_may_differ_and_other_replicas_that_do_are_named(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(take_diverged, str(tmp_path / "snap")) == [True, False, False, False]


def take_half(rank: int, path: str) -> str:
    half = lambda path, tensor, tracing: tensor.half()  # noqa: E731
    state = StateDict(**divided(rank, 4, None, full()))
    Snapshot.take(
        path, {"s": state, "m": StateDict(w=torch.ones(9, 9))}, _custom_tensor_prepare_func=half
    )
    return str(
        {
            name: str(value.dtype)
            for name, value in Snapshot(path).get_state_dict_for_key("s").items()
        }
    )


def test_prepared_tensors_may_be_divided(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "snap")
    assert set(pool.run(take_half, path)) == {
        str(dict.fromkeys(("rows", "columns", "st"), "torch.float16"))
    }
    assert torch.equal(Snapshot(path).read_object("2/s/st"), full().half())
    assert is_replicated(Snapshot(path).get_manifest()["0/m/w"])


def take_subsets(rank: int, path: str) -> list[Any]:
    keys = ("a", "b") if rank % 2 else ("b", "c")
    state = {key: StateDict(x=torch.full((300,), rank)) for key in reversed(keys)}
    Snapshot.take(path, dict(state))
    got = {key: StateDict(x=torch.zeros(300)) for key in keys}
    Snapshot(path).restore({keys[rank // 2]: got[keys[rank // 2]]})
    return [int(value["x"][0]) for value in got.values()]


def test_ranks_may_have_and_restore_different_keys(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(take_subsets, str(tmp_path / "snap")) == [[0, 0], [1, 0], [0, 2], [0, 3]]


def commit_tied(rank: int, path: str) -> bool:
    weight = torch.full((900,), rank + 1.0)
    state = StateDict(first=weight, second=weight)
    Snapshot.take(path, {"s": state})
    got = StateDict(first=torch.zeros(900), second=torch.zeros(900))
    Snapshot(path).restore({"s": got})
    return bool((got["second"] == rank + 1).all() and (got["first"] == rank + 1).all())


def test_tied_weights_of_each_rank_come_back(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(commit_tied, str(tmp_path / "snap")) == [True] * 4
    with ckptstore.open(tmp_path) as store:
        assert not store.fsck(read_data="100%").findings
        assert store.checkout("snap").layout is not None
