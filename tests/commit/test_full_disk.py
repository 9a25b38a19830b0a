"""A full disk at any moment of a background commit: the error is reported, nothing is torn."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import NoSpace
from tests.support import mounts
from tests.support.checker import assert_no_garbage_after_gc, assert_same, assert_sound
from tests.support.fixtures import scratch
from tests.support.mounts import PowerDisk, leave_free, power_disk_problem, small_disk

__all__ = ["scratch"]

MIB = 1 << 20
DISK_BYTES = 64 * MIB
TELLERS = 4
LEAF_FLOATS = 2 * MIB
"""Two leaves of 8 MiB: a thread's pack of one goes past the page cache half-way."""
FULL_S, FREE_S = 0.4, 0.05
"""For how long the neighbour keeps the disk, at most, and for how long not."""


@contextmanager
def in_memory(scratch: Path) -> Iterator[Path]:
    if reason := mounts.small_disk_problem():
        pytest.skip(reason)
    with small_disk(scratch / "disk", size_bytes=DISK_BYTES) as place:
        yield place


@contextmanager
def ext4(scratch: Path) -> Iterator[Path]:
    """It notices late: when the page cache is written out."""
    if reason := power_disk_problem("ext4"):
        pytest.skip(reason)
    disk = PowerDisk("ext4", scratch)
    disk.mount()
    try:
        yield disk.mountpoint
    finally:
        disk.unmount()


@contextmanager
def neighbour(disk: Path, random: Random) -> Iterator[None]:
    """Somebody who takes all of the disk, or all but some of it, and gives it back, again and
    again."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suppress(OSError):  # the commit was quicker: the disk is as full as can be
                leave_free(disk, random.choice([0, 1, 2, 4]) * random.randrange(6 * MIB))
            over.wait(random.uniform(0, FULL_S))
            (disk / "ballast").unlink()
            over.wait(random.uniform(0, FREE_S))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def weights_at(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {str(n): torch.randn(LEAF_FLOATS, generator=generator) for n in range(2)}


class Training:
    """A model whose weights are a function of the step, and its commits to one store on a disk that
    is often full."""

    def __init__(self, place: Path, kind: str) -> None:
        self.place, self.kind = place, kind
        self.model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(tensor) for name, tensor in weights_at(0).items()}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.contents: dict[CommitId, dict[str, Any]] = {}
        self.told: Counter[str] = Counter()
        """Who said that a commit was not made."""
        self.store = self._open()

    def commit(self, step: int) -> None:
        """Commit and train on; if there is no room, one of those that may say so does."""
        state = {"model": self.model, "optimizer": self.optimizer}
        self._advance(step)
        wanted = {"model": weights_at(step), "optimizer": self._optimizer_state()}
        pending = self.store.commit_async(
            state,
            step=step,
            background=ckptstore.Async(staging="lazy" if self.kind == "lazy" else "eager"),
        )
        self._advance(step + 1)
        teller = (self._wait, self._next, self._block, self._close)[step % TELLERS]
        try:
            teller(pending)
        except NoSpace as error:
            self._absent(step, error)
            self.told[teller.__name__] += 1
        else:
            self.contents[pending.wait().id] = wanted

    def newest_is_whole(self) -> None:
        if self.contents:
            commit, wanted = list(self.contents.items())[-1]
            assert_same(self.store.checkout(commit).state_dict(), wanted, str(commit))

    def make_room(self) -> None:
        self.store.forget(ckptstore.KeepLast(1))
        self.store.gc(grace_s=0)
        self.contents = {info.id: self.contents[info.id] for info in self.store.log()}

    def _absent(self, step: int, error: NoSpace) -> None:
        assert "make room" in str(error)
        assert error.__notes__ == [f"the commit of step {step}, in the background"]
        assert step not in {info.step for info in self.store.log()}

    def _advance(self, step: int) -> None:
        """The weights of `step`, written after the optimizer's hook, as by an optimizer."""
        self.optimizer.step()
        with torch.no_grad():
            for name, wanted in weights_at(step).items():
                self.model[name].copy_(wanted)

    def _optimizer_state(self) -> dict[str, Any]:
        groups = self.optimizer.state_dict()["param_groups"]
        return {
            "state": {},
            "param_groups": [{**group, "params": list(self.model)} for group in groups],
        }

    def _open(self) -> ckptstore.Store:
        return ckptstore.open(
            self.place,
            storage=ckptstore.Storage(chunk_bytes=65536),
            threads=2,
            background=ckptstore.Async(executor="process" if self.kind == "process" else "thread"),
        )

    def _wait(self, pending: ckptstore.PendingCommit) -> None:
        pending.wait()

    def _next(self, pending: ckptstore.PendingCommit) -> None:
        """The commit after it, which is not begun then; it may fail by itself, too."""
        after = self.store.commit_async({"small": torch.zeros(1)})
        with suppress(NoSpace):
            self.contents[after.wait().id] = {"small": torch.zeros(1)}

    def _block(self, pending: ckptstore.PendingCommit) -> None:
        with self.store.committing():
            pass

    def _close(self, pending: ckptstore.PendingCommit) -> None:
        try:
            self.store.close()
        finally:
            self.store = self._open()


def _survive(disk: Path, kind: str, times: int, seed: int) -> Counter[str]:
    """Who told that commits were not made, how often."""
    random = Random(seed)
    training = Training(disk / "store", kind)
    for step in range(times):
        with neighbour(disk, random):
            training.commit(step)
            training.newest_is_whole()
        training.make_room()
    training.commit(times)
    training.store.close()
    assert training.contents
    assert_sound(training.place, training.contents)
    assert_no_garbage_after_gc(training.place, training.contents)
    return training.told


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("filesystem", [in_memory, ext4])
@pytest.mark.parametrize("kind", ["thread", "process", "lazy"])
def test_a_disk_that_a_neighbour_fills_a_hundred_times(
    kind: str, filesystem: Any, scratch: Path, seed: int
) -> None:
    with filesystem(scratch) as disk:
        told = _survive(disk, kind, 100, seed)
    assert len(told) == TELLERS
    print(
        f"{kind}, {filesystem.__name__}: 100 commits, {sum(told.values())} of them without room, "
        f"told by {dict(told)}"
    )
