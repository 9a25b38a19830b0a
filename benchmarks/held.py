"""How long an asynchronous save keeps its caller. What goes on afterwards is waited for untimed,
before anybody else acts."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import ckptstore
from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.limits import RUN_BYTES, THREADS
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.states import State
from benchmarks.training import Work

LIMIT_COPY = "limit: memcpy"
THREAD, PROCESS, LAZY, FROZEN = (
    "ckptstore",
    "ckptstore, a process",
    "ckptstore, lazy",
    "ckptstore, frozen",
)
DCP, DCP_KEPT, DCP_LAZY = (
    "DCP async_save, {}",
    "DCP async_save, {}, memory kept",
    "DCP async_save, staged beside",
)
KINDS = ("thread", "process")

FORWARD_BACKWARD_S = 0.4
"""Between a commit and the optimizer's step that may have to wait for it."""


def held(context: Context) -> Result:
    """From the second commit on: the first round, which is not counted, makes everybody's
    buffers."""
    state = states.gpt(context.scale)
    work = Work(FORWARD_BACKWARD_S * context.scale)
    with ExitStack() as stack:
        entrants = [stack.enter_context(copying(state))]
        entrants += [
            ours(context, state, stack, name, executor)
            for name, executor in ((THREAD, "thread"), (PROCESS, "process"))
        ]
        entrants += [lazy(context, state, work, stack), frozen(context, state, stack)]
        wanted = {peer.name for peer in context.peers}
        if "DCP" in wanted:
            entrants += list(dcp(context, state, work, stack))
        if "TorchSnapshot" in wanted:
            entrants.append(theirs(context, "TorchSnapshot async_take", async_take(state)))
        series = alternate("held", entrants, context.rounds)
    return Result(
        "held",
        "An asynchronous save of 1.45 GB: how long the caller is held",
        "s",
        state.nbytes,
        series,
    )


@contextmanager
def copying(state: State) -> Iterator[Entrant]:
    """The bytes of the state, copied by two threads to memory that was touched before."""
    target = torch.zeros(state.nbytes, dtype=torch.uint8)
    pieces, end = [], target.data_ptr()
    for tensor in state.tensors.values():
        for start in range(0, tensor.nbytes, RUN_BYTES):
            pieces.append(
                (end + start, tensor.data_ptr() + start, min(RUN_BYTES, tensor.nbytes - start))
            )
        end += tensor.nbytes
    with ThreadPoolExecutor(THREADS) as threads:
        yield Entrant(
            LIMIT_COPY, lambda: list(threads.map(lambda piece: ctypes.memmove(*piece), pieces))
        )
    del target


def ours(context: Context, state: State, stack: ExitStack, name: str, executor: Any) -> Entrant:
    store = stack.enter_context(
        ckptstore.open(context.folder(), background=ckptstore.Async(executor=executor))
    )
    pending: list[ckptstore.PendingCommit] = []
    return Entrant(
        name,
        lambda: pending.append(store.commit_async(state.app)),
        after=lambda: pending.pop().wait(),
    )


def lazy(context: Context, state: State, work: Work, stack: ExitStack) -> Entrant:
    """The same bytes as weights and moments of a real optimizer: what counts is the call and the
    wait before the next step."""
    store = stack.enter_context(ckptstore.open(context.folder()))
    model, optimizer = trained(state)
    pending: list[ckptstore.PendingCommit] = []

    def act() -> None:
        pending.append(
            store.commit_async(
                {"model": model, "optimizer": optimizer}, background=ckptstore.Async(staging="lazy")
            )
        )
        work.step()
        optimizer.step()

    def held_s() -> float:
        return pending.pop().timings.held_s or 0.0

    return Entrant(LAZY, act, after=lambda: pending[-1].wait(), value=held_s)


