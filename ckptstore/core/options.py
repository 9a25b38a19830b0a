"""Groups of arguments: how ranks work together, how background commits run, where objects lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from ckptstore.core.public_calls import checked_fields
from ckptstore.errors import InvalidInput

TIMEOUT_S = 300.0
"""Default for the longest wait for another rank."""

Overlap: TypeAlias = Literal["wait", "skip"]
Staging: TypeAlias = Literal["eager", "lazy"]
Executor: TypeAlias = Literal["thread", "process"]
OnError: TypeAlias = Literal["raise", "warn"]
OnFull: TypeAlias = Literal["raise", "gc"]
Verify: TypeAlias = Literal["checksum", "id"]


class Milestone(StrEnum):
    """The stages of a commit, in order: the caller continues; the state is copied; its chunks have
    ids; its packs are closed; the commit exists; the mirror has it, or a newer one."""

    HELD = "held"
    STAGED = "staged"
    HASHED = "hashed"
    WRITTEN = "written"
    DURABLE = "durable"
    MIRRORED = "mirrored"


@dataclass(frozen=True, slots=True)
class CommitProgress:
    """A milestone that the commit of `step` reached `seconds` after the call; `state_bytes` is the
    state's size."""

    milestone: Milestone
    step: int | None
    seconds: float
    state_bytes: int


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How ranks commit and restore together (docs/distributed.md).

    Every rank calls `commit`, `restore` and `resume`, and passes equal values: they make one commit
    together, and store what they have in common once. So there is no `if rank == 0:` as around
    `torch.save`; under one, that rank waits for the others, and warns after seconds. A rank that
    shall commit its own state without the others passes `Ranks(process_group="alone")`.

    Args:
        process_group: The ranks that take part; default: all. `"alone"`: this process only.
        timeout_s: The longest wait for another rank.
        replicated: Globs of paths that are equal on all ranks. One rank writes each.
        private: Globs of paths that every rank keeps for itself.
        compare: Compare leaves that no glob names, and write equal ones once. False: each of them
            belongs to its rank.
        canonical: Cut chunks as one process would, so that equal states deduplicate across
            layouts. False: each rank cuts what it holds, and sends nothing to other ranks.
        trust_replicated: Believe DistributedDataParallel and `replicated`. False: hash on every
            rank, and refuse replicas that differ.
        private_from: In a restore, the rank whose private leaves a rank takes, by rank; default:
            its own.
        broadcast: In a restore, read shared chunks once and send them; default: for remote stores.

    Raises:
        InvalidInput: `replicated` or `private` is no list of globs.

    Example:
        >>> store.commit(app_state, step=100, ranks=Ranks(private=["loader/*"]))
    """

    process_group: Any = None
    timeout_s: float = TIMEOUT_S
    replicated: Sequence[str] = ()
    private: Sequence[str] = ()
    compare: bool = True
    canonical: bool = True
    trust_replicated: bool = True
    private_from: Mapping[int, int] | None = None
    broadcast: bool | None = None

    def __post_init__(self) -> None:
        for name in ("replicated", "private"):
            globs = getattr(self, name)
            if (
                isinstance(globs, str)
                or not isinstance(globs, Sequence)
                or not all(isinstance(glob, str) for glob in globs)
            ):  # of text, each character would be a glob, and a `*` among them means all
                raise InvalidInput(
                    f"{name} is {globs!r:.80}; wanted a list of globs: {name}=['model/*']"
                )


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Async:
    """How asynchronous commits run (docs/async.md). `open` takes the defaults of a store;
    `commit_async` takes others for one commit.

    Args:
        overlap: While too many commits are in flight or staging memory is taken, `"wait"` blocks;
            `"skip"` returns a commit whose `wait` raises `Busy`.
        staging: `"lazy"` copies parameters and optimizer state during forward and backward; call
            `pending.wait_staged()` before writing to them outside of an optimizer.
        trust_version: Skip frozen parameters that torch has not seen written.
        on_progress: Called at each milestone, on any thread.
        on_error: `"raise"`: the next call raises what a commit failed with. `"warn"`: training goes
            on where storage failed; the next commit takes its place, and a warning says so once
            (docs/failed-saves.md).
        max_unsaved_steps: With `"warn"`, the next commit raises `Unavailable` once commits fail and
            so many steps (commits, where they have no step) are not durable; default: no limit.
        retry_s: With `"warn"`, for how long a commit that failed is tried again, unless a newer one
            comes.
        max_wait_s: With `"warn"`, for how long after its start an earlier commit may hold up a
            later one, which is then skipped; more than a commit takes.
        executor: Only in `open`. `"process"` commits in a worker process, which shares no
            interpreter lock with training and finishes its commit when the trainer dies.
        max_in_flight: Only in `open`. Commits under way at once; 1.
        staging_bytes: Only in `open`. Memory for copies; else `$CKPTSTORE_STAGING_BYTES`, else half
            of what is available at the first `commit_async`.

    Raises:
        InvalidInput: A value is not one of these.

    Example:
        >>> store = ckptstore.open("checkpoints", background=Async(executor="process"))
    """

    overlap: Overlap = "wait"
    staging: Staging = "eager"
    trust_version: bool = False
    on_progress: Callable[[CommitProgress], object] | None = None
    on_error: OnError = "raise"
    max_unsaved_steps: int | None = None
    retry_s: float = 60.0
    max_wait_s: float = 120.0
    executor: Executor | None = None
    max_in_flight: int | None = None
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.overlap not in ("wait", "skip"):
            raise InvalidInput(f"overlap is {self.overlap!r}; wanted 'wait' or 'skip'")
        if self.staging not in ("eager", "lazy"):
            raise InvalidInput(f"staging is {self.staging!r}; wanted 'eager' or 'lazy'")
        if self.on_error not in ("raise", "warn"):
            raise InvalidInput(f"on_error is {self.on_error!r}; wanted 'raise' or 'warn'")
        limit = self.max_unsaved_steps
        if limit is not None and (isinstance(limit, bool) or limit < 1):
            raise InvalidInput(f"max_unsaved_steps is {limit!r}; wanted a number from 1 on")
        if not (self.retry_s >= 0 and self.max_wait_s >= 0):
            raise InvalidInput(
                f"retry_s is {self.retry_s!r} and max_wait_s {self.max_wait_s!r}; wanted seconds"
            )

    @property
    def goes_on(self) -> bool:
        """Whether training goes on where storage fails."""
        return self.on_error == "warn"

    def check_for_one_commit(self) -> None:
        """Raise `InvalidInput` for a field that only `open` takes."""
        for name in ("executor", "max_in_flight", "staging_bytes"):
            if getattr(self, name) is not None:
                raise InvalidInput(
                    f"{name} holds for a store: give it to ckptstore.open(…, background=Async(…))"
                )


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where and how a store keeps its objects. None means the default.

    Args:
        options: Options for fsspec, such as credentials.
        index: `postgresql+psycopg://USER@HOST/DATABASE`, if a database has log and catalog; else
            `$CKPTSTORE_INDEX` (docs/shared-store.md).
        chunk_bytes: Size of chunks of a store that this call makes: a power of two, 1 MiB. Like
            `codec`, it must agree with that of a store that exists.
        codec: `"raw"` or `"zstd"`, of a store that this call makes.
        private: A store that this call makes gets modes 0700 and 0600, whatever the umask.
        on_full: On a full disk, `"raise"` raises `NoSpace`; `"gc"` collects forgotten commits and
            retries.
        direct_io: Write large packs past the page cache of a local disk: always, never, or by
            default for commits in the background.
        read_cache_bytes: Disk space of this host for data read from a bucket; else
            `$CKPTSTORE_READ_CACHE_BYTES`.
        patch_memory_bytes: Memory for chunks of the last commit, so that those that change in few
            elements are stored as what changed; else `$CKPTSTORE_PATCH_MEMORY_BYTES`, else a
            sixteenth of the memory that is free, and at most 4 GiB. With 0, all that changed is
            stored whole (docs/patches.md).

    Example:
        >>> store = ckptstore.open("s3://bucket/checkpoints", storage=Storage(codec="zstd"))
    """

    options: Mapping[str, Any] | None = None
    index: str | None = None
    chunk_bytes: int | None = None
    codec: str | None = None
    private: bool = False
    on_full: OnFull | None = None
    direct_io: bool | None = None
    read_cache_bytes: int | None = None
    patch_memory_bytes: int | None = None
