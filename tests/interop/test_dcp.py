"""`dcp.save` and `dcp.load` on a store in one process: the state comes back, natively and by DCP,
however DCP is called.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckptstore
from ckptstore import Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.interop.dcp import StoreReader, StoreWriter, dcp_to_store, store_to_dcp
from ckptstore.maintenance.check import Kind
from tests.interop.dcp_states import ASYNC, OLD_TORCH, nested, same, zeros

if TYPE_CHECKING:
    from concurrent.futures import Future

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)


def test_a_nested_state_dict_comes_back(place: Path) -> None:
    state = nested()
    writer = StoreWriter(place, step=7, tag="a", metrics={"loss": 0.25})
    metadata = dcp.save(state, storage_writer=writer)
    found = zeros(state)
    del found["optimizer"]["state"][0]  # DCP turns number keys of a mapping into text
    found["optimizer"]["state"]["0"] = zeros(state["optimizer"]["state"][0])
    dcp.load(found, storage_reader=StoreReader(place, 7))
    found["optimizer"]["state"] = {
        int(key): value for key, value in found["optimizer"]["state"].items()
    }
    assert same(found, state)
    with ckptstore.open(place) as store:
        snap = store.checkout("a")
        assert (snap.id, snap.step, snap.metrics) == (writer.commit, 7, {"loss": 0.25})
        assert metadata.storage_meta is not None and metadata.storage_meta.save_id == snap.id
        assert same(snap.state_dict(), {**state, "model": dict(state["model"])})
        assert snap.layout is None


def test_a_flat_state_dict_is_the_key_model(place: Path) -> None:
    model = torch.nn.Linear(40, 30)
    dcp.save(model.state_dict(), storage_writer=StoreWriter(place, step=1))
    other = torch.nn.Linear(40, 30)
    state = other.state_dict()
    dcp.load(state, storage_reader=StoreReader(place))
    assert same(dict(state), dict(model.state_dict()))
    with ckptstore.open(place) as store:
        assert store.checkout(1).keys() == ["model"]
        third = torch.nn.Linear(40, 30)
        store.checkout(1).restore({"model": third})
        assert same(dict(third.state_dict()), dict(model.state_dict()))


def test_a_native_commit_is_loaded_by_dcp(place: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    with ckptstore.open(place) as store:
        store.commit({"model": model, "optimizer": optimizer, "epoch": 3}, step=1)
        other = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
        found: dict[str, Any] = {"model": other.state_dict(), "epoch": 0}
        dcp.load(found, storage_reader=StoreReader(store))
        assert same(dict(found["model"]), dict(model.state_dict())) and found["epoch"] == 3
        flat = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        dcp.load(flat, storage_reader=StoreReader(store, key="model"))
        assert same(flat, dict(model.state_dict()))
        everything = (
            {"model", "optimizer", "epoch"} if OLD_TORCH else None
        )  # torch 2.6 loads nothing without keys
        tree = _load_state_dict_from_keys(everything, storage_reader=StoreReader(store))
        assert torch.equal(
            tree["optimizer"]["state"]["0.weight"]["exp_avg"],
            optimizer.state_dict()["state"][0]["exp_avg"],
        )
        assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
        assert set(_load_state_dict_from_keys("model", storage_reader=StoreReader(store))) == {
            "model"
        }


def test_a_native_optimizer_is_loaded_by_dcp_under_the_names_of_its_parameters(place: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    other = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    again = torch.optim.AdamW(other.parameters())
    with ckptstore.open(place) as store:
        store.commit({"model": model, "optimizer": optimizer})
        weights, moments = get_state_dict(other, again)
        dcp.load({"model": weights, "optimizer": moments}, storage_reader=StoreReader(store))
        set_state_dict(other, again, model_state_dict=weights, optim_state_dict=moments)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert (
        same(again.state_dict()["state"], optimizer.state_dict()["state"])
        and again.param_groups[0]["lr"] == 0.5
    )


def test_an_optimizer_saved_by_dcp_is_restored_natively(place: Path) -> None:
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        storage_writer=StoreWriter(place),
    )
    other = torch.nn.Linear(40, 30)
    again = torch.optim.AdamW(other.parameters())
    with ckptstore.open(place) as store:
        store.checkout().restore({"model": other, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())


def test_saving_again_costs_nothing_and_leaves_the_old_commit(place: Path) -> None:
    with ckptstore.open(place) as store:
        state = {"w": torch.randn(1000, 300)}
        dcp.save(state, checkpoint_id="ckpt/best", storage_writer=StoreWriter(store))
        first = store.checkout("ckpt/best")
        dcp.save(state, checkpoint_id="ckpt/best", storage_writer=StoreWriter(store))
        second = store.checkout("ckpt/best")
        assert (
            second.id != first.id
            and second.content_id == first.content_id
            and second.new_bytes == 0
        )
        assert second.parents == (first.id,)
        dcp.save(
            {"w": torch.zeros(1000, 300)},
            checkpoint_id="ckpt/best",
            storage_writer=StoreWriter(store),
        )
        found = {"w": torch.empty(1000, 300)}
        dcp.load(found, checkpoint_id=first.id, storage_reader=StoreReader(store))
        assert same(found, state)
        dcp.load(found, checkpoint_id="ckpt/best", storage_reader=StoreReader(store))
        assert not found["w"].any()


def test_a_failed_save_shows_nothing_and_leaves_the_old_commit(place: Path) -> None:
    with ckptstore.open(place) as store:
        dcp.save({"a": torch.ones(3)}, checkpoint_id="best", storage_writer=StoreWriter(store))
        with pytest.raises(CheckpointException, match=r"odd.*register_value"):
            dcp.save(
                {"a": torch.zeros(3), "odd": object()},
                checkpoint_id="best",
                storage_writer=StoreWriter(store),
            )
        assert len(store.log()) == 1
        found = {"a": torch.zeros(3)}
        dcp.load(found, checkpoint_id="best", storage_reader=StoreReader(store))
        assert same(found, {"a": torch.ones(3)})


def test_a_save_that_never_finishes_shows_nothing(place: Path) -> None:
    """Like a process that is killed before DCP calls `finish`."""
    with ckptstore.open(place) as store:
        dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(store))
        writer, planner = StoreWriter(store), DefaultSavePlanner()
        planner.set_up_planner({"b": torch.randn(1000, 1000)}, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        (plan,), _ = planner.create_global_plan([plan])
        (plan,) = writer.prepare_global_plan([plan])
        writer.write_data(plan, planner).wait()
        written = [path for path in (place / "packs").rglob("*") if path.stat().st_size > 4_000_000]
        assert len(written) == 1 and len(store.log()) == 1
    with ckptstore.open(place) as store:
        assert [leaf.path for leaf in store.checkout().leaves()] == ["model/a"]
        assert {finding.kind for finding in store.fsck(read_data="100%").findings} == {Kind.ORPHAN}


def test_an_id_that_is_digits_is_a_step_and_a_path_is_a_pointer(
    place: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "step_5"
    dcp.save({"a": torch.ones(3)}, checkpoint_id="41", storage_writer=StoreWriter(place))
    dcp.save({"a": torch.full((3,), 2.0)}, checkpoint_id=path, storage_writer=StoreWriter(place))
    for name, value in (("41", 1.0), (path, 2.0), (str(path), 2.0)):
        found = {"a": torch.zeros(3)}
        dcp.load(found, checkpoint_id=name, storage_reader=StoreReader(place))
        assert same(found, {"a": torch.full((3,), value)})
    with ckptstore.open_pointer(path) as snap:
        assert snap.step is None
    assert [
        StoreWriter.validate_checkpoint_id(name)
        for name in ("a/b", "12", "/x", tmp_path, "a b", "latest")
    ] == [True] * 4 + [False] * 2


def test_what_is_missing_is_said(place: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(place))
    with pytest.raises(CheckpointException, match=r"Missing key.*b"):
        dcp.load({"a": torch.ones(3), "b": torch.ones(3)}, storage_reader=StoreReader(place))
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    dcp.load(
        found,
        storage_reader=StoreReader(place),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert same(found, {"a": torch.ones(3), "b": torch.zeros(3)})
    with pytest.raises(CheckpointException, match="no commit of step 9"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=StoreReader(place, 9))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(4)}, storage_reader=StoreReader(place))


def test_another_dtype_is_converted_only_when_wanted(place: Path) -> None:
    """DCP itself casts silently."""
    dcp.save({"a": torch.ones(3), "n": torch.arange(3)}, storage_writer=StoreWriter(place))
    with pytest.raises(CheckpointException, match=r"a was saved as float32.*cast=True"):
        dcp.load({"a": torch.zeros(3).half()}, storage_reader=StoreReader(place))
    found = {"a": torch.zeros(3).half()}
    dcp.load(found, storage_reader=StoreReader(place, cast=True))
    assert same(found, {"a": torch.ones(3).half()})
    with pytest.raises(CheckpointException, match="n was saved as int64"):
        dcp.load({"n": torch.zeros(3)}, storage_reader=StoreReader(place, cast=True))


def test_a_flipped_bit_is_found(place: Path) -> None:
    """DCP itself loads it."""
    dcp.save({"a": torch.randn(1000, 100)}, storage_writer=StoreWriter(place))
    for pack in (place / "packs").rglob("*-0-0"):
        data = bytearray(pack.read_bytes())
        data[5000] ^= 1
        pack.write_bytes(data)
    with pytest.raises(CheckpointException, match="does not match its checksum") as caught:
        dcp.load({"a": torch.zeros(1000, 100)}, storage_reader=StoreReader(place))
    assert isinstance(caught.value.failures[0][0], Corrupt)


# -- values --


def test_sparse_quantized_and_tied_tensors(place: Path) -> None:
    """DCP itself cannot save sparse tensors."""
    w = torch.randn(20, 20)
    state = {
        "m": {"a": w, "b": w, "s": torch.eye(4).to_sparse(), "p": torch.nn.Parameter(torch.ones(3))}
    }
    dcp.save(state, storage_writer=StoreWriter(place))
    found = {
        "m": {
            "a": torch.zeros(20, 20),
            "b": torch.zeros(20, 20),
            "s": torch.zeros(4, 4).to_sparse(),
            "p": torch.zeros(3),
        }
    }
    dcp.load(found, storage_reader=StoreReader(place))
    assert torch.equal(found["m"]["a"], w) and torch.equal(found["m"]["b"], w)
    assert torch.equal(found["m"]["s"].to_dense(), torch.eye(4)) and torch.equal(
        found["m"]["p"], torch.ones(3)
    )


class Odd:
    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.n == self.n


@pytest.mark.pickles
def test_what_the_registry_does_not_know_is_pickled_only_when_allowed(place: Path) -> None:
    dcp.save(
        {"w": torch.ones(3), "odd": Odd(3)}, storage_writer=StoreWriter(place, allow_pickle=True)
    )
    found: dict[str, Any] = {"w": torch.zeros(3), "odd": None}
    with pytest.raises(CheckpointException, match="is a pickle"):
        dcp.load(found, storage_reader=StoreReader(place))
    dcp.load(found, storage_reader=StoreReader(place, allow_pickle=True))
    assert found["odd"] == Odd(3)


def test_names_that_dcp_cannot_tell_apart_are_refused(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"m": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}})
        with pytest.raises(CheckpointException, match=r"m/a\.b and m/a/b are both"):
            dcp.load({"m": {}}, storage_reader=StoreReader(store))


# -- asynchronous --


@ASYNC
def test_async_save_in_a_thread(place: Path) -> None:
    with ckptstore.open(place) as store:
        state = {"w": torch.ones(1000, 300)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(
                state, checkpoint_id="a", storage_writer=StoreWriter(store), no_dist=True
            )
            state["w"].zero_()
            future.result()
        found = {"w": torch.zeros(1000, 300)}
        dcp.load(found, checkpoint_id="a", storage_reader=StoreReader(store))
        assert found["w"].all()
        failed = dcp.async_save({"odd": object()}, storage_writer=StoreWriter(store), no_dist=True)
        with pytest.raises(CheckpointException, match="odd"):
            failed.result()


@ASYNC
def test_a_name_that_was_given_before_holds_in_the_thread_or_process_that_saves(
    place: Path,
) -> None:
    import copy

    writer, state = StoreWriter(place), {"w": torch.ones(3)}
    writer.reset("named")
    for own in (None, "7"):
        saving = dcp.async_save(state, storage_writer=writer, checkpoint_id=own, no_dist=True)
        cast("Future[Any]", saving).result()
    sent = copy.deepcopy(writer)
    assert sent.checkpoint_id == writer.checkpoint_id == "named"
    with ckptstore.open(place) as store:
        last, first = store.log()
        assert (first.tags, first.step, last.tags, last.step) == (("named",), None, (), 7)


def test_a_writer_is_pickled_as_its_place(place: Path) -> None:
    import copy

    with ckptstore.open(place, run="exp") as store:
        writer = copy.deepcopy(StoreWriter(store, step=3))
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    with ckptstore.open(place, run="exp") as store:
        assert store.checkout().step == 3


# -- directories --


def test_a_dcp_directory_becomes_a_commit_and_a_directory_again(
    place: Path, tmp_path: Path
) -> None:
    state = {
        "model": {"w": torch.randn(600, 700), "b": torch.randn(3)},
        "progress": {"epoch": 3, "list": [1, 2]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with ckptstore.open(place) as store:
        snap = dcp_to_store(tmp_path / "dcp", store, step=3, tag="imported")
        assert same(snap.state_dict(), state)
        assert (snap.step, snap.tags) == (3, ("imported",))
        dcp.save(state, storage_writer=StoreWriter(store))
        assert store.checkout().content_id == snap.content_id  # the same for both ways to pass it
        store_to_dcp(snap, tmp_path / "again")
        with pytest.raises(Conflict):
            store_to_dcp(snap, tmp_path / "again")
    found = zeros(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "again")
    assert same(found, state)


def test_a_flat_directory_keeps_its_names(place: Path, tmp_path: Path) -> None:
    state = dict(torch.nn.Linear(30, 40).state_dict())
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with ckptstore.open(place) as store:
        snap = dcp_to_store(tmp_path / "dcp", store)
        assert snap.keys() == ["model"]
        found = zeros(state)
        dcp.load(found, storage_reader=StoreReader(store))
        assert same(found, state)
        store_to_dcp(snap, tmp_path / "again")
    found = zeros(state)
    dcp.load(found, checkpoint_id=tmp_path / "again")
    assert same(found, state)


def test_a_reader_says_what_it_needs(place: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(place))
    with ckptstore.open(place) as store:
        with pytest.raises(InvalidInput, match="open store"):
            StoreReader(store, run="x")
        with pytest.raises(NotFound):
            StoreReader(store, "nothing").read_metadata()
        metadata = StoreReader(store, key=None).read_metadata()
        assert list(metadata.state_dict_metadata) == ["a"]


def test_saves_by_new_writers_and_new_processes_store_what_changed(place: Path) -> None:
    """The names that DCP gives lead to what stood there, of a flat and of a nested state dict."""
    model = torch.nn.Linear(400, 300)
    for flat in (True, False):
        for step in range(5):
            with torch.no_grad():
                model.weight[step] += 1
            state: Any = model.state_dict()
            if not flat:
                optimizer = {"state": {0: {"exp_avg": model.weight.detach() * 2}}}
                state = {"model": state, "optimizer": optimizer}
            dcp.save(state, storage_writer=StoreWriter(place, step=step, run=f"flat-{flat}"))
            with ckptstore.open(place, run=f"flat-{flat}") as store:
                found = [info.new_bytes for info in store.log(run=store.run) if info.step == step]
                saved = store.checkout("latest").state_dict()
            assert same(dict(saved["model"]), dict(model.state_dict()))
            assert step == 0 or found[0] < model.weight.nbytes // 10
