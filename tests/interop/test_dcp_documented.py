"""DCP's documentation and tests of one process: its examples with our writer and reader."""

import copy
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.interop.dcp_states import ASYNC, nested, same

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)


class AppState(Stateful):
    """The wrapper of the tutorial: model and optimizer, by parameter names."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def made(steps: int) -> AppState:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 16)).sum().backward()
        optimizer.step()
    return AppState(model, optimizer)


def test_the_tutorials_stateful_application_is_asked_and_told(place: Path) -> None:
    saved, loaded = made(2), made(0)
    dcp.save({"app": saved}, checkpoint_id="1", storage_writer=StoreWriter(place))
    dcp.load({"app": loaded}, checkpoint_id="1", storage_reader=StoreReader(place))
    assert (saved.calls, loaded.calls) == (["state_dict"], ["state_dict", "load_state_dict"])
    assert same(dict(loaded.model.state_dict()), dict(saved.model.state_dict()))
    assert same(loaded.optimizer.state_dict(), saved.optimizer.state_dict())
    with ckptstore.open(place) as store:
        assert torch.equal(store.checkout(1).read("app/model/0.weight"), saved.model[0].weight)


def test_modules_and_optimizers_are_stateful_by_themselves(place: Path) -> None:
    saved, loaded = made(2), made(1)
    dcp.save({"model": saved.model, "optim": saved.optimizer}, storage_writer=StoreWriter(place))
    dcp.load({"model": loaded.model, "optim": loaded.optimizer}, storage_reader=StoreReader(place))
    assert same(dict(loaded.model.state_dict()), dict(saved.model.state_dict()))
    assert same(loaded.optimizer.state_dict(), saved.optimizer.state_dict())


@pytest.mark.filterwarnings(
    "ignore:`save_state_dict` is deprecated", "ignore:`load_state_dict` is deprecated"
)
def test_the_functions_before_save_and_load_work_too(place: Path) -> None:
    writer, reader = StoreWriter(place, tag="a"), StoreReader(place, "a")
    state = {"w": torch.randn(20, 3)}
    for _ in range(2):  # both reset their arguments
        save_state_dict(state, writer, no_dist=True)
        found = {"w": torch.zeros(20, 3)}
        load_state_dict(found, reader, no_dist=True)
        assert same(found, state)


def test_the_metadata_is_that_of_dcps_files(place: Path, tmp_path: Path) -> None:
    state = nested()
    dcp.save(state, checkpoint_id=tmp_path / "files")
    dcp.save(state, storage_writer=StoreWriter(place))
    theirs = dcp.FileSystemReader(tmp_path / "files").read_metadata()
    ours = StoreReader(place).read_metadata()
    names = [
        {name: tuple(map(str, keys)) for name, keys in metadata.planner_data.items()}
        for metadata in (ours, theirs)
    ]
    assert names[0] == names[1]
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, wanted in theirs.state_dict_metadata.items():
        got = ours.state_dict_metadata[name]
        assert type(got) is type(wanted)
        if isinstance(wanted, TensorStorageMetadata):
            assert (got.size, got.properties.dtype, got.chunks) == (
                wanted.size,
                wanted.properties.dtype,
                wanted.chunks,
            )


# -- asynchronous --


@ASYNC
def test_two_async_saves_to_one_id_both_end_and_the_id_means_one_of_them(place: Path) -> None:
    """DCP's own saves crash or mix, since both write the same file names."""
    with ckptstore.open(place) as store:
        states = [{"w": torch.full((300_000,), float(i)), "n": i} for i in range(2)]
        futures = [
            dcp.async_save(
                state, checkpoint_id="last", storage_writer=StoreWriter(store), no_dist=True
            )
            for state in states
        ]
        commits = [future.result().storage_meta.save_id for future in futures]
        assert (
            sorted(info.id for info in store.log()) == sorted(commits)
            and store.checkout("last").id in commits
        )
        for commit, state in zip(commits, states, strict=True):
            found = {"w": torch.zeros(300_000), "n": -1}
            dcp.load(found, checkpoint_id=commit, storage_reader=StoreReader(store))
            assert same(found, state)


