"""Within `redirect`, whatever saves and loads by DCP's own writer and reader uses the store;
outside of it nothing is changed."""

import inspect
import pickle
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    load_sharded_optimizer_state_dict,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

import ckptstore
from ckptstore import InvalidInput
from ckptstore.interop.dcp import redirect, store_to_dcp
from ckptstore.objects.pointer_files import is_pointer
from ckptstore.store import Store
from tests.distributed.pool import Pool
from tests.interop.dcp_states import ASYNC, OLD_TORCH, nested, same, zeros

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)

CONSTRUCTORS = FileSystemWriter.__init__, FileSystemReader.__init__


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """Nothing of the patches is left after a test."""
    yield
    assert (FileSystemWriter.__init__, FileSystemReader.__init__) == CONSTRUCTORS


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((300,), float(value)), "n": int(value)}


def loaded(path: Path | str, **options: Any) -> float:
    found = {"w": torch.zeros(300), "n": 0}
    dcp.load(found, checkpoint_id=path, **options)
    assert found["w"].min() == found["w"].max() == found["n"]
    return float(found["w"][0])


def is_pointer_directory(path: Path) -> bool:
    return [entry.name for entry in path.iterdir()] == [".metadata"] and is_pointer(path)


def is_dcps(path: Path) -> bool:
    return not is_pointer(path) and any(path.glob("*.distcp"))


def test_a_checkpoint_id_is_a_directory_with_a_pointer(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "a"), tmp_path / "b", "out/step-3"):  # text is a path for DCP
        with redirect(store, step=3, tag="t", metrics={"loss": 0.5}):
            dcp.save(state(3), checkpoint_id=name)
            assert loaded(name) == 3
        assert is_pointer_directory(tmp_path / name)
        commit = store.checkout(tmp_path / name)
        assert (commit.step, commit.tags, commit.metrics) == (3, ("t",), {"loss": 0.5})
        assert str(tmp_path / name) in commit.message
    assert torch.equal(store.checkout(3).read("model/w"), state(3)["w"])


def test_a_nested_state_comes_back_through_writers_and_readers_that_a_library_makes(
    store: Store, tmp_path: Path
) -> None:
    given = nested()
    with redirect(store):
        dcp.save(given, storage_writer=dcp.FileSystemWriter(tmp_path / "a"))
        dcp.save(given, storage_writer=FileSystemWriter(tmp_path / "b", thread_count=2))
        for path, make in (
            (tmp_path / "a", FileSystemReader),
            (tmp_path / "b", dcp.FileSystemReader),
        ):
            found = zeros(given)
            del found["optimizer"]["state"][0]
            found["optimizer"]["state"]["0"] = zeros(given["optimizer"]["state"][0])
            dcp.load(found, storage_reader=make(path))
            assert same(found["model"], given["model"])
    assert is_pointer_directory(tmp_path / "a") and is_pointer_directory(tmp_path / "b")
    assert len(store.log()) == 2 and store.log()[0].new_bytes < 5_000


def test_a_reader_that_is_used_without_load_reads_the_store_too(
    store: Store, tmp_path: Path
) -> None:
    with redirect(store):
        dcp.save(state(), checkpoint_id=tmp_path / "a")
        metadata = FileSystemReader(tmp_path / "a").read_metadata()
    assert metadata.state_dict_metadata.keys() == {"w", "n"}


def test_a_save_and_a_load_have_the_ids_and_the_name_that_dcp_gives_them(
    store: Store, tmp_path: Path
) -> None:
    with redirect(store):
        writer = dcp.FileSystemWriter(tmp_path / "a")
        saved = dcp.save(state(), storage_writer=writer)
        reader = FileSystemReader(tmp_path / "a")
        read = reader.read_metadata()
    for meta in (saved.storage_meta, read.storage_meta):
        assert meta is not None and Path(str(meta.checkpoint_id)) == tmp_path / "a"
        assert meta.save_id == writer.save_id == store.log()[0].id
    assert read.storage_meta is not None and read.storage_meta.load_id == reader.load_id


def test_after_the_block_dcp_writes_and_reads_files_again(store: Store, tmp_path: Path) -> None:
    def interrupted() -> None:
        with redirect(store):
            dcp.save(state(), checkpoint_id=tmp_path / "in")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        interrupted()
    dcp.save(state(2), checkpoint_id=tmp_path / "out")
    assert is_dcps(tmp_path / "out") and loaded(tmp_path / "out") == 2 and len(store.log()) == 1
    with pytest.raises(CheckpointException):
        loaded(tmp_path / "in")


