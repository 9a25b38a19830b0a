"""States on a CUDA device: what is decided without one, and, where there is one, commits and
restores of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from benchmarks import cuda
from ckptstore.state import staging
from ckptstore.state.staging import PIECE_BYTES, beside_training, devices_of, plan_staging
from ckptstore.state.staging_buffers import Buffer
from ckptstore.state.stateful import RNGState, reseeded
from ckptstore.state.tensors import TensorSource

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)


def test_device_memory_is_fetched_piece_by_piece() -> None:
    # not in host memory, like a device's
    away = torch.empty(3 * PIECE_BYTES + 1, dtype=torch.uint8, device="meta")
    plan = plan_staging([TensorSource(away), TensorSource(torch.zeros(5000))], 1 << 40)
    fetched = [copy for task in plan.tasks for copy in task if copy.source is not None]
    ends = [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 1]
    assert [(copy.start, copy.start + copy.nbytes) for copy in fetched] == list(pairwise(ends))


def test_without_a_device_none_is_prepared() -> None:
    tensors = [torch.zeros(3), torch.empty(3, device="meta")]
    assert devices_of(map(TensorSource, tensors)) == frozenset()
    with beside_training(torch.device("cpu")) as stream:
        assert stream is None


def test_threads_that_commit_at_once_share_one_stream_beside_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one waits for must be what the other copies through."""
    device, found = torch.device("cuda", 77), list[Any]()

    def make(of: torch.device) -> object:
        if not found:
            found.append(None)
            other.start()
            other.join(0.2)  # it is done by then if it made a stream of its own
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(staging, "_streams", {}, raising=False)
    other = threading.Thread(target=lambda: found.append(staging._stream(device)))
    found[0:] = [staging._stream(device), *found[1:]]
    other.join()
    assert len(found) == 2 and found[0] is found[1]


def test_memory_is_pinned_by_way_of_the_device_that_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Any] = []

    class Cudart:
        cudaHostUnregister = staticmethod(lambda address: 0)

        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            used.append((address, nbytes, flags))
            return 0

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        used.append(device)
        yield
        used.append("left")

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: Any) -> None:
            used.append(other)

    for name, fake in (
        ("cudart", Cudart),
        ("device", on),
        ("Stream", Stream),
        ("current_stream", lambda of: f"current of {of}"),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(staging, "_streams", {}, raising=False)
    monkeypatch.setattr(staging, "devices_of", lambda devices: devices)
    arena, one, two = (
        Buffer(1 << 21, shared=False),
        torch.device("cuda", 1),
        torch.device("cuda", 2),
    )
    for _ in range(2):
        staging.prepare([one, two], arena)
    waited = ["current of cuda:1", "current of cuda:2"]
    assert used == [waited[0], one, (arena.address, arena.nbytes, 1), "left", waited[1], *waited]


def test_generators_of_devices_that_this_process_does_not_use_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a forked child, or in a run on the processor of a host with devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "cuda" not in RNGState().state_dict()


def test_generators_of_devices_are_set_when_no_seed_comes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch carries out what it was asked for before CUDA is initialized in another order: seeds
    last."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: calls.append((int(state), device))
    )
    RNGState().load_state_dict(
        RNGState().state_dict() | {"cuda": [torch.tensor(5), torch.tensor(6)]}
    )
    assert calls == ["init", (5, 0)]


@needs_cuda
def test_generators_of_devices_are_seeded_anew_for_a_new_rank() -> None:
    torch.cuda.manual_seed(12)
    wanted = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(13)
    RNGState().load_state_dict(reseeded(RNGState().state_dict(), ["cuda"], 12))
    assert torch.equal(torch.rand(5, device="cuda"), wanted)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a CUDA device here, and it would be measured"
)
def test_the_benchmark_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda.main([]) == 0
    assert "finds no CUDA device here: nothing was measured" in capsys.readouterr().out


@needs_cuda
@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_commit_is_the_state_on_the_device_as_of_the_call(
    tmp_path: Path, staging: str, executor: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # one of the two
    with ckptstore.open(tmp_path / "store", background=ckptstore.Async(executor=executor)) as store:  # type: ignore[arg-type]
        for step in range(5):
            model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            pending = store.commit_async(
                {"model": model, "optimizer": optimizer},
                step=step,
                background=ckptstore.Async(staging=staging),
            )  # type: ignore[arg-type]
            optimizer.step()
            snapshot = pending.wait()
            assert {
                name: torch.equal(snapshot.read(f"model/{name}"), tensor.cpu())
                for name, tensor in wanted.items()
            } == dict.fromkeys(wanted, True)


@needs_cuda
def test_a_restore_lands_on_the_device(tmp_path: Path) -> None:
    state = {
        "t": torch.randn(5_000_000, device="cuda"),
        "strided": torch.randn(700, 900, device="cuda").t(),
    }
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state)
        for tensor in state.values():
            tensor.zero_()
        store.checkout().restore(state)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@needs_cuda
@pytest.mark.parametrize("how", ["commit", "eager", "lazy"])
def test_commits_and_restores_are_ordered_with_the_current_stream(tmp_path: Path, how: str) -> None:
    """The threads that copy have streams of their own: theirs would neither wait for the caller's
    nor be waited for."""
    tensor, factor = torch.zeros(8_000_000, device="cuda"), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with ckptstore.open(tmp_path / "store") as store, torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            factor @ factor  # so that what follows is launched long before it is done
        tensor.add_(1)
        if how == "commit":
            snapshot = store.commit({"t": tensor})
        else:
            # one of the two
            pending = store.commit_async({"t": tensor}, background=ckptstore.Async(staging=how))  # type: ignore[arg-type]
            tensor.add_(1)
            snapshot = pending.wait()
        assert torch.equal(snapshot.read("t"), torch.ones(8_000_000))
        tensor.zero_()
        snapshot.restore({"t": tensor})
        assert int(tensor.sum()) == 8_000_000


@needs_cuda
def test_memory_that_cannot_be_pinned_is_slower_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.cuda.cudart()

    class Refusing:
        cudaHostRegister = staticmethod(
            lambda address, nbytes, flags: original.cudaHostRegister(0, nbytes, flags)
        )

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    tensor = torch.ones(5_000_000, device="cuda")
    with ckptstore.open(tmp_path / "store") as store:
        pending = store.commit_async({"t": tensor})
        tensor.add_(1)
        assert torch.equal(pending.wait().read("t"), torch.ones(5_000_000))
