"""TorchSnapshot's examples of several ranks with another import, and its tests of replicas and
failures.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel

import ckptstore
from ckptstore.interop.torchsnapshot import RNGState, Snapshot, StateDict
from ckptstore.interop.torchsnapshot.manifest import ShardedTensorEntry, is_replicated
from ckptstore.interop.torchsnapshot.tricks import FSDPOptimizerAdapter
from tests.distributed.layouts import quietly
from tests.distributed.pool import Pool
from tests.distributed.test_snapshots import group, network, sharded_tensor

# -- its example of DistributedDataParallel --


def train_ddp(
    rank: int, work_dir: str, n: int, epochs: int, restore_path: str | None
) -> list[str] | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    torch.manual_seed(42)
    model = DistributedDataParallel(network(), process_group=ranks)
    optim = torch.optim.Adagrad(model.parameters(), lr=0.01)
    progress = StateDict(current_epoch=0)
    app_state = {"rng_state": RNGState(), "model": model, "optim": optim, "progress": progress}
    if restore_path:
        Snapshot(restore_path, pg=ranks).restore(app_state)
    losses = []
    while progress["current_epoch"] < epochs:
        for _ in range(3):
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(torch.rand(8, 20)), torch.rand(8, 3)
            )
            optim.zero_grad()
            loss.backward()
            optim.step()
        progress["current_epoch"] += 1
        losses.append(loss.item().hex())
        Snapshot.take(
            f"{work_dir}/epoch-{progress['current_epoch']}{'-again' if restore_path else ''}",
            app_state,
            ranks,
            replicated=["**"],
        )
    return losses


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_ddp_example_resumes_as_if_it_had_not_stopped(
    pool: Pool, tmp_path: Path, n: int
) -> None:
    whole = pool.run(train_ddp, str(tmp_path / "run"), n, 4, None)[:n]
    rest = pool.run(train_ddp, str(tmp_path / "run"), n, 4, str(tmp_path / "run" / "epoch-2"))[:n]
    assert [losses[2:] for losses in whole] == rest
    with ckptstore.open(tmp_path / "run") as store:
        assert store.checkout("epoch-4").content_id == store.checkout("epoch-4-again").content_id
        assert n == 1 or all(
            is_replicated(entry)
            for path, entry in Snapshot(str(tmp_path / "run" / "epoch-4")).get_manifest().items()
            if "weight" in path
        )


# -- its example of torchrec: rows of embeddings, and the fused optimizer's state of them --


def tables(ranks: Any, rank: int, n: int, by: float) -> dict[str, StateDict]:
    fill = torch.arange(517.0 * 150).view(517, 150) * by
    dense = torch.full((16, 8), by)
    made = {
        name: sharded_tensor(n, ranks, rank, fill + i)
        for i, name in enumerate(("t1", "t2", "momentum1", "momentum2"))
    }
    model = StateDict(
        {"over.weight": dense, **{f"embeddings.{name}.weight": made[name] for name in ("t1", "t2")}}
    )
    optim = StateDict(
        state={name: {"momentum": made[f"momentum{name[1]}"]} for name in ("t1", "t2")},
        param_groups=[{"lr": by}],
    )
    return {"dmp": model, "optim": optim, "progress": StateDict(current_epoch=int(by))}


def take_tables(rank: int, path: str, n: int) -> list[str] | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    snapshot = Snapshot.take(path, tables(ranks, rank, n, 3.0), pg=ranks, replicated=["**"])
    snapshot.restore(tables(ranks, rank, n, 0.0))
    return sorted(snapshot.get_manifest())


def restore_tables(rank: int, path: str, n: int) -> bool | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    got, wanted = tables(ranks, rank, n, 0.0), tables(ranks, rank, n, 3.0)
    Snapshot(path, pg=ranks).restore(dict(got))
    pairs = [
        (got["dmp"][name], wanted["dmp"][name])
        for name in ("embeddings.t1.weight", "embeddings.t2.weight")
    ]
    pairs += [
        (got["optim"]["state"][name]["momentum"], wanted["optim"]["state"][name]["momentum"])
        for name in ("t1", "t2")
    ]
    assert all(
        torch.equal(mine.local_shards()[0].tensor, theirs.local_shards()[0].tensor)
        for mine, theirs in pairs
    )
    assert got["optim"]["param_groups"] == [{"lr": 3.0}] and got["progress"]["current_epoch"] == 3
    return torch.equal(got["dmp"]["over.weight"], wanted["dmp"]["over.weight"])


@pytest.mark.parametrize(("taken", "restored"), [(2, 4), (4, 1)])
def test_the_torchrec_example_moves_to_another_number_of_ranks(
    pool: Pool, tmp_path: Path, taken: int, restored: int
) -> None:
    path = str(tmp_path / "run" / "last")
    paths = pool.run(take_tables, path, taken)[:taken]
    assert all(each == paths[0] for each in paths)
    assert pool.run(restore_tables, path, restored)[:restored] == [True] * restored
    manifest = Snapshot(path).get_manifest()
    for rank in range(taken):
        assert isinstance(manifest[f"{rank}/dmp/embeddings.t1.weight"], ShardedTensorEntry)
        assert isinstance(manifest[f"{rank}/optim/state/t2/momentum"], ShardedTensorEntry)
    assert is_replicated(manifest["0/dmp/over.weight"]) and "1/dmp/over.weight" not in manifest


# -- its example of FSDP --


def fsdp1(kind: StateDictType, seed: int, ranks: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(9, 16), nn.Linear(16, 3))
    module = FullyShardedDataParallel(net, process_group=ranks, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(module, kind)
    return module, torch.optim.Adagrad(module.parameters(), lr=0.1)


def take_fsdp1(rank: int, path: str, n: int, kind: StateDictType) -> Any:
    ranks = group(rank, n)
    if ranks is None:
        return None
    module, optim = fsdp1(kind, 0, ranks)
    module(torch.ones(2, 9)).sum().backward()
    optim.step()
    Snapshot.take(path, {"model": module, "optim": FSDPOptimizerAdapter(module, optim)}, pg=ranks)
    return after_a_step(module, optim)


def restore_fsdp1(rank: int, path: str, n: int, kind: StateDictType) -> Any:
    ranks = group(rank, n)
    if ranks is None:
        return None
    module, optim = fsdp1(kind, 1, ranks)
    Snapshot(path, pg=ranks).restore(
        {"model": module, "optim": FSDPOptimizerAdapter(module, optim)}
    )
    return after_a_step(module, optim)


def after_a_step(module: Any, optim: torch.optim.Optimizer) -> list[list[float]]:
    """All weights after one more training step, which depends on the optimizer's state too."""
    optim.zero_grad()
    module(torch.ones(2, 9)).square().sum().backward()
    optim.step()
    with FullyShardedDataParallel.summon_full_params(module):
        return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "restored"),
    [(StateDictType.SHARDED_STATE_DICT, 2), (StateDictType.LOCAL_STATE_DICT, 4)],
)
def test_fsdp1_modules_go_on_as_they_would_have(
    pool: Pool, tmp_path: Path, kind: StateDictType, restored: int
) -> None:
    path = str(tmp_path / "run" / "last")
    wanted = pool.run(quietly, take_fsdp1, path, 4, kind)[0]
    for got in pool.run(quietly, restore_fsdp1, path, restored, kind)[:restored]:
        assert all(
            torch.allclose(torch.tensor(mine), torch.tensor(theirs))
            for mine, theirs in zip(got, wanted, strict=True)
        )


