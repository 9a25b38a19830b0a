"""How long an asynchronous save keeps its caller. What goes on afterwards is waited for untimed, before anybody else acts."""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import ckptstore
from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.limits import RUN_BYTES, THREADS
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.states import State

LIMIT_COPY = "limit: memcpy"
THREAD, PROCESS = "ckptstore", "ckptstore, a process"


def held(context: Context) -> Result:
    """From the second commit on: the first round, which is not counted, makes everybody's buffers."""
    state = states.gpt(context.scale)
    with ExitStack() as stack:
        entrants = [stack.enter_context(copying(state))]
        entrants += [ours(context, state, stack, name, executor) for name, executor in ((THREAD, "thread"), (PROCESS, "process"))]
        wanted = {peer.name for peer in context.peers}
        if "DCP" in wanted:
            stack.enter_context(process_group(context.folder() / "rendezvous"))
            entrants += [theirs(context, f"DCP async_save, {kind}", dcp(state, kind)) for kind in ("thread", "process")]
        if "TorchSnapshot" in wanted:
            entrants.append(theirs(context, "TorchSnapshot async_take", async_take(state)))
        series = alternate("held", entrants, context.rounds)
    return Result("held", "An asynchronous save of 1.45 GB: how long the caller is held", "s", state.nbytes, series)


@contextmanager
def copying(state: State) -> Iterator[Entrant]:
    """The bytes of the state, copied by two threads to memory that was touched before."""
    target = torch.zeros(state.nbytes, dtype=torch.uint8)
    pieces, end = [], target.data_ptr()
    for tensor in state.tensors.values():
        for start in range(0, tensor.nbytes, RUN_BYTES):
            pieces.append((end + start, tensor.data_ptr() + start, min(RUN_BYTES, tensor.nbytes - start)))
        end += tensor.nbytes
    with ThreadPoolExecutor(THREADS) as threads:
        yield Entrant(LIMIT_COPY, lambda: list(threads.map(lambda piece: ctypes.memmove(*piece), pieces)))
    del target


def ours(context: Context, state: State, stack: ExitStack, name: str, executor: Any) -> Entrant:
    store = stack.enter_context(ckptstore.open(context.folder(), executor=executor))
    pending: list[ckptstore.PendingCommit] = []
    return Entrant(name, lambda: pending.append(store.commit_async(state.app)), after=lambda: pending.pop().wait())


def theirs(context: Context, name: str, save: Callable[[Path], Callable[[], object]]) -> Entrant:
    """`save` into a folder returns what waits for it."""
    slot = Slot(context)
    waits: list[Callable[[], object]] = []

    def after() -> None:
        waits.pop()()
        slot.clear()

    return Entrant(name, lambda: waits.append(save(slot.path)), slot.fresh, after)


def dcp(state: State, kind: str) -> Callable[[Path], Callable[[], object]]:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    def save(folder: Path) -> Callable[[], object]:
        writer = FileSystemWriter(folder, thread_count=2, sync_files=True)
        found: Any = async_save(state.app, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(kind))
        return lambda: getattr(found, "upload_completion", found).result()

    return save


def async_take(state: State) -> Callable[[Path], Callable[[], object]]:
    from torchsnapshot import Snapshot, StateDict

    app = {key: StateDict(**tree) for key, tree in state.app.items()}
    return lambda folder: Snapshot.async_take(str(folder), app).wait


@contextmanager
def process_group(rendezvous: Path) -> Iterator[None]:
    """A group of one: DCP's process executor wants one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
