"""Scenarios of the fork server that commit in the background, alone and as one of many ranks."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

import ckptstore
from ckptstore.errors import Unavailable
from tests.support.workloads import CHUNK_BYTES, small

Report = Callable[..., None]
"""Takes a kind and words, and writes them as a line."""


def commit_async_on(report: Report, place: str, first: int, executor: str) -> None:
    """Commit asynchronously, and again, and say what is known of each: that it was hashed, that it
    is durable."""
    _commit_on(report, place, first, small, executor=executor)


def commit_lazily_on(report: Report, place: str, first: int, executor: str) -> None:
    """The same with weights that are copied while the next step waits to write to them: at step n,
    all of them are n."""
    weights = torch.nn.ParameterList(torch.full((50_000,), float(first - 1)) for _ in range(3))
    for weight in weights:
        weight.grad = torch.full_like(weight, -1)
    optimizer = torch.optim.SGD(weights, lr=1.0)

    def stepped(step: int) -> dict[str, Any]:
        optimizer.step()
        return {"weights": weights, "optimizer": optimizer}

    _commit_on(report, place, first, stepped, executor=executor, staging="lazy")


def _commit_on(
    report: Report,
    place: str,
    first: int,
    state_at: Callable[[int], dict[str, Any]],
    *,
    executor: Any,
    staging: Any = "eager",
) -> None:
    def on_progress(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "hashed" and store.worker_pid:
            report("worker", store.worker_pid)
        report(progress.milestone, progress.step)

    with ckptstore.open(
        place,
        storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES),
        background=ckptstore.Async(executor=executor),
    ) as store:
        for step in range(first, first + 10_000):
            store.commit_async(
                state_at(step),
                step=step,
                background=ckptstore.Async(staging=staging, on_progress=on_progress),
            )


def commit_beside_a_child(report: Report, place: str) -> None:
    """Commit asynchronously by a worker, then fork a child as data loaders do, which holds whatever
    is open here; commit again and stay in the midst of that."""
    asleep = threading.Event()

    def on_progress(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "hashed":
            report("hashed", store.worker_pid)
            asleep.wait()

    with ckptstore.open(
        place,
        storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES),
        background=ckptstore.Async(executor="process"),
    ) as store:
        store.commit_async(small(1), step=1).wait()
        if not (child := os.fork()):
            signal.pause()
        report("child", child)
        store.commit_async(
            small(2), step=2, background=ckptstore.Async(on_progress=on_progress)
        ).wait()


def commit_together_on(
    report: Report, place: str, meeting: str, rank: int, size: int, first: int, held: bool = False
) -> None:
    """Commit asynchronously by workers, as one of many ranks of a session each, and again, and say
    what is known of each commit. With `held`, stay in the midst of the first."""
    os.setsid()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    asleep = threading.Event()

    def on_progress(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "hashed":
            report("worker", store.worker_pid)
        report(progress.milestone, progress.step)
        if progress.milestone == "hashed" and held:
            asleep.wait()

    store = ckptstore.open(
        place,
        storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES),
        background=ckptstore.Async(executor="process"),
    )
    for step in range(first, first + 10_000):
        try:
            pending = store.commit_async(
                small(step),
                step=step,
                ranks=ckptstore.Ranks(timeout_s=60),
                background=ckptstore.Async(on_progress=on_progress),
            )
        except Unavailable as error:
            report("alone", step, *error.causes)
            return
        if error := pending.exception():
            report("failed", step, type(error).__name__, *getattr(error, "causes", ()))