def test_what_dcp_wrote_before_is_read_within_the_block(store: Store, tmp_path: Path) -> None:
    dcp.save(state(7), checkpoint_id=tmp_path / "old")
    dcp.save(state(8), checkpoint_id=tmp_path / "older")
    with redirect(store):
        assert loaded(tmp_path / "old") == 7
        dcp.save(state(9), checkpoint_id=tmp_path / "new")
        reader = FileSystemReader(tmp_path / "old")
        assert [loaded(tmp_path / name, storage_reader=reader) for name in ("new", "older")] == [
            9,
            8,
        ]
        with pytest.raises(CheckpointException, match="No such file"):
            loaded(tmp_path / "nothing")
        with pytest.raises(CheckpointException, match="give another"):
            dcp.save(state(), checkpoint_id=tmp_path / "old")
    assert loaded(tmp_path / "old") == 7


def test_a_damaged_pointer_is_named_as_such(store: Store, tmp_path: Path) -> None:
    with redirect(store):
        dcp.save(state(), checkpoint_id=tmp_path / "a")
        pointer = tmp_path / "a" / ".metadata"
        pointer.write_bytes(pointer.read_bytes()[:20])
        with pytest.raises((CheckpointException, AssertionError), match="no pointer file"):
            loaded(tmp_path / "a")


def test_blocks_nest_and_the_innermost_counts(tmp_path: Path) -> None:
    with (
        ckptstore.open(tmp_path / "one") as one,
        ckptstore.open(tmp_path / "two") as two,
        redirect(one),
    ):
        dcp.save(state(1), checkpoint_id=tmp_path / "a")
        with redirect(two):
            dcp.save(state(2), checkpoint_id=tmp_path / "b")
            with redirect(one):
                dcp.save(state(3), checkpoint_id=tmp_path / "c")
        dcp.save(state(4), checkpoint_id=tmp_path / "d")
        assert (len(one.log()), len(two.log())) == (3, 1)
        assert [loaded(tmp_path / name) for name in "acd"] == [1, 3, 4]


def test_threads_have_blocks_of_their_own_and_else_use_the_newest(tmp_path: Path) -> None:
    inside, done = threading.Barrier(2), threading.Barrier(2)

    def other() -> None:
        with redirect(tmp_path / "two"):
            inside.wait(60)
            dcp.save(state(2), checkpoint_id=tmp_path / "b")
            done.wait(60)

    thread = threading.Thread(target=other)
    with redirect(tmp_path / "one"):
        thread.start()
        inside.wait(60)
        dcp.save(state(1), checkpoint_id=tmp_path / "a")
        done.wait(60)
        thread.join()
        plain = threading.Thread(
            target=dcp.save, args=(state(3),), kwargs={"checkpoint_id": tmp_path / "c"}
        )
        plain.start()
        plain.join()
    for name, steps in (("one", 2), ("two", 1)):
        with ckptstore.open(tmp_path / name) as store:
            assert len(store.log()) == steps
    assert is_pointer_directory(tmp_path / "c")


class Held(DefaultSavePlanner):
    """Plans when it is told to."""

    told = threading.Event()

    def create_local_plan(self) -> Any:
        assert self.told.wait(60)
        return super().create_local_plan()


@ASYNC
@pytest.mark.parametrize("how", ["checkpoint_id", "writer"])
def test_an_asynchronous_save_goes_to_the_store_of_the_call(
    store: Store, tmp_path: Path, how: str
) -> None:
    Held.told.clear()
    with redirect(store):
        place: dict[str, Any] = (
            {"checkpoint_id": str(tmp_path / "a")}
            if how == "checkpoint_id"
            else {"storage_writer": dcp.FileSystemWriter(tmp_path / "a")}
        )
        given = state(5)
        future = dcp.async_save(given, **place, planner=Held(), no_dist=True)
        given["w"].zero_()
    Held.told.set()
    assert isinstance(future, Future)
    future.result(60)
    assert is_pointer_directory(tmp_path / "a")
    with redirect(store):
        assert loaded(tmp_path / "a") == 5


@pytest.mark.pickles
def test_a_writer_can_be_sent_to_another_process(store: Store, tmp_path: Path) -> None:
    with redirect(store.url):
        sent = pickle.loads(pickle.dumps(FileSystemWriter(tmp_path / "a")))
    dcp.save(state(6), storage_writer=sent)
    assert store.checkout(tmp_path / "a").read("model/n") == 6


