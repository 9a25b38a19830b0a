"""The cases of questions that a store of every version answers: what statistics cost a commit, and
the average of ten commits."""

from time import process_time

import ckptstore
from benchmarks import states
from benchmarks.context import Context
from benchmarks.measure import Entrant, Result, alternate
from benchmarks.progress import note
from benchmarks.saves import FreshStore
from benchmarks.states import State
from ckptstore.averages import combine, weighted
from ckptstore.core.ids import CommitId

COMMITS = 10
WITH, WITHOUT = "with statistics", "without"
AVERAGE, RESTORE = "average", "restore"


class Measured(FreshStore):
    """The CPU time of a first commit, in all threads, with statistics or without."""

    def __init__(self, context: Context, state: State, stats: bool) -> None:
        super().__init__(context, state)
        self._stats, self._spent_s = stats, 0.0

    def act(self) -> None:
        start = process_time()
        self._store.commit(self._state.app, step=0, stats=self._stats)
        self._spent_s = process_time() - start

    def entrant(self) -> Entrant:
        name = WITH if self._stats else WITHOUT
        return Entrant(name, self.act, self.before, self.after, value=lambda: self._spent_s)


def _statistics(context: Context, case: str, state: State) -> Result:
    entrants = [Measured(context, state, stats).entrant() for stats in (True, False)]
    series = alternate(case, entrants, context.rounds)
    return Result(case, "CPU time of a first commit", "s", 0, series)


def statistics(context: Context) -> Result:
    return _statistics(context, "statistics", states.gpt(context.scale))


def statistics_bf16(context: Context) -> Result:
    state = states.gpt(context.scale)
    narrow = {path: tensor.bfloat16() for path, tensor in state.tensors.items()}
    return _statistics(context, "statistics-bf16", states.nest(narrow))


def commit_ten(store: ckptstore.Store, state: State) -> None:
    """The commits to average, whose tensors all differ."""
    for step in range(COMMITS):
        states.change_all(state)
        store.commit(state.app, step=step)
        note(f"average: commit {step}/{COMMITS} to prepare")


def average_ten(store: ckptstore.Store) -> CommitId:
    """With other factors than the last time, so that it is written too."""
    step = 1 + (store.checkout("latest").step or 0)
    return combine(store, range(COMMITS), weighted([step, *[1] * (COMMITS - 1)]), step=step).id


def average(context: Context) -> Result:
    state, made = states.gpt(context.scale), list[CommitId]()
    with ckptstore.open(context.folder()) as store:
        commit_ten(store, state)

        def forget() -> None:
            """Delete averages but for the last two, which a run cannot forget."""
            while len(made) > 2:
                store.forget(made.pop(0))
                store.gc(grace_s=0)

        def restore() -> None:
            for ref in range(COMMITS):
                store.checkout(ref).restore(state.app)

        entrants = [
            Entrant(AVERAGE, lambda: made.append(average_ten(store)), after=forget),
            Entrant(RESTORE, restore),
        ]
        series = alternate("average", entrants, context.rounds)
    title = f"{COMMITS} commits, averaged into a new one, and restored"
    return Result("average", title, "s", COMMITS * state.nbytes, series)