# -- replicas that are recognized without a glob --


def take_inferred(rank: int, path: str, ignored: list[str]) -> list[str] | None:
    ranks = group(rank, 2)
    if ranks is None:
        return None
    net = nn.Sequential(nn.Linear(4, 200), nn.Linear(200, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    for name in ignored:
        nn.init.constant_(net.get_parameter(name), rank)
    app_state = {
        "ddp": DistributedDataParallel(net, process_group=ranks),
        "plain": nn.Linear(4, 200),
    }
    snapshot = Snapshot.take(path, app_state, pg=ranks)
    for name in ignored:
        assert (snapshot.read_object(f"{rank}/ddp/{name}") == rank).all()
    manifest = snapshot.get_manifest()
    return [key for key, entry in manifest.items() if is_replicated(entry)]


@pytest.mark.parametrize("ignored", [[], ["0.weight", "0.bias"]])
def test_what_ddp_keeps_equal_is_replicated_without_a_glob(
    pool: Pool, tmp_path: Path, ignored: list[str]
) -> None:
    names = [name for name in ("0.weight", "0.bias", "1.weight", "1.bias") if name not in ignored]
    assert (
        pool.run(take_inferred, str(tmp_path / "snap"), ignored)[:2]
        == [[f"0/ddp/{name}" for name in names]] * 2
    )


# -- failures in the background --


class Unreadable(StateDict):
    """On rank 1 its state fails to be read, like a disk that fails during a write."""

    def state_dict(self) -> dict[str, Any]:
        return (
            {"x": torch.ones(700), "odd": object()}
            if dist.get_rank() == 1
            else {"x": torch.ones(700), "odd": 1}
        )


def fail_in_the_background(rank: int, path: str, n: int) -> bool | None:
    ranks = group(rank, n)
    if ranks is None:
        return None
    Snapshot.take(path, {"s": StateDict(x=torch.zeros(700))}, pg=ranks)
    with pytest.raises((ckptstore.CkptStoreError, RuntimeError), match=r"rank 1.*register_value"):
        Snapshot.async_take(path, {"s": Unreadable()}, pg=ranks).wait()
    return not bool(Snapshot(path, pg=ranks).get_state_dict_for_key("s")["x"].any())


@pytest.mark.parametrize("n", [2, 4])
def test_an_async_take_that_fails_on_one_rank_fails_on_all_and_leaves_the_snapshot_before(
    pool: Pool, tmp_path: Path, n: int
) -> None:
    assert pool.run(fail_in_the_background, str(tmp_path / "run" / "last"), n)[:n] == [True] * n