def test_a_name_moves_and_may_be_refused(store: Store, tmp_path: Path) -> None:
    with redirect(store):
        for value in (1, 2):
            dcp.save(state(value), checkpoint_id=tmp_path / "a")
        assert loaded(tmp_path / "a") == 2 and len(store.log()) == 2
        with pytest.raises(CheckpointException, match="already exists"):
            dcp.save(state(3), storage_writer=FileSystemWriter(tmp_path / "a", overwrite=False))


def test_what_overwrite_is_where_nobody_says_is_dcps_own_choice(
    store: Store, tmp_path: Path
) -> None:
    """A later torch may refuse by default."""
    init = FileSystemWriter.__init__

    def refusing(self: Any, path: Any, *args: Any, overwrite: bool = False, **how: Any) -> None:
        init(self, path, *args, overwrite=overwrite, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "__init__", refusing)
        save_three_times(store, tmp_path)


def save_three_times(store: Store, tmp_path: Path) -> None:
    with redirect(store):
        dcp.save(state(1), storage_writer=FileSystemWriter(tmp_path / "a"))
        with pytest.raises(CheckpointException, match="already exists"):
            dcp.save(state(2), storage_writer=FileSystemWriter(tmp_path / "a"))
        dcp.save(state(3), storage_writer=FileSystemWriter(tmp_path / "a", overwrite=True))
        assert loaded(tmp_path / "a") == 3 and len(store.log()) == 2


def test_other_dtypes_are_cast_as_dcp_does(store: Store, tmp_path: Path) -> None:
    with redirect(store):
        dcp.save(state(2), checkpoint_id=tmp_path / "a")
        found = {"w": torch.zeros(300, dtype=torch.bfloat16), "n": 0}
        dcp.load(found, checkpoint_id=tmp_path / "a")
    assert found["w"].dtype == torch.bfloat16 and bool((found["w"] == 2).all())


class Unknown:
    value = 3


@pytest.mark.pickles
def test_pickles_are_refused_by_name_or_marked(store: Store, tmp_path: Path) -> None:
    given = {"w": torch.ones(3), "odd": Unknown()}
    with redirect(store), pytest.raises(CheckpointException, match="odd"):
        dcp.save(given, checkpoint_id=tmp_path / "a")
    assert not (tmp_path / "a").exists() or not is_pointer(tmp_path / "a")
    with redirect(store, allow_pickle=True):
        dcp.save(given, checkpoint_id=tmp_path / "a")
        found: dict[str, Any] = {"w": torch.zeros(3), "odd": None}
        dcp.load(found, checkpoint_id=tmp_path / "a")
    assert found["odd"].value == 3


def test_writers_of_other_kinds_do_what_they_always_do(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = FileSystemWriter(tmp_path / "before")
    commit = store.commit({"model": {"w": torch.ones(3)}})
    with redirect(store):
        if not OLD_TORCH:  # which has no such writer
            hub = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"))
            dcp.save({"w": torch.ones(3)}, storage_writer=hub)
        dcp.save(state(), storage_writer=before)
        store_to_dcp(commit, tmp_path / "files")
        assert "redirect" not in caplog.text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state(), checkpoint_id=f"file://{tmp_path}/url")
        assert "redirect takes directories of this host" in caplog.text
    assert OLD_TORCH or any((tmp_path / "hf").glob("*.safetensors"))
    assert len(store.log()) == 1
    assert (
        is_dcps(tmp_path / "before") and is_dcps(tmp_path / "files") and is_dcps(tmp_path / "url")
    )


@pytest.mark.skipif(
    "serialization_format" not in inspect.signature(FileSystemWriter.__init__).parameters,
    reason="this torch writes one format",
)
def test_what_a_store_cannot_do_for_a_writer_is_refused(store: Store, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    with redirect(store):
        with pytest.raises(InvalidInput, match="safetensors, which a store does not take"):
            FileSystemWriter(tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
        with pytest.raises(InvalidInput, match="stream extensions"):
            FileSystemWriter(tmp_path / "a", _extensions=[object()])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="run"), redirect(store, run="other"):
        pass


# -- two ranks --


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def _divided(value: float) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [0, 1])
    rows = torch.arange(40.0).reshape(10, 4) * value
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "step": int(value)}


def save_and_load(rank: int, folder: Path) -> None:
    with redirect(folder / "store", step=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_divided(2), checkpoint_id=str(folder / "id"))
        dcp.save(_divided(3), storage_writer=dcp.FileSystemWriter(folder / "writer"))
        future: Any = dcp.async_save(_divided(4), checkpoint_id=str(folder / "async"))
        future.result()
        for name, value in (("id", 2), ("writer", 3), ("async", 4)):
            found = _divided(0)
            dcp.load(found, checkpoint_id=folder / name)
            rows = found["rows"]
            assert isinstance(rows, DTensor) and found["step"] == value
            assert torch.equal(rows.to_local(), _divided(value)["rows"].to_local())


