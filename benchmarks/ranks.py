"""The case of many ranks: the state of a model under DistributedDataParallel, saved and restored by
four processes of one gloo group.

Ranks are processes of this host and share its processors. A turn is over when all ranks are done.
What peers wrote is synced by the harness within the turn, once their ranks are done. Every restore
goes into wiped memory that is compared, untimed, with what was saved.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptstore
from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.disk import settle
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.saves import limit_write
from benchmarks.status import cpu_seconds
from tests.distributed.pool import Pool

SIZE = 4
SCALE = 0.6
"""Of the width of the GPT that the other cases save: every rank has the state and memory to restore
it into."""

SAVE, LOAD = "ckptstore", "ckptstore, restore"
ROUNDS = 7


class Replicas:
    """What a rank keeps between turns: a model under DistributedDataParallel with its AdamW, and a
    wiped twin to restore into."""

    def __init__(self, scale: float) -> None:
        self.saved, self.into = _replica(scale, seed=0), _replica(scale, seed=1)
        self.store: ckptstore.Store | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """A model and its optimizer, which has made one step."""

    module: nn.parallel.DistributedDataParallel
    optimizer: torch.optim.Optimizer

    @property
    def app(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer}

    @property
    def plain(self) -> dict[str, Any]:
        """The same tensors in dictionaries, as other libraries take them."""
        return {"model": self.module.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.module.parameters():
            yield parameter.data
            yield from (value for value in self.optimizer.state[parameter].values())


def _replica(scale: float, seed: int) -> Replica:
    torch.manual_seed(seed)
    shapes = states.gpt_shapes(scale * SCALE)
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(
            name.replace(".", "_"), nn.Parameter(torch.empty(shape).uniform_(-1, 1))
        )
    parallel = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for parameter in parallel.parameters():
        parameter.grad = torch.empty_like(parameter).uniform_(-1, 1)
    optimizer.step()
    optimizer.zero_grad()
    return Replica(parallel, optimizer)


_here: list[Replicas] = []
"""This rank's, in its own process."""


def prepare(rank: int, scale: float) -> int:
    """Make this rank's replicas; returns the bytes of one."""
    warnings.simplefilter("ignore")  # the peers' own
    _here[:] = [Replicas(scale)]
    return sum(tensor.nbytes for tensor in _here[0].saved.tensors())


def open_store(rank: int, folder: Path) -> None:
    _here[0].store = ckptstore.open(folder)


def close_store(rank: int) -> None:
    store, _here[0].store = _here[0].store, None
    assert store is not None
    store.close()


def commit(rank: int) -> None:
    store = _here[0].store
    assert store is not None
    store.commit(_here[0].saved.app, step=0)


def restore(rank: int) -> None:
    store = _here[0].store
    assert store is not None
    store.checkout(0).restore(_here[0].into.app)


def dcp_save(rank: int, folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(
        _here[0].saved.plain,
        storage_writer=FileSystemWriter(folder, thread_count=2, sync_files=True),
    )


def dcp_load(rank: int, folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(_here[0].into.plain, storage_reader=FileSystemReader(folder))


def snapshot_take(rank: int, folder: Path) -> None:
    from torchsnapshot import Snapshot

    Snapshot.take(str(folder / "snapshot"), _stateful(_here[0].saved), replicated=["**"])


def snapshot_restore(rank: int, folder: Path) -> None:
    from torchsnapshot import Snapshot

    Snapshot(str(folder / "snapshot")).restore(_stateful(_here[0].into))


def _stateful(replica: Replica) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {key: StateDict(all=tree) for key, tree in replica.plain.items()}


def wipe(rank: int) -> None:
    for tensor in _here[0].into.tensors():
        tensor.zero_()


def require_restored(rank: int, who: str) -> None:
    replicas = _here[0]
    wrong = sum(
        not torch.equal(a, b)
        for a, b in zip(replicas.saved.tensors(), replicas.into.tensors(), strict=True)
    )
    if wrong:
        raise RuntimeError(f"{who} did not restore {wrong} tensors on rank {rank}")


PEERS: Mapping[str, tuple[Callable[[int, Path], None], Callable[[int, Path], None]]] = {
    "DCP": (dcp_save, dcp_load),
    "TorchSnapshot": (snapshot_take, snapshot_restore),
}


@contextmanager
def pool_of(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    try:
        yield pool
    finally:
        pool.close()


def cpu_of(pool: Pool) -> float:
    """Processor seconds of all ranks so far."""
    return sum(cpu_seconds(process.pid) for process in pool.processes)


def ranks(context: Context) -> Result:
    with pool_of(SIZE) as pool:
        nbytes = pool.run(prepare, context.scale)[0]
        entrants = [
            _first_commit(context, pool),
            limit_write(context, states.gpt(context.scale * SCALE)),
            _restored(context, pool),
        ]
        for name, (save, load) in PEERS.items():
            if name in {peer.name for peer in context.peers}:
                entrants += [
                    _peer_save(context, pool, name, save),
                    _peer_load(context, pool, name, save, load),
                ]
        series = alternate("ranks", entrants, min(context.rounds, ROUNDS))
    title = (
        f"{SIZE} ranks of this host, one state under DDP: durable save to a fresh place, and "
        "restore on every rank"
    )
    return Result("ranks", title, "s", nbytes, series)


def _first_commit(context: Context, pool: Pool) -> Entrant:
    slot = Slot(context)

    def before() -> None:
        slot.fresh()
        pool.run(open_store, slot.path)

    def after() -> None:
        pool.run(close_store)
        slot.clear()

    return Entrant(
        SAVE, partial(pool.run, commit), before, after, cpu_seconds=partial(cpu_of, pool)
    )


def _restored(context: Context, pool: Pool) -> Entrant:
    folder = context.folder()
    pool.run(open_store, folder)
    pool.run(commit)
    pool.run(close_store)

    def before() -> None:
        pool.run(open_store, folder)
        pool.run(wipe)

    def after() -> None:
        pool.run(close_store)
        pool.run(require_restored, LOAD)

    return Entrant(
        LOAD, partial(pool.run, restore), before, after, cpu_seconds=partial(cpu_of, pool)
    )


def _peer_save(
    context: Context, pool: Pool, name: str, save: Callable[[int, Path], None]
) -> Entrant:
    slot = Slot(context)

    def act() -> None:
        pool.run(save, slot.path)
        settle(slot.path)

    return Entrant(name, act, slot.fresh, slot.clear, cpu_seconds=partial(cpu_of, pool))


def _peer_load(
    context: Context,
    pool: Pool,
    name: str,
    save: Callable[[int, Path], None],
    load: Callable[[int, Path], None],
) -> Entrant:
    folder, who = context.folder(), f"{name}, restore"
    pool.run(save, folder)
    settle(folder)
    return Entrant(
        who,
        partial(pool.run, load, folder),
        partial(pool.run, wipe),
        partial(pool.run, require_restored, who),
        cpu_seconds=partial(cpu_of, pool),
    )
