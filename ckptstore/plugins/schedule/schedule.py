"""When is a commit due: every n steps or seconds, at the optimal interval, or on a signal?"""

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from ckptstore.errors import InvalidInput
from ckptstore.plugin.work import public_methods
from ckptstore.plugin.writing import Async, Pending

S = TypeVar("S")

Agree: TypeAlias = Callable[[Mapping[str, Any], bool, bool], tuple[bool, bool]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Exactly one of: `steps` or `seconds` between commits, or `mtbf_s`, the mean time between
    failures, which determines the best interval."""

    steps: int | None = None
    seconds: float | None = None
    mtbf_s: float | None = None

    def due(
        self, step: int, last_step: int, since_s: float, cost_s: float, durable_s: float
    ) -> bool:
        """Whether to commit after `step`. The last commit was due after `last_step`, began
        `since_s` ago, blocked training for `cost_s` and was durable after `durable_s`."""
        if self.steps is not None:
            return step // self.steps > last_step // self.steps
        if self.seconds is not None:
            return since_s >= self.seconds
        assert self.mtbf_s is not None
        return since_s >= max(best_interval_s(cost_s, self.mtbf_s), durable_s)


def rule_of(auto: object, steps: object, seconds: object, mtbf_s: object) -> Rule:
    """The rule. Raises `InvalidInput` unless there is exactly one, with positive numbers."""
    if auto not in (None, "auto") or sum(each is not None for each in (auto, steps, seconds)) != 1:
        raise InvalidInput(
            "wanted one of every(steps=…), every(seconds=…) and every('auto', mtbf_s=…)"
        )
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InvalidInput(f"steps is {steps!r}; wanted a whole number from 1 on")
    if auto and mtbf_s is None:
        raise InvalidInput(
            "'auto' needs mtbf_s, the mean time between failures in seconds: of one machine, "
            "divided by how many there are"
        )
    return Rule(steps, _positive("seconds", seconds), _positive("mtbf_s", mtbf_s) if auto else None)


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between the ends of commits that minimizes lost time, if each costs training
    `cost_s` and failures come `mtbf_s` apart on average.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    2006, equation 37; its first term is Young's of 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


@public_methods
class Schedule(Generic[S]):
    """Called after each step; commits when that is due. After a signal it commits once more, waits
    for that commit, and sets `stopped`.

    The signal handler only sets a flag, since an optimizer may be half-way through a step. Leaving
    the context, or `close`, restores the previous handler. `agree` gets the options of the call,
    whether a commit is due and whether the signal came, and returns what all ranks agree on.
    `background` is how commits run if the call does not say; the one after a signal is not skipped.
    """

    def __init__(
        self,
        commit: Callable[..., Pending[S]],
        rule: Rule,
        on_signal: signal.Signals | None,
        agree: Agree,
        background: Async,
    ) -> None:
        self._commit, self._rule, self._agree = commit, rule, agree
        # These hold for the store, and may not be given again for one commit.
        self._background = replace(
            background, executor=None, max_in_flight=None, staging_bytes=None
        )
        self._came = threading.Event()
        self._signal, self._before = (
            on_signal,
            None if on_signal is None else signal.signal(on_signal, self._note),
        )
        self._last: Pending[S] | None = None
        self._last_step: int | None = None
        self._began = time.monotonic()
        self.stopped = False
        """Whether the signal came and its commit is durable, so that training may end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, app_state: Any, *, step: int, **options: Any) -> Pending[S] | None:
        """Commit `app_state` if that is due after `step`; otherwise return None. Takes the options
        of `commit_async`, and raises its errors."""
        if self.stopped:
            return None
        due, came = self._is_due(step), self._came.is_set()
        if self._rule.steps is None or self._signal is not None:  # else every rank counts alike
            due, came = self._agree(options, due, came)
        if not (due or came):
            return None
        if came:
            given = options.get("background") or self._background
            options["background"] = replace(given, overlap="wait")
        pending = self._begin(app_state, step, options)
        if came:
            pending.wait()
            self.stopped = True
        return pending

    @property
    def interval_s(self) -> float | None:
        """With `"auto"`, the best time between commits, given the cost of the last one; None before
        a cost is known, and for other rules."""
        if self._rule.mtbf_s is None or self._last is None or not self._last.done():
            return None
        return max(best_interval_s(self._cost_s, self._rule.mtbf_s), self._durable_s)

    def close(self) -> None:
        """Restore the previous signal handler. Idempotent."""
        if self._signal is not None:
            signal.signal(self._signal, self._before or signal.SIG_DFL)
            self._signal = None

    def _is_due(self, step: int) -> bool:
        if self._last_step is None:
            self._last_step = step - 1
        if self._rule.mtbf_s is not None and self._last is None:
            return True  # the first commit measures the cost
        if self._rule.mtbf_s is not None and self._last and not self._last.done():
            # Wait for it, but let the next commit tell of one that hangs.
            patient = not self._background.goes_on
            if patient or self._last.age_s < self._background.max_wait_s:
                return False
        return self._rule.due(
            step, self._last_step, time.monotonic() - self._began, self._cost_s, self._durable_s
        )

    def _begin(self, app_state: Any, step: int, options: dict[str, Any]) -> Pending[S]:
        self._last_step, self._began = step, time.monotonic()
        self._last = self._commit(app_state, step=step, **options)
        return self._last

    @property
    def _cost_s(self) -> float:
        return (self._last.timings.held_s if self._last else None) or 0.0

    @property
    def _durable_s(self) -> float:
        return (self._last.timings.durable_s if self._last else None) or 0.0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.set()


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise InvalidInput(f"{name} is {value!r}; wanted a positive number of seconds")
