"""A store that was opened before a fork: what its processes commit at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.store import internals_of
from tests.commit.states import Gate, held_commit

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        yield store


def forked(works: Sequence[Callable[[], object]]) -> list[int]:
    """The exit codes of a child for each of `works`, all at once: 0 where it returned."""
    children = []
    for work in works:
        child = os.fork()
        if not child:
            signal.alarm(30)  # a child that waits for what only its parent can do ends, too
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_processes_that_were_forked_with_a_store_commit_to_it_at_once(
    store: ckptstore.Store,
) -> None:
    # Made here: what torch computes on several threads may hang in a forked child.
    states = {
        f"{child}-{i}": {"t": {str(k): torch.randn(400_000) for k in range(3)}}
        for child in range(3)
        for i in range(6)
    }
    store.commit({"t": {str(k): torch.randn(400_000) for k in range(3)}})

    def work(child: int) -> Callable[[], object]:
        own = [name for name in states if name.startswith(f"{child}-")]
        return lambda: [store.commit(states[name], tag=name) for name in own]

    assert forked([work(child) for child in range(3)]) == [0, 0, 0]
    for name, state in states.items():
        found = store.checkout(name).state_dict("t")
        assert all(torch.equal(found[key], tensor) for key, tensor in state["t"].items())


def test_a_forked_child_commits_while_its_parent_commits_in_the_background(
    store: ckptstore.Store,
) -> None:
    pending, go_on = held_commit(store, {"t": torch.zeros(1000)}, step=1)
    codes = forked([lambda: store.commit({"t": torch.ones(1000)}, tag="child")])
    go_on()
    assert codes == [0]
    assert pending.wait().step == 1
    assert store.checkout("child").state_dict("t").sum() == 1000


def test_a_forked_child_reads_while_a_thread_of_its_parent_is_within_the_log(
    store: ckptstore.Store,
) -> None:
    store.commit({"n": 1}, step=1)
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with internals_of(store).handle.log._lock:
            inside.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    codes = forked([lambda: store.checkout(1).state_dict()])
    over.set()
    thread.join()
    assert codes == [0]


def test_a_forked_child_that_leaves_the_store_does_not_end_its_parents_worker(
    tmp_path: Path,
) -> None:
    with ckptstore.open(
        tmp_path / "store", threads=1, background=ckptstore.Async(executor="process")
    ) as store:
        store.commit_async({"t": torch.zeros(1000)}, step=0).wait()
        worker = store.worker_pid
        pending, go_on = held_commit(store, {"t": torch.ones(1000)}, step=1)

        def leave() -> None:
            with store:
                assert store.worker_pid is None

        codes = forked([leave, lambda: store.commit({"t": torch.ones(9)}, tag="child")])
        go_on()
        assert codes == [0, 0]
        assert pending.wait().step == 1
        assert store.commit_async({"t": torch.ones(1000)}, step=2).wait().step == 2
        assert store.worker_pid == worker


def test_a_forked_child_of_a_store_with_a_mirror_leaves_it_and_its_parent_uploads(
    tmp_path: Path,
) -> None:
    with ckptstore.open(tmp_path / "store", mirror=tmp_path / "mirror") as store:
        store.commit({"t": torch.zeros(1000)}, step=1)

        def leave() -> None:
            with store:
                assert store.flush_mirror()  # what the parent has wanted is the parent's task

        def commit_and_leave() -> None:
            with store:
                store.commit({"t": torch.ones(1000)}, tag="child")
                assert not store.flush_mirror(30)

        assert forked([leave, commit_and_leave]) == [0, 0]
        store.commit({"t": torch.ones(9)}, step=2)
    with ckptstore.open(tmp_path / "mirror", create=False) as mirror:
        assert {info.step for info in mirror.log()} == {1, 2, None} and "child" in mirror.tags()


@pytest.mark.timeout(60)
def test_a_forked_child_does_not_wait_for_what_only_its_parent_ends(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(50_000))
    weight.grad = torch.ones(50_000)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"w": torch.zeros(9)}, step=0)
        gate = Gate("staged")
        lazy = ckptstore.Async(staging="lazy", on_progress=gate)
        pending = store.commit_async({"w": weight, "optimizer": optimizer}, step=1, background=lazy)
        gate.there.wait()

        def use() -> None:
            for wait in (pending.wait, pending.exception, pending.wait_staged):
                with pytest.raises(ckptstore.InvalidInput, match="forked from"):
                    wait()
            optimizer.step()
            store.checkout(0).restore({"w": torch.ones(9)})
            store.log()

        codes = forked([use])
        gate.opened.set()
        assert codes == [0] and pending.wait().step == 1


def test_a_forked_child_can_neither_cancel_nor_follow_its_parents_commit(
    store: ckptstore.Store,
) -> None:
    pending, go_on = held_commit(store, {"t": torch.zeros(1000)}, step=1)

    def use() -> None:
        for refused in (pending.cancel, lambda: pending.then(print)):
            with pytest.raises(ckptstore.InvalidInput, match="forked from"):
                refused()

    codes = forked([use])
    go_on()
    assert codes == [0]
    assert pending.wait().step == 1
