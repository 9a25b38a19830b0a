"""How a commit is referred to: the text of a ref as a frozen value, without knowing what any store
holds.

    ref  =  [run "@"] base {"~" K} base =  step | "latest" | "best:" metric [":min" | ":max"] | tag
    | commit id or at least 6 of its first digits

`~K` is the K-th first parent, `~` the first. `run@` goes with a step, `latest` and `best:` only;
without it they are looked for in the run that the store was opened with.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckptstore.core.ids import check_run
from ckptstore.errors import InvalidInput

_FORMS = (
    "a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, at least 6 digits of a commit "
    "id, 'RUN@STEP', "
    "any of them with '~K' behind"
)
_STEP_MAX = 2**53
"""Of the log's entries: no commit has a larger one."""
_PREFIX = re.compile(r"[0-9a-f]{6,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
_RUN = re.compile(r"(?:([^@:]*)@)?(.*)", re.DOTALL)
_ANCESTOR = re.compile(r"(.*?)((?:~[0-9]{0,9})+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """The newest commit of a step; `prefix` if the digits may also begin a commit id."""

    step: int
    run: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest commit of a run."""

    run: str | None = None


@dataclass(frozen=True, slots=True)
class Best:
    """The commit of a run with the best value of a metric, the newest of equals."""

    metric: str
    order: Literal["min", "max"] = "min"
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """A tag, or else a commit id or the beginning of one (`prefix`)."""

    name: str
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The `generations`-th first parent of `base`."""

    base: "Step | Latest | Best | Name"
    generations: int


Ref: TypeAlias = Step | Latest | Best | Name | Ancestor


def parse_ref(ref: str | int) -> Ref:
    """The parsed form of `ref`; an integer is a step. Raises `InvalidInput` for anything else."""
    if isinstance(ref, int) and not isinstance(ref, bool) and abs(ref) <= _STEP_MAX:
        return Step(ref)
    if not isinstance(ref, str) or "\0" in ref or not ref.isprintable():
        raise InvalidInput(f"{ref!r:.80} is no ref: wanted {_FORMS}")
    ancestor = _ANCESTOR.fullmatch(ref)
    if not ancestor:
        return _parse_base(ref)
    base, tildes = ancestor.groups()
    generations = sum(int(k or 1) for k in tildes[1:].split("~"))
    return Ancestor(_parse_base(base), generations) if generations else _parse_base(base)


def _parse_base(text: str) -> Step | Latest | Best | Name:
    run, base = _RUN.fullmatch(text).groups()  # type: ignore[union-attr]  # matches any text
    if run is not None:
        check_run(run)
    if re.fullmatch(r"-?[0-9]{1,18}", base):
        return Step(int(base), run, _prefix(base) if run is None else None)
    if base == "latest":
        return Latest(run)
    if base.startswith("best:"):
        return _parse_best(text, base.removeprefix("best:"), run)
    if run is None and _NAME.fullmatch(base):
        return Name(base, _prefix(base))
    raise InvalidInput(f"{text!r} is no ref: wanted {_FORMS}")


def _parse_best(text: str, wanted: str, run: str | None) -> Best:
    metric, _, order = wanted.rpartition(":")
    if order == "max" and metric:
        return Best(metric, "max", run)
    if order == "min" and metric:
        return Best(metric, "min", run)
    if not wanted:
        raise InvalidInput(
            f"{text!r} names no metric: wanted 'best:METRIC' (smallest) or 'best:METRIC:max' "
            "(largest)"
        )
    return Best(wanted, "min", run)


def _prefix(text: str) -> str | None:
    return text if _PREFIX.fullmatch(text) else None