def test_ranks_save_and_load_one_commit_each_time(pair: Pool, tmp_path: Path) -> None:
    pair.run(save_and_load, tmp_path)
    with ckptstore.open(tmp_path / "store") as store:
        assert len(store.log()) == 3
        for name, value in (("id", 2), ("writer", 3), ("async", 4)):
            assert is_pointer_directory(tmp_path / name)
            whole = store.checkout(tmp_path / name).read("model/rows")
            assert torch.equal(whole, torch.arange(40.0).reshape(10, 4) * value)


class Cooperative(DefaultLoadPlanner):
    """Each tensor is read by one rank, as a `CooperativeLoadPlanner` that was proposed for torch
    has it: it leaves items out of the global plan, and broadcasts in the end."""

    def create_local_plan(self) -> Any:
        return replace(super().create_local_plan(), planner_data=sorted(self.state_dict))

    def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
        return [
            replace(
                plan,
                items=[
                    item
                    for item in plan.items
                    if plan.planner_data.index(item.dest_index.fqn) % len(global_plan) == rank
                ],
            )
            for rank, plan in enumerate(super().create_global_plan(global_plan))
        ]


def load_cooperatively(rank: int, folder: Path) -> None:
    wanted = {name: torch.arange(40.0) * n for n, name in enumerate("abc")}
    with redirect(folder / "store"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(wanted, checkpoint_id=folder / "replicas")
        found = zeros(wanted)
        dcp.load(found, checkpoint_id=folder / "replicas", planner=Cooperative())
        for n, (name, tensor) in enumerate(found.items()):
            assert torch.equal(tensor, wanted[name]) == (n % 2 == rank or n == 0)
            torch.distributed.broadcast(tensor, n % 2)
        assert same(found, wanted)


def test_a_planner_that_reads_each_tensor_on_one_rank_reads_it_there(
    pair: Pool, tmp_path: Path
) -> None:
    pair.run(load_cooperatively, tmp_path)


def fail_on_one(rank: int, folder: Path) -> str:
    given = _divided(5) | ({"odd": Unknown()} if rank else {})
    with redirect(folder / "store"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(given, checkpoint_id=folder / "failed")
        except CheckpointException as error:
            return str(error)
    raise AssertionError("saved")


def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_no_pointer(
    pair: Pool, tmp_path: Path
) -> None:
    assert all("odd" in error for error in pair.run(fail_on_one, tmp_path))
    assert not is_pointer(tmp_path / "failed")
    pair.run(save_and_load, tmp_path)


def _fsdp1() -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    module = FullyShardedDataParallel(torch.nn.Linear(60, 37), **options)
    return module, torch.optim.AdamW(module.parameters(), lr=0.01)


def save_and_load_fsdp1(rank: int, folder: Path) -> None:
    """As Lightning's FSDPStrategy does with `state_dict_type="sharded"`."""
    own = FullyShardedDataParallel
    with redirect(folder / "store"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (saved, steps), (found, others) = _fsdp1(), _fsdp1()
        saved(torch.ones(2, 60)).sum().backward()
        steps.step()
        with own.state_dict_type(saved, StateDictType.SHARDED_STATE_DICT):
            state = {"model": saved.state_dict(), "optimizer_0": own.optim_state_dict(saved, steps)}
            dcp.save(state, checkpoint_id=folder / "a")
        with own.state_dict_type(found, StateDictType.SHARDED_STATE_DICT):
            model = {"model": found.state_dict()}
            dcp.load(model, checkpoint_id=folder / "a")
            found.load_state_dict(model["model"])
            optimizer = load_sharded_optimizer_state_dict(
                model_state_dict=model["model"],
                optimizer_key="optimizer_0",
                storage_reader=dcp.FileSystemReader(path=folder / "a"),
            )
            others.load_state_dict(
                own.optim_state_dict_to_load(
                    model=found, optim=others, optim_state_dict=optimizer["optimizer_0"]
                )
            )
        assert all(map(torch.equal, saved.parameters(), found.parameters()))
        ours, theirs = others.state_dict()["state"], steps.state_dict()["state"]
        assert theirs and same(ours, theirs)


def test_sharded_state_of_an_optimizer_is_read_by_a_reader_of_ones_own(
    pair: Pool, tmp_path: Path
) -> None:
    pair.run(save_and_load_fsdp1, tmp_path)
    assert is_pointer_directory(tmp_path / "a")
