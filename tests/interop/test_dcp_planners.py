"""`dcp.save` and `dcp.load` on a store with custom planners, and with DCP's other ways to plan."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from tests.interop.dcp_states import OLD_TORCH, same

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)


class HalfPlanner(DefaultSavePlanner):
    """Saves in half precision: the example of DCP's documentation."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        item = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


class FormatPlanner(DefaultSavePlanner):
    """Writes objects in its own format."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return (
            io.BytesIO(b"mine:" + repr(object).encode())
            if write_item.type == WriteItemType.BYTE_IO
            else object
        )


class FormatLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Counts its commits, and loads into its own tensors."""

    def resolve_tensor(self, read_item: Any) -> Any:
        self.own = torch.empty(tuple(read_item.lengths))
        return self.own

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor * 2)


def test_a_planner_that_changes_tensors_is_asked_for_them(place: Path) -> None:
    state = {"w": torch.randn(2000, 300), "n": 3}
    dcp.save(state, storage_writer=StoreWriter(place), planner=HalfPlanner())
    found = {"w": torch.zeros(2000, 300).half(), "n": 0}
    dcp.load(found, storage_reader=StoreReader(place))
    assert same(found, {"w": state["w"].half(), "n": 3})


def test_a_planner_that_makes_bytes_gets_its_bytes_again(place: Path) -> None:
    dcp.save(
        {"w": torch.ones(3), "n": 3}, storage_writer=StoreWriter(place), planner=FormatPlanner()
    )
    found: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=StoreReader(place), planner=FormatLoadPlanner())
    assert found["n"] == "mine:3"
    with ckptstore.open(place) as store:
        assert store.checkout().state_dict()["model"]["n"] == b"mine:3"


def test_a_planner_that_reads_bytes_gets_what_torch_saves(place: Path) -> None:
    class Reading(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = torch.load(
                value, weights_only=True
            )

    dcp.save({"w": torch.ones(3), "n": [1, "x"]}, storage_writer=StoreWriter(place))
    found: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=StoreReader(place), planner=Reading())
    assert found["n"] == [1, "x"]


def test_a_planner_that_loads_aside_commits_each_tensor(place: Path) -> None:
    state = {"w": torch.randn(30, 30)}
    dcp.save(state, storage_writer=StoreWriter(place))
    found = {"w": torch.zeros(30, 30)}
    dcp.load(found, storage_reader=StoreReader(place), planner=RenamingLoadPlanner())
    assert torch.equal(found["w"], state["w"] * 2)


def test_an_unflattened_state_dict_has_whole_objects(place: Path) -> None:
    state = {"w": torch.randn(3), "extra": {"a": [1, 2], "t": torch.arange(4)}}
    dcp.save(
        state,
        storage_writer=StoreWriter(place),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    found: dict[str, Any] = {"w": torch.zeros(3), "extra": None}
    dcp.load(
        found,
        storage_reader=StoreReader(place),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert same(found, state)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.6 does not cache plans")
def test_a_cached_plan_saves_what_is_there_now(place: Path) -> None:
    """DCP's plan caching ignores dtypes, so its metadata names another dtype than its bytes
    have.
    """
    planner_cache(DefaultSavePlanner)
    with ckptstore.open(place) as store:
        for step in range(4):
            state = {"w": torch.full((2000,), float(step)), "n": step}
            if step == 3:
                state["w"] = state["w"].double()
            dcp.save(
                state,
                storage_writer=StoreWriter(store, step=step),
                planner=DefaultSavePlanner(enable_plan_caching=True),
            )
        for step in range(4):
            dtype = torch.float64 if step == 3 else torch.float32
            found = {"w": torch.zeros(2000, dtype=dtype), "n": None}
            dcp.load(found, storage_reader=StoreReader(store, step))
            assert same(found, {"w": torch.full((2000,), float(step), dtype=dtype), "n": step})


def planner_cache(cls: Any) -> None:
    """Clear the plans cached by other tests."""
    for name in (
        "_cached_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_final_save_plan",
    ):
        getattr(cls, name).clear()
