"""Which policies do the --keep options and --thin say?"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from ckptstore import KeepBest, KeepEverySteps, KeepLast, KeepPeriods, KeepWithin
from ckptstore.cli.call import UsageError
from ckptstore.cli.parser import parse_best
from ckptstore.plugin.policies import Keep, Period, Policy


def policies_of(args: Namespace) -> Sequence[Policy]:
    """What the --keep options and --thin say."""
    policies = list[Keep]()
    for name, make in _KEEPS.items():
        given = getattr(args, name)
        if given is not None:
            policies += map(make, given if isinstance(given, list) else [given])
    if args.thin and not policies:
        raise UsageError(
            "--thin takes leaves from the commits that no --keep option keeps; give one, such as "
            "--keep-last 5"
        )
    return [policy.thin(*args.thin) for policy in policies] if args.thin else policies


def _keep_best(words: Sequence[str]) -> KeepBest:
    metric, *numbers = words
    if len(numbers) > 1 or not all(n.isdecimal() and len(n) < 20 for n in numbers):
        given = " ".join(words)
        raise UsageError(f"--keep-best takes METRIC or METRIC:max and a count, not {given!r:.80}")
    name, maximize = parse_best(metric)
    return KeepBest(name, maximize=maximize, n=int(numbers[0]) if numbers else 1)


_KEEPS: Mapping[str, Callable[[Any], Keep]] = {
    "keep_last": KeepLast,
    "keep_every_steps": KeepEverySteps,
    "keep_best": _keep_best,
    "keep_within": KeepWithin,
    **{f"keep_{period}": partial(KeepPeriods, period) for period in get_args(Period)},
}
"""The policies that the --keep options of these names make of their values."""
