"""A push killed at any call that changes the target, then repeated: everything arrives, and no
garbage remains."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from shutil import copytree, rmtree

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError
from tests.maintenance.stores import CHUNK_BYTES, large_state, make_store
from tests.support import strace
from tests.support.checker import assert_no_garbage_after_gc, assert_sound, view_of
from tests.support.fixtures import nursery, scratch
from tests.support.fork_server import Child, Nursery
from tests.support.strace import every_call, traced

__all__ = ["nursery", "scratch"]

BATCH_BYTES = 100_000
SAMPLED = 4


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


class _Push:
    """A store, an empty one to push it to, and the calls that a push makes."""

    def __init__(self, scratch: Path, nursery: Nursery) -> None:
        self.scratch, self.nursery = scratch, nursery
        self.source = make_store(scratch / "source", steps=2, states=large_state)
        with ckptstore.open(self.source) as store:
            self.contents = {info.id: large_state(info.step or 0) for info in store.log()}
        ckptstore.open(
            scratch / "empty", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
        ).close()
        target = copytree(scratch / "empty", scratch / "counted")
        assert not traced(self.start(target), scratch / "log")
        self.calls = every_call(scratch / "log")

    def start(self, target: Path) -> Child:
        return self.nursery.start(
            "push", source=str(self.source), target=str(target), batch_bytes=BATCH_BYTES
        )

    def killed_at(self, calls: Sequence[tuple[str, int]]) -> None:
        for call, n in calls:
            target = copytree(self.scratch / "empty", self.scratch / "target")
            traced(
                self.start(target),
                self.scratch / "log",
                "-e",
                f"inject={call}:signal=SIGKILL:when={n}",
            )
            try:
                assert_sound(target, self.contents)
                again = self.nursery.run(
                    "push", source=str(self.source), target=str(target), batch_bytes=BATCH_BYTES
                )
                assert again.reports("sent")
                assert view_of(target) == view_of(self.source)
                assert_no_garbage_after_gc(target, self.contents)
            except (AssertionError, CkptStoreError) as error:
                error.add_note(f"killed at {call} number {n}")
                raise
            rmtree(target)


def test_killed_at_some_calls(scratch: Path, nursery: Nursery, seed: int) -> None:
    push = _Push(scratch, nursery)
    push.killed_at(Random(seed).sample(push.calls, SAMPLED))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_every_call(scratch: Path, nursery: Nursery) -> None:
    push = _Push(scratch, nursery)
    print(f"{len(push.calls)} calls")
    push.killed_at(push.calls)
