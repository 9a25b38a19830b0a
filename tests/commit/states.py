"""States that are mutated while they are committed, and what they were."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ckptstore
from ckptstore.snapshot import Snapshot
from tests.state.carrying import assert_same


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.ReLU(), torch.nn.Linear(96, 16)
    )


def training(large: int = 300_000) -> dict[str, Any]:
    """A bit of everything: a module with BatchNorm, optimizer state, tied tensors, views, sparse,
    strided and tiny ones, plain values."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    base = torch.randn(50_000)
    tied = torch.randn(300, 70)
    tensors = {
        "large": torch.randn(large),
        "tied": [tied, tied],
        "views": {
            "all": base,
            "head": base[:20_000],
            "overlapping": base[10_000:30_000],
            "shaped": base[:40_000].view(200, 200),
        },
        "strided": torch.randn(300, 200).t(),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 3, 500]]), torch.randn(3, 400), (1000, 400), check_invariants=True
        ).coalesce(),
        "tiny": torch.randn(3),
        "integers": torch.arange(1000),
        "half": torch.randn(5000).to(torch.bfloat16),
    }
    return {
        "model": model,
        "optimizer": optimizer,
        "tensors": tensors,
        "progress": {"epoch": 1, "losses": [0.5, 0.25]},
    }


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def frozen_copy(state: dict[str, Any]) -> dict[str, Any]:
    """What a commit of `state` must give back: its optimizer has the names of its model's
    parameters."""
    copied = {key: copy.deepcopy(_state_dict(value)) for key, value in state.items()}
    names = [name for name, _ in state["model"].named_parameters()]
    optimizer = copied["optimizer"]
    optimizer["state"] = {names[number]: value for number, value in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    return copied


def spoil(state: dict[str, Any]) -> None:
    """Write to everything in place, in each of the ways that training code does."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.data.add_(1)
        for tensor in _every_tensor(_state_dict(state["optimizer"])):
            tensor.add_(1)
        for tensor in _every_tensor(state["tensors"]):
            tensor.add_(1)
        state["tensors"]["sparse"]._values().add_(1)
    state["model"].train()(torch.randn(8, 64))
    state["progress"]["epoch"] += 1
    state["progress"]["losses"].append(0.0)


@contextmanager
def attack(state: dict[str, Any]) -> Iterator[None]:
    """Spoil the state at once, and again and again on another thread until the block is left."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            spoil(state)

    spoil(state)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_committed(snapshot: Snapshot, wanted: dict[str, Any]) -> None:
    assert_same(_strided(snapshot.state_dict()), _strided(wanted))


def _strided(state: dict[str, Any]) -> dict[str, Any]:
    """With the parts of the sparse tensor in its place."""
    sparse = state["tensors"]["sparse"]
    return {
        **state,
        "tensors": {**state["tensors"], "sparse": [sparse._indices(), sparse._values()]},
    }


HANGS_S = 20.0
"""A test that fails must not leave its commit waiting for ever."""


class Gate:
    """An `on_progress` that holds a commit at one milestone until it is opened."""

    def __init__(self, milestone: str) -> None:
        self.milestone = milestone
        self.there, self.opened = threading.Event(), threading.Event()

    def __call__(self, progress: Any) -> None:
        if progress.milestone == self.milestone:
            self.there.set()
            self.opened.wait(HANGS_S)


def held_commit(
    store: ckptstore.Store, state: dict[str, Any], **options: Any
) -> tuple[ckptstore.PendingCommit, Callable[[], None]]:
    """A commit in flight that has been hashed and goes on when the second is called."""
    gate = Gate("hashed")
    pending = store.commit_async(state, **options, background=ckptstore.Async(on_progress=gate))
    gate.there.wait()
    return pending, gate.opened.set


def _state_dict(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _every_tensor(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _every_tensor(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _every_tensor(item)