def frozen(context: Context, state: State, stack: ExitStack) -> Entrant:
    store = stack.enter_context(ckptstore.open(context.folder()))
    tensors = {
        path: tensor.clone() for path, tensor in state.tensors.items()
    }  # no other entrant writes to these
    model = parameters(tensors).requires_grad_(False)
    pending: list[ckptstore.PendingCommit] = []

    def act() -> None:
        pending.append(
            store.commit_async({"model": model}, background=ckptstore.Async(trust_version=True))
        )

    return Entrant(FROZEN, act, after=lambda: pending.pop().wait())


def parameters(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters are these tensors."""
    module = torch.nn.Module()
    for path, tensor in tensors.items():
        module.register_parameter(
            path.replace(".", "-").replace("/", "-"), torch.nn.Parameter(tensor)
        )
    return module


def trained(state: State) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW, made of the tensors of `states.gpt`. The gradients are one memory of
    zeros: nothing diverges."""
    names = [path.removeprefix("model/") for path in state.tensors if path.startswith("model/")]
    model = parameters({name: state.tensors[f"model/{name}"] for name in names})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    device = next(model.parameters()).device
    zeros = torch.zeros(max(parameter.numel() for parameter in model.parameters()), device=device)
    for name, parameter in zip(names, model.parameters(), strict=True):
        moments = {
            moment: state.tensors[f"optimizer/{moment}/{name}"]
            for moment in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.tensor(1.0, device=device), **moments}
        parameter.grad = zeros[: parameter.numel()].view_as(parameter)
    return model, optimizer


def theirs(context: Context, name: str, save: Callable[[Path], Callable[[], object]]) -> Entrant:
    """`save` into a folder returns what waits for it."""
    slot = Slot(context)
    waits: list[Callable[[], object]] = []

    def after() -> None:
        waits.pop()()
        slot.clear()

    return Entrant(name, lambda: waits.append(save(slot.path)), slot.fresh, after)


def dcp(context: Context, state: State, work: Work, stack: ExitStack) -> Iterator[Entrant]:
    """As it is by default, which is fresh memory for each save; with memory that it keeps; and
    copying while training goes on."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stack.enter_context(process_group(context.folder() / "rendezvous"))
    off = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    kept = stack.enter_context(closing(DefaultStager(replace(off, use_shared_memory=True))))
    beside = stack.enter_context(closing(DefaultStager(replace(off, use_async_staging=True))))
    ways: dict[str, dict[str, Any]] = {DCP: {}, DCP_KEPT: {"async_stager": kept}}
    for name, options in ways.items():
        for kind in KINDS:
            yield theirs(
                context, name.format(kind), partial(async_save, state.app, kind=kind, **options)
            )
    yield dcp_lazy(context, state, work, beside)


def async_save(
    app_state: Any, folder: Path, *, kind: str = "thread", **options: Any
) -> Callable[[], object]:
    found = begin_async_save(app_state, folder, kind=kind, **options)
    return lambda: getattr(found, "upload_completion", found).result()


def begin_async_save(app_state: Any, folder: Path, *, kind: str = "thread", **options: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.checkpoint.state_dict_saver import async_save as save

    writer = FileSystemWriter(folder, thread_count=2, sync_files=True)
    return save(
        app_state,
        storage_writer=writer,
        async_checkpointer_type=AsyncCheckpointerType(kind),
        **options,
    )


def dcp_lazy(context: Context, state: State, work: Work, stager: Any) -> Entrant:
    """As `lazy`: the call, and what the caller must wait for itself before the next step."""
    slot = Slot(context)
    model, optimizer = trained(state)
    saves: list[Any] = []
    held: list[float] = []

    def act() -> None:
        started = perf_counter()
        saves.append(
            begin_async_save(
                {"model": model, "optimizer": optimizer}, slot.path, async_stager=stager
            )
        )
        called = perf_counter()
        work.step()
        waiting = perf_counter()
        saves[-1].staging_completion.result()
        held.append(called - started + perf_counter() - waiting)
        optimizer.step()

    def after() -> None:
        saves.pop().upload_completion.result()
        slot.clear()

    return Entrant(DCP_LAZY, act, slot.fresh, after, value=held.pop)


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
