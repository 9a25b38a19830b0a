"""What is asked of an asynchronous commit: how the state is to be copied, and by which way it
becomes a commit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from ckptstore.commit.commit_metadata import CommitMetadata
from ckptstore.commit.pending import Pending
from ckptstore.commit.progress import CommitProgress, Watch
from ckptstore.core.ids import CommitId
from ckptstore.errors import InvalidInput
from ckptstore.state.leaf_sources import FlatState
from ckptstore.state.staging_buffers import Buffer

Overlap: TypeAlias = Literal["wait", "skip"]
Staging: TypeAlias = Literal["eager", "lazy"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """How a caller wants an asynchronous commit: `overlap` says what to do while others are in
    flight or staging memory is taken."""

    overlap: Overlap = "wait"
    staging: Staging = "eager"
    trust_version: bool = False
    dedup_first: bool = False
    allow_pickle: bool = False
    on_progress: Callable[[CommitProgress], object] | None = None

    def __post_init__(self) -> None:
        if self.overlap not in ("wait", "skip"):
            raise InvalidInput(f"overlap is {self.overlap!r}; wanted 'wait' or 'skip'")
        if self.staging not in ("eager", "lazy"):
            raise InvalidInput(f"staging is {self.staging!r}; wanted 'eager' or 'lazy'")
        if self.dedup_first and self.staging == "lazy":
            raise InvalidInput(
                "dedup_first reads the whole state within the call, which staging='lazy' is there "
                "to avoid; choose one"
            )


class AsyncResult(NamedTuple, Generic[S]):
    """A commit that exists: its id, the ids of its chunks by leaf, and what a caller gets for
    it."""

    id: CommitId
    ids: Mapping[int, bytes]
    result: S


@dataclass(frozen=True, slots=True)
class CommitRoute(Generic[S]):
    """How a state becomes a commit.

    `flatten` is called within the call, `make` in the background with the staged state, one at a
    time. `begin` calls what copies the state, which returns why it cannot be begun now, or nothing;
    several ranks agree there. What is not `whole` may leave leaves uncopied until they have been
    written. What is `elsewhere` is made by somebody who does not see what has arrived: when
    everything has.
    """

    flatten: Callable[[], Mapping[str, FlatState]]
    make: Callable[
        [Mapping[str, FlatState], Buffer, CommitMetadata, Pending[S], Watch], AsyncResult[S]
    ]
    begin: Callable[[Callable[[], str]], str]
    whole: bool
    elsewhere: bool


def by_itself(begin: Callable[[], str]) -> str:
    """How one process begins."""
    return begin()
