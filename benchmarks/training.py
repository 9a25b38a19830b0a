"""What commits in the background cost training: a step while one runs, and twenty steps of half a
second with one commit among them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch

import ckptstore
from benchmarks import states
from benchmarks.context import Context
from benchmarks.measure import Entrant, Result, Series, alternate

ALONE, THREAD, PROCESS = "training alone", "ckptstore", "ckptstore, a process"
DURABLE = "time to durable, {}"
STEPS = 20
"""Between two commits."""

STEP_S = 0.5
SHORT_STEP_S = 0.05


class Work:
    """Matrix products that take `step_s` a step when nothing else runs."""

    def __init__(self, step_s: float) -> None:
        self._left, self._right = torch.randn(2, 1024, 1024)
        self._out = torch.empty(1024, 1024)
        self._products = 1
        self._products = max(round(step_s / min(self._timed() for _ in range(5))), 1)

    def step(self) -> None:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)

    def _timed(self) -> float:
        started = perf_counter()
        self.step()
        return perf_counter() - started


@dataclass(slots=True)
class Committing:
    """Training of a state that changes, with commits of it to one store."""

    store: ckptstore.Store
    state: states.State
    durable: Series = field(default_factory=Series)
    _pending: list[ckptstore.PendingCommit] = field(default_factory=list)

    def commit(self) -> ckptstore.PendingCommit:
        self._pending.append(self.store.commit_async(self.state.app))
        return self._pending[-1]

    def settle(self) -> None:
        """Wait for what is in flight, note how long it took, and change the state as training would
        have."""
        while self._pending:
            pending = self._pending.pop()
            pending.wait()
            self.durable.values.append(pending.timings.durable_s or 0.0)
            self.durable.cpu_seconds.append(0.0)
        states.change_all(self.state)


def async_training(context: Context) -> Result:
    """Both cores are training's."""
    work, state = Work(STEP_S * context.scale), states.gpt(context.scale)

    def train(commit: Callable[[], Any] | None) -> None:
        for step in range(STEPS):
            work.step()
            if commit and not step:
                commit()

    with ExitStack() as stack:
        ours = _committers(context, state, stack)
        entrants = [Entrant(ALONE, lambda: train(None))]
        entrants += [
            Entrant(name, partial(train, each.commit), after=each.settle)
            for name, each in ours.items()
        ]
        series = alternate("async-training", entrants, context.rounds)
    title = f"{STEPS} steps of half a second on both cores, one commit of 1.45 GB among them"
    return Result("async-training", title, "s", 0, series | _durable(ours))


def async_step(context: Context) -> Result:
    """Training has one torch thread, and the other core is free."""
    title = "a step on one thread while a commit of 1.45 GB runs, mean"
    return _steps(context, "async-step", title, nullcontext())


def async_busy(context: Context) -> Result:
    """Training has one torch thread and feeds itself: a Python thread makes tokens all the while,
    so the interpreter lock is never free for long."""
    title = "a step on one thread beside a busy Python thread while a commit of 1.45 GB runs, mean"
    return _steps(context, "async-busy", title, _tokens())


def _steps(
    context: Context, name: str, title: str, beside_training: AbstractContextManager[None]
) -> Result:
    state = states.gpt(context.scale)
    found: list[float] = []

    def alone() -> None:
        found.append(_mean_step(work, iter(range(STEPS))))

    def beside(each: Committing) -> None:
        pending = each.commit()
        found.append(_mean_step(work, iter(pending.done, True)))

    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        work = Work(SHORT_STEP_S * context.scale)
        ours = _committers(context, state, stack)
        stack.enter_context(beside_training)
        entrants = [Entrant(ALONE, alone, value=found.pop)]
        entrants += [
            Entrant(executor, partial(beside, each), after=each.settle, value=found.pop)
            for executor, each in ours.items()
        ]
        series = alternate(name, entrants, context.rounds)
    return Result(name, title, "s", 0, series | _durable(ours))


def _committers(context: Context, state: states.State, stack: ExitStack) -> dict[str, Committing]:
    executors: tuple[tuple[str, Any], ...] = ((THREAD, "thread"), (PROCESS, "process"))
    return {
        name: Committing(
            stack.enter_context(
                ckptstore.open(context.folder(), background=ckptstore.Async(executor=executor))
            ),
            state,
        )
        for name, executor in executors
    }


def _durable(ours: dict[str, Committing]) -> dict[str, Series]:
    """The first commit of each, which makes buffers, belongs to the round that warms up."""
    return {
        DURABLE.format(name): Series(each.durable.values[1:], each.durable.cpu_seconds[1:])
        for name, each in ours.items()
    }


def _mean_step(work: Work, until: Iterator[object]) -> float:
    steps, started = 0, perf_counter()
    for _ in until:
        work.step()
        steps += 1
    return (perf_counter() - started) / max(steps, 1)


@contextmanager
def _tokens() -> Iterator[None]:
    """A thread that splits text into words and counts them until the end of the block."""
    text = " ".join(str(number * 7919 % 104729) for number in range(2_000))
    ended = Event()

    def count() -> None:
        while not ended.is_set():
            numbers: dict[str, int] = {}
            for word in text.split(" "):
                numbers[word] = numbers.get(word, len(numbers)) + 1

    thread = Thread(target=count, name="tokens")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