class Stager:
    """Copies in its own thread: `async_save` returns before the copy ends."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)

    def stage(self, state_dict: Any) -> Future[Any]:
        return self._threads.submit(copy.deepcopy, state_dict)

    def synchronize_staging(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        self._threads.shutdown()


@ASYNC
def test_a_stager_of_ones_own_tells_when_the_state_may_change(place: Path) -> None:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    state = {"w": torch.ones(300_000)}
    stager = Stager()
    response = dcp.async_save(
        state, storage_writer=StoreWriter(place, step=1), async_stager=stager, no_dist=True
    )
    response.staging_completion.result()
    state["w"].zero_()
    assert response.upload_completion.result().storage_meta.save_id
    stager.close()
    blocking = BlockingAsyncStager()
    for step in (2, 3):
        state["w"].fill_(step)
        future = dcp.async_save(
            state, storage_writer=StoreWriter(place, step=step), async_stager=blocking, no_dist=True
        )
        future.result()
    with ckptstore.open(place) as store:
        assert [float(store.checkout(step).read("model/w")[-1]) for step in (1, 2, 3)] == [1, 2, 3]


# -- many small tensors --


def test_tiny_tensors_cost_little_more_than_their_bytes(place: Path) -> None:
    """DCP writes 1.6 KB around each."""
    state = {f"layer.{i}.scale": torch.full((4,), float(i)) for i in range(2000)}
    dcp.save(state, storage_writer=StoreWriter(place))
    with ckptstore.open(place) as store:
        assert store.checkout().new_bytes < 2000 * 100
        found = {name: torch.zeros(4) for name in state}
        dcp.load(found, storage_reader=StoreReader(store))
        assert same(found, state)


# -- planners that fail --


def failing(base: Any, where: str) -> Any:
    @functools.wraps(getattr(base, where))
    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError(f"failed in {where}")

    return type("Failing", (base,), {where: fail})()


@pytest.mark.parametrize(
    "where",
    ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"],
)
def test_a_save_whose_planner_fails_raises_that_and_leaves_nothing(place: Path, where: str) -> None:
    with ckptstore.open(place) as store:
        dcp.save({"w": torch.ones(5)}, storage_writer=StoreWriter(store))
        with pytest.raises(
            CheckpointException, match=f"ArithmeticError: failed in {where}"
        ) as caught:
            dcp.save(
                {"w": torch.zeros(300_000)},
                storage_writer=StoreWriter(store),
                planner=failing(DefaultSavePlanner, where),
            )
        assert isinstance(caught.value.failures[0][0], ArithmeticError)
        assert len(store.log()) == 1
        dcp.save({"w": torch.zeros(5)}, storage_writer=StoreWriter(store))
        assert not store.fsck(read_data="100%").damaged


@pytest.mark.parametrize(
    "where",
    [
        "set_up_planner",
        "create_local_plan",
        "create_global_plan",
        "finish_plan",
        "resolve_tensor",
        "load_bytes",
    ],
)
def test_a_load_whose_planner_fails_raises_that(place: Path, where: str) -> None:
    dcp.save({"w": torch.ones(5), "n": 1}, storage_writer=StoreWriter(place))
    reader = StoreReader(place)
    with pytest.raises(CheckpointException, match=f"ArithmeticError: failed in {where}"):
        dcp.load(
            {"w": torch.zeros(5), "n": 0},
            storage_reader=reader,
            planner=failing(DefaultLoadPlanner, where),
        )
    found = {"w": torch.zeros(5), "n": 0}
    dcp.load(found, storage_reader=reader)
    assert same(found, {"w": torch.ones(5), "n": 1})
