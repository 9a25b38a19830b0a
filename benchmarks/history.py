"""The cases where history grows: bytes on disk beside the tensors' own, and what a commit and a log
cost after many commits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ckptstore
from benchmarks import states
from benchmarks.context import Context, Slot
from benchmarks.disk import settle, used_bytes
from benchmarks.measure import Entrant, Result, Series, alternate
from benchmarks.progress import note
from benchmarks.saves import OURS
from benchmarks.states import State

CHANGED_COMMITS = 20
UNCHANGED_COMMITS = 100
DEPTHS = (10, 1_000, 10_000)
ROUNDS_FACTOR = 10


def _growth_bytes(
    folder: Path, state: State, commits: int, change: Callable[[State], object]
) -> float:
    """What the store's folder grew by per commit, everything in it counted; the store is closed
    when it is measured."""
    with ckptstore.open(folder) as store:
        store.commit(state.app, step=0)
    before = used_bytes(folder)
    with ckptstore.open(folder) as store:
        for step in range(1, commits + 1):
            change(state)
            store.commit(state.app, step=step)
            note(f"overhead: commit {step}/{commits}")
    return (used_bytes(folder) - before) / commits


def overhead_changed(context: Context) -> Result:
    state = states.tiny(context.scale)
    slot = Slot(context)

    def of(size: float) -> float:
        return (size - state.nbytes) / len(state.tensors)

    series = {
        OURS: Series(
            [of(_growth_bytes(context.folder(), state, CHANGED_COMMITS, states.change_all))]
        )
    }
    for peer in context.peers:
        slot.fresh()
        peer.write(state, slot.path)
        settle(slot.path)
        series[peer.name] = Series([of(used_bytes(slot.path))])
        slot.clear()
    title = "bytes on disk beside each of 20,000 changed tensors of 256 bytes, mean of 20 commits"
    return Result("overhead-changed", title, "B", 0, series)


def overhead_unchanged(context: Context) -> Result:
    state = states.tiny(context.scale)
    series = {
        OURS: Series(
            [_growth_bytes(context.folder(), state, UNCHANGED_COMMITS, lambda _state: None)]
        )
    }
    title = "bytes on disk for a commit of 20,000 unchanged tensors, mean of 100 commits"
    return Result("overhead-unchanged", title, "B", 0, series)


def _fill(folder: Path, commits: int) -> None:
    state = states.small()
    with ckptstore.open(folder) as store:
        for step in range(commits):
            states.change_all(state)
            store.commit(state.app, step=step)
            if step % 100 == 0:
                note(f"history: commit {step}/{commits} to prepare")


class Deep:
    """One more commit to a store that has `depth`; a shallow store is made anew before it has grown
    by a tenth and more than ten."""

    def __init__(self, context: Context, depth: int) -> None:
        self._context, self._depth = context, depth
        self._state = states.small()
        self._open()

    def _open(self) -> None:
        folder = self._context.folder()
        _fill(folder, self._depth)
        self._store = ckptstore.open(folder)
        self._commits = 0
        self.act()

    def before(self) -> None:
        states.change_all(self._state)
        if self._commits > max(10, self._depth // 10):
            self._store.close()
            self._open()

    def act(self) -> None:
        self._store.commit(self._state.app, step=self._depth + self._commits)
        self._commits += 1

    def entrant(self) -> Entrant:
        return Entrant(f"after {self._depth:,} commits", self.act, self.before)

    def close(self) -> None:
        self._store.close()


def fixed_cost(context: Context) -> Result:
    """Commits are short, so there are ten times as many rounds as elsewhere."""
    stores = [Deep(context, max(int(depth * context.scale), 2)) for depth in DEPTHS]
    series = alternate(
        "fixed-cost", [store.entrant() for store in stores], context.rounds * ROUNDS_FACTOR
    )
    for store in stores:
        store.close()
    return Result("fixed-cost", "commit of 8 KiB, durable", "s", 0, series)


def shell_log(context: Context) -> Result:
    """The whole command as a shell starts it, beside a Python that does nothing."""
    folder = context.folder()
    _fill(folder, max(int(DEPTHS[-1] * context.scale), 20))
    command = [
        str(Path(sys.executable).with_name("ckptstore")),
        "--store",
        str(folder),
        "log",
        "-n",
        "20",
    ]

    def log() -> None:
        lines = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        if len(lines) < 20:
            raise RuntimeError(f"{' '.join(command)} printed {len(lines)} lines, wanted 20 commits")

    def python() -> None:
        subprocess.run([sys.executable, "-c", "pass"], check=True)

    series = alternate(
        "log",
        [Entrant("ckptstore log -n 20", log), Entrant("python -c pass", python)],
        context.rounds,
    )
    return Result("log", f"`ckptstore log -n 20` after {DEPTHS[-1]:,} commits", "s", 0, series)
