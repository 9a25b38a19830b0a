"""Lazy staging: the call returns before parameters are copied, and no optimizer step sees it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptstore
from ckptstore import Conflict
from ckptstore.commit import async_commit as copies
from ckptstore.state import staging
from ckptstore.store import internals_of
from tests.commit.states import frozen_copy
from tests.state.carrying import assert_same
from tests.support.torch_release import FSDP2, OLD_TORCH

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW single": lambda p: torch.optim.AdamW(p, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
MODELS = [*OPTIMIZERS, pytest.param("FSDP2", marks=FSDP2)]
"""Kinds of training: the last one's parameters are DTensors, stepped by AdamW."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=65536)) as store:
        yield store


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread that copies lazily does not begin before this is set: whoever must wait has to
    copy himself."""
    begin, copying = threading.Event(), copies.copy_task

    def copy_task(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            begin.wait(20)
        copying(*args)

    monkeypatch.setattr(copies, "copy_task", copy_task)
    monkeypatch.setattr(staging, "TASK_COPIES", 1)
    yield begin
    begin.set()


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class Training:
    """A model with BatchNorm and its average, trained step by step."""

    def __init__(self, optimizer: Make, *, sharded: bool = False) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 64)
        )
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        if sharded:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for model in (self.model, self.average):
                fully_shard(model, mesh=mesh)
        self.optimizer = optimizer(self.model.parameters())
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "progress": {"step": 0},
        }

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.after()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).square().mean().backward()

    def after(self) -> None:
        self.average.update_parameters(self.model)
        self.state["progress"]["step"] += 1

    def copy(self) -> dict[str, Any]:
        return {key: _here(value) for key, value in frozen_copy(self.state).items()}


def _here(value: Any) -> Any:
    """With what this rank holds, which is all, in the place of DTensors."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _here(each)
    return value


def _survives(store: ckptstore.Store, training: Training, times: int) -> None:
    training.step()
    for step in range(times):
        wanted = training.copy()
        pending = store.commit_async(
            training.state, step=step, background=ckptstore.Async(staging="lazy")
        )
        training.step()
        training.step()
        assert_same(pending.wait().state_dict(), wanted)


