"""How is a commit referred to, and which commit does a ref name?

`parse_ref` makes text a frozen value. `find` looks it up in what knows a store's commits: the
folded log, whose entries are verified, or the catalog, which answers faster.

    ref  =  [run "@"] base {"~" K} base =  step | "latest" | "best:" metric [":min" | ":max"] | tag
    | commit id or at least 6 of its first digits

`~K` is the K-th first parent, `~` the first. `run@` goes with a step, `latest` and `best:` only;
without it they are looked for in the run that the store was opened with.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Literal, Protocol, TypeAlias

from ckptstore.core.ids import CommitId, check_run
from ckptstore.errors import Corrupt, InvalidInput, NotFound

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


class AmbiguousRef(InvalidInput):
    """The ref matches several commits. It does exist, so the search does not go on elsewhere."""


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
    if not isinstance(ref, str | bool):
        with suppress(TypeError):
            # numpy's and torch's integers too, as a commit takes them for its step
            if abs(step := index(ref)) <= _STEP_MAX:
                return Step(step)
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


class Commits(Protocol):
    """The commits in which refs are resolved. `run` is None for all runs. Forgotten commits have no
    step and no metrics here."""

    def newest(self, run: str | None, step: int | None = None) -> CommitId | None:
        """The newest commit, or the newest of a step."""

    def best(self, ref: Best, run: str | None) -> CommitId | None:
        """The commit with the best value of a metric that is a number, the newest of equals."""

    def tagged(self, name: str) -> CommitId | None:
        """The commit that a tag names."""

    def beginning(self, prefix: str) -> Sequence[CommitId]:
        """Commits whose ids begin so, forgotten ones too; several, but not necessarily all."""

    def parents_of(self, commit: CommitId) -> Sequence[CommitId] | None:
        """The parents of a commit, the first alone suffices; None if the commit is unknown."""


def find(commits: Commits, ref: Ref, run: str | None) -> CommitId | None:
    """The commit that `ref` names. Steps, `latest` and `best:` are looked up in the ref's run, else
    in `run`, else in all runs.

    Raises `NotFound` for an ancestor that is not there, `AmbiguousRef` for a prefix of several ids,
    and `Corrupt` if first parents form a circle.
    """
    match ref:
        case Ancestor():
            base = find(commits, ref.base, run)
            return base and _ancestor(commits, base, ref.generations)
        case Name():
            return commits.tagged(ref.name) or _beginning(commits, ref.prefix)
        case Step():
            return commits.newest(ref.run or run, ref.step) or _beginning(commits, ref.prefix)
        case Latest():
            return commits.newest(ref.run or run)
        case Best():
            return commits.best(ref, ref.run or run)


def _ancestor(commits: Commits, commit: CommitId, generations: int) -> CommitId:
    first, passed = commit, set[CommitId]()
    for depth in range(generations + 1):
        parents = commits.parents_of(commit)
        if parents is None:
            raise NotFound(
                f"the first parent {depth} generations before {first[:12]}, {commit[:12]}, has "
                "been purged; see `ckptstore log`"
            )
        if depth == generations:
            break
        if not parents:
            raise NotFound(
                f"commit {first[:12]} has {depth} generations of first parents; wanted "
                f"{generations}"
            )
        if commit in passed:
            # Honest ids are hashes, which cannot form a circle of parents.
            raise Corrupt(
                f"the first parents of commit {commit[:12]} lead back to it, so the log was "
                "forged or damaged; run `ckptstore fsck`"
            )
        passed.add(commit)
        commit = parents[0]
    return commit


def _beginning(commits: Commits, prefix: str | None) -> CommitId | None:
    if prefix is None:
        return None
    found = commits.beginning(prefix)
    if len(found) > 1:
        some = ", ".join(commit[: max(12, len(prefix) + 4)] for commit in found[:5])
        more = ", …" if len(found) > 5 else ""
        raise AmbiguousRef(f"{prefix!r} begins several commit ids: {some}{more}; give more digits")
    return found[0] if found else None
