"""What does a caller ask to commit (state, run, step, message, metrics, tags, links), and which
commits are its parents?"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any, NamedTuple, TypeAlias

from ckptstore.commit.pending import UNWATCHED, Pending, Watch
from ckptstore.commit.plan import Flats
from ckptstore.core import forks
from ckptstore.core.config import (
    LINK_BYTES_MAX,
    LINK_NAME_BYTES_MAX,
    LINKS_MAX,
    MESSAGE_BYTES_MAX,
    METRIC_NAME_BYTES_MAX,
    METRICS_MAX,
    TAGS_MAX,
)
from ckptstore.core.ids import CommitId, SessionId, check_tag
from ckptstore.core.options import Ranks
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state.staging_buffers import Buffer

logger = logging.getLogger("ckptstore")

_STEPS = 2**53 + 1
"""Log entries hold steps below this number."""


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """A commit's run, step and description. Without `parents`, its parent is the run's newest
    commit. `unanswered` are sessions, oldest first, whose commits on top of `parents` the log was
    asked to take: the last one that it took is the parent, and only the append can tell. `cast`
    maps globs of leaves to the lower precision in which they are committed. Values of leaves that
    match a glob in `unchecked` may become infinite, NaN or zero. Of ranks that commit in the
    background, only parts of one call, the one with the number `turn`, become a commit."""

    run: str
    step: int | None = None
    message: str = ""
    metrics: tuple[tuple[str, float], ...] = ()
    tags: tuple[str, ...] = ()
    parents: tuple[CommitId, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    cast: tuple[tuple[str, str], ...] = ()
    unchecked: tuple[str, ...] = ()
    unanswered: tuple[SessionId, ...] = ()
    turn: int = 0


class Prepared(NamedTuple):
    """A commit's description, and the flattened state."""

    label: CommitMetadata
    flats: Flats

    @property
    def nbytes(self) -> int:
        """Raw bytes of the state."""
        return sum(flat.nbytes for flat in self.flats.values())


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A state to commit, or the reason why one of several ranks has none. Times count from
    `started`, a value of `time.perf_counter`. `watch` follows the progress and may stop the commit.
    A worker process reads the state from `buffer`. Statistics of the chunks go to `measured`, if
    set. `asked` are the sessions whose commit the log was asked to take for this request, on every
    rank: who makes it again because there was no answer finds the one that was made."""

    what: Prepared | BaseException
    started: float
    watch: Watch = UNWATCHED
    memory_budget_bytes: int | None = None
    ranks: Ranks = field(default_factory=Ranks)
    buffer: Buffer | None = None
    measured: dict[bytes, bytes] | None = None
    asked: list[SessionId] = field(default_factory=list)

    def prepared(self) -> Prepared:
        """The prepared state. Raises the reason if there is none; ranks call this within a round,
        so that the error reaches all of them."""
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


def label_of(
    run: str,
    step: object,
    tag: str | Sequence[str] | None,
    message: object,
    metrics: Mapping[str, float] | None,
    links: Mapping[str, str] | None = None,
    cast: object = None,
) -> CommitMetadata:
    """Checked metadata without parents. Raises `InvalidInput` for wrong values and for those beyond
    a limit of `core.config`."""
    dtypes, unchecked = ((), ()) if cast is None else _cast(cast)
    return CommitMetadata(
        run,
        _step(step),
        _message(message),
        _metrics(metrics),
        _tags(tag),
        links=_links(links),
        cast=dtypes,
        unchecked=unchecked,
    )


def _cast(cast: object) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    # Imported here, because only a cast needs torch.
    from ckptstore.state.casting import cast_globs

    return cast_globs(cast)


def refuse_unnamed(call: str, values: tuple[object, ...]) -> None:
    """Raise `InvalidInput` for arguments of `call` that came without their names."""
    if values:
        found = values[0]
        name = (
            "tag" if isinstance(found, str) else "metrics" if isinstance(found, Mapping) else "step"
        )
        raise InvalidInput(
            f"{found!r:.80} is for which argument? All but the state have names: "
            f"{call}(app_state, {name}={found!r:.80})"
        )


def _step(step: object) -> int | None:
    if step is None:
        return None
    with suppress(TypeError):
        # accepts numpy's and torch's integers too
        if not isinstance(step, bool) and (number := index(step)) in range(_STEPS):  # type: ignore[arg-type]
            return number
    raise InvalidInput(
        f"step is {step!r:.80}; wanted a whole number from 0 to {_STEPS - 1}, or None"
    )


def _tags(tag: object) -> tuple[str, ...]:
    if tag is None or isinstance(tag, str):
        return () if tag is None else (check_tag(tag),)
    if not isinstance(tag, Iterable):
        raise InvalidInput(f"tag is {tag!r:.80}; wanted a name, several, or None")
    names = list(islice(tag, TAGS_MAX + 1))
    if len(names) > TAGS_MAX:
        raise InvalidInput(
            f"a commit gets at most {TAGS_MAX} tags at once; give it more with store.tag"
        )
    return tuple(map(check_tag, names))


def _message(message: object) -> str:
    if not isinstance(message, str):
        raise InvalidInput(f"message is {message!r:.80}; wanted a string")
    if (nbytes := _utf8_bytes(message, "the message")) > MESSAGE_BYTES_MAX:
        raise InvalidInput(
            f"the message has {nbytes} bytes; wanted at most {MESSAGE_BYTES_MAX}, which the log "
            "keeps for good: commit longer texts as values of the state"
        )
    return message


def _metrics(metrics: object) -> tuple[tuple[str, float], ...]:
    if metrics is None:
        return ()
    if not isinstance(metrics, Mapping):
        raise InvalidInput(
            f"metrics are {metrics!r:.80}; wanted a dict of names to numbers, such as "
            '{"loss": 0.5}'
        )
    if len(metrics) > METRICS_MAX:
        raise InvalidInput(
            f"{len(metrics)} metrics; wanted at most {METRICS_MAX}, which the log keeps for good: "
            "commit more as values"
        )
    pairs = []
    for name, value in metrics.items():
        if (
            not isinstance(name, str)
            or not name
            or _utf8_bytes(name, "a metric's name") > METRIC_NAME_BYTES_MAX
        ):
            raise InvalidInput(
                f"a metric's name is {name!r:.80}; wanted a string of 1 to {METRIC_NAME_BYTES_MAX} "
                "bytes"
            )
        try:
            pairs.append((name, _number(value)))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidInput(f"metric {name!r} is {value!r:.80}; wanted a number") from error
    return tuple(sorted(pairs))


def _links(links: object) -> tuple[tuple[str, str], ...]:
    if links is None:
        return ()
    if not isinstance(links, Mapping):
        raise InvalidInput(
            f"links are {links!r:.80}; wanted a dict of names to texts, such as "
            '{"wandb": "https://…"}'
        )
    if len(links) > LINKS_MAX:
        raise InvalidInput(f"{len(links)} links; wanted at most {LINKS_MAX}")
    for name, link in links.items():
        _check_text(name, "a link's name", LINK_NAME_BYTES_MAX)
        _check_text(link, f"the link {name!r:.80}", LINK_BYTES_MAX)
    return tuple(sorted(links.items()))


def _check_text(text: object, noun: str, bytes_max: int) -> None:
    if not isinstance(text, str) or not 0 < _utf8_bytes(text, noun) <= bytes_max:
        raise InvalidInput(f"{noun} is {text!r:.80}; wanted a string of 1 to {bytes_max} bytes")


def _utf8_bytes(text: str, noun: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{noun} is {text!r:.80}, which is no text: {error.reason}") from error


def _number(value: Any) -> float:
    """A number, or the single element of a tensor, which may require grad."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, str | bytes):  # which `float` would parse
        raise TypeError("a text is no number")
    return float(number)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A commit that failed on top of `tip`, and that may have been made all the same, by one of
    the sessions `asked`."""

    tip: CommitId | None
    asked: Sequence[SessionId]


Tip: TypeAlias = CommitId | Pending[Any] | Unanswered | None
"""What the next commit follows; None for a store that has not committed or restored yet."""


class ParentTracker:
    """Tracks the parent of the next commit: the latest one committed, started or restored.
    `made_by` asks the log for the commit of a session."""

    def __init__(self, made_by: Callable[[SessionId], CommitId | None]) -> None:
        self._tip: Tip = None
        self._joined: SessionId | None = None
        self._made_by = made_by
        self._lock = forks.lock()

    def now(self, commit: CommitId) -> None:
        """Make `commit` the parent of the next commit."""
        with self._lock:
            self._tip, self._joined = commit, None

    def joined(self, session: SessionId) -> None:
        """Parts of a commit were written that another rank makes, and of which nobody tells this
        one: the log does, when the next commit is made."""
        with self._lock:
            self._settle()
            self._joined = session

    def _settle(self) -> None:
        """Follow the commit that another rank has made meanwhile."""
        with suppress(CkptStoreError):  # if the log does not answer now, it is asked again
            if self._joined and (made := self._made_by(self._joined)):
                self._tip, self._joined = made, None

    def failed(self, asked: Sequence[SessionId]) -> None:
        """A commit made now has failed, or was interrupted, after the log was asked to take it."""
        with self._lock:
            self._settle()
            if asked:
                self._tip = Unanswered(commit_of(self._tip), (*asked_of(self._tip), *asked))

    def then(self, pending: Pending[Any]) -> Tip:
        """Make `pending` the parent of the next commit; return the parent of `pending` itself."""
        with self._lock:
            self._settle()
            before, self._tip, self._joined = self._tip, pending, None
            return before

    def tip(self) -> Tip:
        """What the next commit follows."""
        with self._lock:
            self._settle()
            return self._tip

    def withdraw(self, pending: Pending[Any], before: Tip) -> None:
        """Let the next commit follow what was there `before`: `pending` never began."""
        with self._lock:
            if self._tip is pending:
                self._tip = before

    def following(self, label: CommitMetadata) -> CommitMetadata:
        """`label` for a commit made now. Nothing may be in flight."""
        return following(self.tip(), label)


def commit_of(tip: Tip) -> CommitId | None:
    """The last commit of `tip` that is known to be made; it must have ended."""
    return tip.tip if isinstance(tip, Pending | Unanswered) else tip


def asked_of(tip: Tip) -> Sequence[SessionId]:
    """The sessions that may have made a commit on top of that, although `tip` failed."""
    return tip.asked if isinstance(tip, Pending | Unanswered) else ()


def following(tip: Tip, label: CommitMetadata) -> CommitMetadata:
    """`label` for a commit on top of `tip`, which must have ended."""
    commit = commit_of(tip)
    return replace(label, parents=(commit,) if commit else (), unanswered=tuple(asked_of(tip)))


class RunWatch:
    """Does another training commit to the same run? Looks at each commit of one open store, and
    warns once.

    Nothing is lost by that, but `resume` takes the newest commit of a run, whichever training made
    it. The usual cause is a job that was requeued while it still ran elsewhere.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: CommitId | None = None
        self._told = False

    def after(
        self, commit: CommitId, parents: Sequence[CommitId], newest: Sequence[CommitId]
    ) -> None:
        """Call after each `commit`, with the `newest` commits of its run, in order. Warns if
        `commit` follows the one that this store made before it, and another training has committed
        between the two.

        A commit after a restore has another parent, so it causes no warning: going back to an older
        commit does not mean that another training exists.
        """
        before, self._made = self._made, commit
        between = newest[-2] if len(newest) > 1 and newest[-1] == commit else before
        if self._told or before is None or tuple(parents) != (before,) or between == before:
            return
        self._told = True
        logger.warning(
            "run %s: somebody else made commit %s between two of this training; `resume` "
            "takes the newest, whoever made it: end the other training, or give each a run of its "
            "own (run=…)",
            self._run,
            str(between)[:12],
        )