def _trained(kind: str) -> Training:
    return Training(
        OPTIMIZERS.get(kind, OPTIMIZERS["AdamW foreach"]), sharded=kind not in OPTIMIZERS
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_lazy_commit_is_the_state_as_of_the_call(
    store: ckptstore.Store, group_of_one: None, kind: str
) -> None:
    _survives(store, _trained(kind), 3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", MODELS)
def test_two_hundred_lazy_commits(store: ckptstore.Store, group_of_one: None, kind: str) -> None:
    _survives(store, _trained(kind), 200)
    print(f"{kind}: 200 lazy commits of 200 are the state as of the call")


@pytest.mark.parametrize("kind", MODELS)
def test_the_step_waits_and_helps(
    store: ckptstore.Store, group_of_one: None, kind: str, nobody_copies: threading.Event
) -> None:
    training = _trained(kind)
    training.step()
    wanted = training.copy()
    pending = store.commit_async(training.state, background=ckptstore.Async(staging="lazy"))
    training.forward_backward()
    assert not pending.staged()
    threading.Timer(0.05, nobody_copies.set).start()
    training.optimizer.step()
    assert pending.staged()
    training.after()
    assert_same(pending.wait().state_dict(), wanted)


def test_milestones_are_reported_in_order_even_with_a_slow_callback(
    store: ckptstore.Store,
) -> None:
    training = Training(OPTIMIZERS["SGD"])
    told: list[str] = []
    staged, hashed = threading.Event(), threading.Event()

    def on_progress(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "staged":
            staged.set()
            hashed.wait(0.5)  # it must not come before this returns
        told.append(progress.milestone)
        if progress.milestone == "hashed":
            hashed.set()

    pending = store.commit_async(
        training.state, background=ckptstore.Async(staging="lazy", on_progress=on_progress)
    )
    staged.wait(20)
    training.step()
    assert pending.staged()
    pending.wait()
    assert [milestone for milestone in told if milestone != "held"] == [
        "staged",
        "hashed",
        "written",
        "durable",
    ]


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 starts a pool of compilers, which pickles")
@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:DeprecationWarning"
)  # what dynamo imports says so
def test_a_compiled_step_waits_too(store: ckptstore.Store, nobody_copies: threading.Event) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    training.step()
    step = torch.compile(training.optimizer.step, backend="eager")
    wanted = training.copy()
    pending = store.commit_async(training.state, background=ckptstore.Async(staging="lazy"))
    training.forward_backward()
    threading.Timer(0.05, nobody_copies.set).start()
    step()
    assert pending.staged()
    assert_same(pending.wait().state_dict(), wanted)


def test_a_step_under_a_gradient_scaler_waits_too(
    store: ckptstore.Store, nobody_copies: threading.Event
) -> None:
    training = Training(OPTIMIZERS["AdamW foreach"])
    training.step()
    scaler = torch.amp.GradScaler("cpu")
    state = {**training.state, "scaler": scaler}
    wanted = {**training.copy(), "scaler": scaler.state_dict()}
    pending = store.commit_async(state, background=ckptstore.Async(staging="lazy"))
    training.optimizer.zero_grad()
    scaler.scale(training.model(torch.randn(16, 64)).square().mean()).backward()
    threading.Timer(0.05, nobody_copies.set).start()
    scaler.step(training.optimizer)
    assert pending.staged()
    scaler.update()
    assert_same(pending.wait().state_dict(), wanted)


def test_a_restore_waits_too(store: ckptstore.Store, nobody_copies: threading.Event) -> None:
    training = Training(OPTIMIZERS["SGD"])
    training.step()
    first = store.commit(training.state)
    training.step()
    wanted = training.copy()
    pending = store.commit_async(training.state, background=ckptstore.Async(staging="lazy"))
    threading.Timer(0.05, nobody_copies.set).start()
    first.restore(training.state)
    assert_same(pending.wait().state_dict(), wanted)


def test_a_writer_outside_of_a_step_waits_first(
    store: ckptstore.Store, nobody_copies: threading.Event
) -> None:
    training = Training(OPTIMIZERS["SGD"])
    wanted = training.copy()
    pending = store.commit_async(training.state, background=ckptstore.Async(staging="lazy"))
    threading.Timer(0.05, nobody_copies.set).start()
    pending.wait_staged()
    with torch.no_grad():
        training.model[0].weight.zero_()
    assert_same(pending.wait().state_dict(), wanted)


def test_a_write_without_waiting_is_detected(
    store: ckptstore.Store, nobody_copies: threading.Event
) -> None:
    training = Training(OPTIMIZERS["SGD"])
    pending = store.commit_async(training.state, background=ckptstore.Async(staging="lazy"))
    with torch.no_grad():
        training.model[0].weight.zero_()
    nobody_copies.set()
    with pytest.raises(Conflict, match=r"model/0\.weight was written to while"):
        pending.wait()
    assert store.log() == []


def test_a_lazy_copy_that_could_not_begin_leaves_nothing_behind(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(OPTIMIZERS["SGD"])
    training.step()
    commits = internals_of(store).async_commits
    lazily = ckptstore.Async(staging="lazy")
    with monkeypatch.context() as patch:
        patch.setattr(commits._stagers, "submit", _refuse)
        with pytest.raises(RuntimeError, match="have ended"):
            store.commit_async(training.state, step=1, background=lazily)
    assert commits._lazy == []
    _survives(store, training, 1)


def _refuse(work: Callable[[], object]) -> None:
    raise RuntimeError("the threads have ended")


def test_only_memory_changed_by_steps_is_staged_lazily() -> None:
    from ckptstore.state.flatten import flatten
    from ckptstore.state.leaf_sources import leaves_of
    from ckptstore.state.writes import changed_by_steps, optimizers_in

    training = Training(OPTIMIZERS["AdamW foreach"])
    training.step()
    frozen = torch.nn.Linear(100, 100)
    flats = flatten({**training.state, "frozen": frozen, "plain": torch.zeros(1000)})
    paths = [path for flat in flats.values() for path in flat.schema.paths]
    lazily = {paths[n] for n in changed_by_steps(optimizers_in(training.state), leaves_of(flats))}
    assert {path.split("/")[0] for path in lazily} == {"model", "optimizer"}
    assert not any("running" in path or "num_batches" in path for path in lazily)
    assert {"model/0.weight", "model/1.bias", "optimizer/state/0.weight/exp_avg"} <= lazily
