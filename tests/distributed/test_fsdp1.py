"""FullyShardedDataParallel (FSDP1) and its optimizer, restored on other numbers of ranks and in
other wrappers.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import ckptstore
from tests.distributed.layouts import group_of, meet, mesh_of
from tests.distributed.pool import Pool
from tests.support.torch_release import FSDP2

ROWS = 517
"""Rows of a weight that rank edges cut within a chunk, on any number of ranks."""


def quietly(rank: int, task: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 about its own classes
        return task(rank, *args)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, ROWS), nn.ReLU(), nn.Linear(ROWS, 7))


def fsdp1(n: int, orig: bool) -> nn.Module:
    module = network()
    options: dict[str, Any] = {
        "process_group": group_of(n),
        "device_id": torch.device("cpu"),
        "use_orig_params": orig,
    }
    # a Sequential
    module[0] = FullyShardedDataParallel(module[0], **options)  # type: ignore[operator]
    return FullyShardedDataParallel(module, **options)


def fsdp2(n: int) -> nn.Module:
    module = network()
    fully_shard(module, mesh=mesh_of(n, False))
    return module


MAKE: dict[str, Callable[[int], nn.Module]] = {
    "fsdp1": lambda n: fsdp1(n, True),
    "flat": lambda n: fsdp1(n, False),
    "fsdp2": fsdp2,
    "plain": lambda n: network(),
}


def made(kind: str, n: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = MAKE[kind](n)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(100 + number)
    optimizer.zero_grad()
    loss = module(torch.randn(8, 60)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def train_and_commit(rank: int, path: Path, kind: str, n: int) -> tuple[str, list[float]] | None:
    """Two steps, a commit, two more steps; a run without commits has the same losses."""
    meet(n)
    if rank >= n:
        return None
    module, optimizer = made(kind, n)
    with ckptstore.open(path, run=f"{kind}{n}") as store:
        store.commit(
            {"model": module, "optimizer": optimizer},
            step=0,
            ranks=ckptstore.Ranks(process_group=group_of(n)),
        )
        assert not optimizer.state, "a commit makes no state"
        losses = [step(module, optimizer, number) for number in range(2)]
        snapshot = store.commit(
            {"model": module, "optimizer": optimizer},
            step=2,
            ranks=ckptstore.Ranks(process_group=group_of(n)),
        )
        losses += [step(module, optimizer, number) for number in range(2, 4)]
    plain, plain_optimizer = made(kind, n)
    assert losses == [step(plain, plain_optimizer, number) for number in range(4)]
    return snapshot.content_id, losses[2:]


def restore_and_train(
    rank: int, path: Path, run: str, kind: str, n: int, used: bool
) -> tuple[list[float], str] | None:
    """Restore into a fresh or a used optimizer, commit, and continue."""
    meet(n)
    if rank >= n:
        return None
    module, optimizer = made(kind, n)
    if used:
        step(module, optimizer, 50)
    where: Any = group_of(n) if n > 1 else "alone"
    with ckptstore.open(path, run=run) as store:
        store.checkout(2).restore(
            {"model": module, "optimizer": optimizer}, ranks=ckptstore.Ranks(process_group=where)
        )
        again = store.commit(
            {"model": module, "optimizer": optimizer},
            ranks=ckptstore.Ranks(process_group=where),
            tag=f"{kind}-{n}-{used}",
        )
    return [step(module, optimizer, number) for number in range(2, 4)], again.content_id


def state_in(path: Path, run: str, ref: int | str) -> dict[str, torch.Tensor]:
    """The tensors of a commit, the optimizer's by name."""
    with ckptstore.open(path, run=run) as store:
        state = store.checkout(ref).state_dict()
    moments = {
        f"{name}/{key}": value
        for name, each in state["optimizer"]["state"].items()
        for key, value in each.items()
    }
    return {**state["model"], **moments}


MOVES = [
    ("fsdp1", 4, "fsdp1", 2),
    ("fsdp1", 4, "plain", 1),
    pytest.param("fsdp1", 4, "fsdp2", 3, marks=FSDP2),
    ("flat", 2, "fsdp1", 4),
    ("flat", 2, "flat", 4),
    ("flat", 2, "flat", 1),
]


@pytest.mark.parametrize(("kind", "n", "other", "m"), MOVES)
def test_an_fsdp1_optimizer_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, kind: str, n: int, other: str, m: int
) -> None:
    path, run = tmp_path / "store", f"{kind}{n}"
    content, losses = pool.run(quietly, train_and_commit, path, kind, n)[0]
    wanted = state_in(path, run, 2)
    assert {name for name in wanted if name.startswith("2.bias")} == {
        "2.bias",
        "2.bias/step",
        "2.bias/exp_avg",
        "2.bias/exp_avg_sq",
    }
    assert wanted["0.weight/exp_avg"].shape == (ROWS, 60)
    for used in (False, True):
        for got, again in pool.run(quietly, restore_and_train, path, run, other, m, used)[:m]:
            assert got == pytest.approx(losses, rel=1e-5)
            assert got == losses or other != kind
            assert again == content or other != kind
        found = state_in(path, run, f"{other}-{m}-{used}")
        assert set(found) == set(wanted) and all(
            torch.equal(found[name], value) for name, value in wanted.items()
        )


def restore_parts(rank: int, path: Path) -> None:
    """A target that does not fit is refused; a selection leaves the rest unchanged."""
    meet(4)
    options: dict[str, Any] = {
        "process_group": group_of(4),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    other = FullyShardedDataParallel(nn.Linear(60, 3), **options)
    stranger = torch.optim.AdamW(other.parameters())
    module, optimizer = made("fsdp1", 4)
    with ckptstore.open(path) as store:
        snapshot = store.checkout("fsdp14@2")
        with pytest.raises(ckptstore.InvalidInput) as caught:
            snapshot.restore({"model": other, "optimizer": stranger})
        assert "optimizer/state/weight: wanted by the target, not in the commit" in str(
            caught.value
        )
        assert "optimizer/state/2.weight: in the commit, not wanted by the target" in str(
            caught.value
        )
        snapshot.restore({"model": module, "optimizer": optimizer}, select="optimizer/state/0.*")
    of = {
        id(value): name.removeprefix("_fsdp_wrapped_module.")
        for name, value in module.named_parameters()
    }
    filled = {
        of[id(parameter)]: float(state["step"])
        for parameter, state in optimizer.state.items()
        if state
    }
    assert set(filled.values()) <= {2.0} and all(name.startswith("0.") for name in filled)


def test_a_part_of_an_fsdp1_optimizers_state_is_restored(pool: Pool, tmp_path: Path) -> None:
    pool.run(quietly, train_and_commit, tmp_path / "store", "fsdp1", 4)
    pool.run(quietly, restore_parts, tmp_path / "store")
