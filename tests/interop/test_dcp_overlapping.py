"""Overlapping saves and loads through one writer, one reader or one snapshot keep separate
states.
"""

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import ckptstore
from ckptstore import CkptStoreError
from ckptstore.core.ids import new_session_id
from ckptstore.interop.dcp import StoreReader, StoreWriter
from ckptstore.interop.dcp.writer import AssignedSession, received_session
from tests.interop.dcp_states import ASYNC, NO_DIST, same, zeros

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:Detected an existing",
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    ckptstore.open(tmp_path / "store").close()
    return tmp_path / "store"


@pytest.fixture(params=["a place", "an open store"])
def store(place: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The argument of a writer or a reader."""
    if request.param == "a place":
        yield place
    else:
        with ckptstore.open(place) as opened:
            yield opened


def state_of(number: int, elements: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "weight": torch.randn(elements, generator=generator),
        "same": torch.ones(elements),
        "number": number,
        "few": torch.tensor([number]),
    }


def begin(writer: StoreWriter, number: int, elements: int) -> "Future[Any]":
    saving = dcp.async_save(
        state_of(number, elements), storage_writer=writer, checkpoint_id=str(number), no_dist=True
    )
    return cast("Future[Any]", saving)


def acknowledged(saving: "Future[Any]") -> str:
    """The id of the commit that a save returned."""
    metadata = cast(Metadata, saving.result())
    assert metadata.storage_meta is not None and metadata.storage_meta.save_id is not None
    return metadata.storage_meta.save_id


def check_saved(place: Path, commits: dict[int, str], elements: int) -> None:
    with ckptstore.open(place) as store:
        assert sorted((info.step, info.id) for info in store.log(None)) == sorted(commits.items())
        for number, commit in commits.items():
            assert same(store.checkout(commit).state_dict("model"), state_of(number, elements))
        assert store.fsck(read_data="100%").findings == ()


@pytest.mark.parametrize("elements", [10, 400_000])
@ASYNC
def test_saves_that_overlap_through_one_writer_are_commits_of_their_own(
    store: Any, place: Path, elements: int
) -> None:
    writer = StoreWriter(store)
    saving = {number: begin(writer, number, elements) for number in range(1, 7)}
    commits = {number: acknowledged(each) for number, each in saving.items()}
    assert writer.commit in commits.values()
    check_saved(place, commits, elements)


def test_each_of_two_saves_that_stand_still_within_each_other_gets_its_own_name(
    place: Path,
) -> None:
    """Step by step, as DCP calls a writer, on two threads."""
    writer = StoreWriter(place)
    steps = threading.Barrier(2, timeout=60)

    class Stepping(StoreWriter):
        """Calls of `writer`, one step of both saves at a time."""

        def __init__(self) -> None:
            super().__init__(place)

        def __getattribute__(self, name: str) -> Any:
            if name in (
                "reset",
                "set_up_storage_writer",
                "prepare_local_plan",
                "prepare_global_plan",
                "write_data",
                "finish",
            ):
                steps.wait()
            return getattr(writer, name)

    shared = Stepping()
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda n: dcp.save(
                    state_of(n, 10), storage_writer=shared, checkpoint_id=str(n), **NO_DIST
                ),
                (1, 2),
            )
        )
    check_saved(
        place,
        {
            n: cast(Any, metadata).storage_meta.save_id
            for n, metadata in zip((1, 2), found, strict=True)
        },
        10,
    )


@ASYNC
def test_a_save_that_fails_leaves_the_one_beside_it(place: Path) -> None:
    writer = StoreWriter(place)
    bad = {"number": 2, "weight": torch.zeros(10), "odd": threading.Lock()}
    first = begin(writer, 1, 400_000)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(dcp.save, bad, storage_writer=writer, checkpoint_id="2", **NO_DIST)
        assert isinstance(second.exception(), CheckpointException)
    check_saved(place, {1: acknowledged(first)}, 400_000)


@ASYNC
def test_a_save_without_a_name_does_not_get_that_of_another(place: Path) -> None:
    writer = StoreWriter(place, step=9)
    named = begin(writer, 1, 10)
    unnamed = cast(
        "Future[Any]", dcp.async_save(state_of(9, 10), storage_writer=writer, no_dist=True)
    )
    check_saved(place, {1: acknowledged(named), 9: acknowledged(unnamed)}, 10)


def test_parts_of_two_saves_do_not_become_one_commit(place: Path) -> None:
    """All parts that a writer finishes must be of one session, whichever rank planned."""

    def written(writer: StoreWriter) -> tuple[Metadata, Any]:
        planner = DefaultSavePlanner()
        writer.set_up_storage_writer(True)
        planner.set_up_planner(state_of(1, 10), None, True)
        (plan,), metadata = planner.create_global_plan(
            [writer.prepare_local_plan(planner.create_local_plan())]
        )
        (plan,) = writer.prepare_global_plan([plan])
        return metadata, writer.write_data(planner.finish_plan(plan), planner).wait()

    writer = StoreWriter(place)
    _, first = written(writer)
    metadata, second = written(writer)
    with closing(writer), pytest.raises(ckptstore.Conflict, match="two saves"):
        writer.finish(metadata, [first, second])
    with ckptstore.open(place) as store:
        assert not list(store.log(None))


@pytest.mark.pickles
def test_a_rank_writes_under_the_session_that_reached_its_thread_last() -> None:
    """With cached plans, DCP hands a writer the plan of an earlier save."""
    sessions = [new_session_id() for _ in range(8)]
    sent = [pickle.dumps(AssignedSession(session)) for session in sessions]

    def receive(plan: bytes) -> str:
        pickle.loads(plan)
        return received_session()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(receive, sent)) == sessions


def test_a_rank_without_a_session_says_what_is_missing(place: Path) -> None:
    writer = StoreWriter(place)
    writer.set_up_storage_writer(False)
    with closing(writer), pytest.raises(ckptstore.InvalidInput, match="use a StoreWriter on all"):
        writer.write_data(SavePlan([]), DefaultSavePlanner())


@pytest.mark.parametrize("how", ["one reader", "one snapshot"])
def test_loads_that_overlap_get_each_its_own_commit(store: Any, place: Path, how: str) -> None:
    _load_side_by_side(store, place, how, commits=6, loads=24, elements=50_000)


def _load_side_by_side(
    store: Any, place: Path, how: str, *, commits: int, loads: int, elements: int
) -> None:
    with ckptstore.open(place) as opened:
        ids = {
            number: opened.commit({"model": state_of(number, elements)}, step=number).id
            for number in range(commits)
        }
        reader, snapshot = StoreReader(store, key="model"), opened.checkout(ids[0])

        def by_reader(number: int) -> bool:
            found = zeros(state_of(number, elements))
            dcp.load(found, storage_reader=reader, checkpoint_id=str(number), **NO_DIST)
            return same(found, state_of(number, elements))

        def by_snapshot(_: int) -> bool:
            return same(snapshot.state_dict("model"), state_of(0, elements))

        load: Callable[[int], bool] = by_reader if how == "one reader" else by_snapshot
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(load, [n % commits for n in range(loads)]))


@pytest.mark.soak
@pytest.mark.parametrize("elements", [10, 100_000])
@ASYNC
def test_200_saves_overlap_through_one_writer(
    store: Any, place: Path, elements: int, seed: int
) -> None:
    random, writer = Random(seed), StoreWriter(store)
    commits: dict[int, str] = {}
    refused: list[str] = []
    saving: dict[int, Future[Any]] = {}

    def settle(number: int) -> None:
        try:
            commits[number] = acknowledged(saving.pop(number))
        except CkptStoreError as error:
            refused.append(str(error))

    for number in range(200):
        saving[number] = begin(writer, number, elements)
        if len(saving) >= 8:
            settle(random.choice(list(saving)))
    for number in list(saving):
        settle(number)
    print(f"{len(commits)} of 200 acknowledged, {len(refused)} refused: {refused[:1]}")
    assert not refused
    check_saved(place, commits, elements)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["one reader", "one snapshot"])
def test_200_loads_overlap(store: Any, place: Path, how: str) -> None:
    _load_side_by_side(store, place, how, commits=40, loads=200, elements=300_000)
    print(f"200 loads by {how} from 8 threads: every one bit-equal")
