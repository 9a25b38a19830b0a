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
from tests.commit.states import held_commit

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
