"""How do the checkpoints of Hugging Face's Trainer become commits? Its directories are adopted
after each save, and filled again before it loads them (docs/transformers.md).

`attach` wraps methods of one trainer, not its class, so it serves every subclass: TRL's trainers
and those that train PEFT adapters.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckptstore import Store
from ckptstore import open as open_store
from ckptstore.errors import CkptStoreError, InvalidInput, NotFound
from ckptstore.interop.directories import CheckpointDirectories, logger
from ckptstore.interop.oldest import check_version
from ckptstore.plugin.model import Skipped
from ckptstore.plugin.pointers import HOLLOW_POINTER, is_pointer
from ckptstore.plugin.policies import KeepBest, Policy
from ckptstore.plugin.ranks import Collective, collective_of
from ckptstore.plugin.snapshots import Snapshot

try:
    import transformers
    from transformers.trainer_pt_utils import LengthGroupedSampler

    from ckptstore.interop.accelerate.state import draws_anew
except ImportError as error:
    raise ImportError(
        f'attach needs transformers: pip install "ckptstore[transformers]" ({error})'
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer

OLDEST = (5, 3)
"""The oldest release that the tests run with."""

STATE = "trainer_state.json"
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""The Trainer's mark in a checkpoint that it writes after SIGTERM; it is removed after the save."""

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_UNLABELLED = re.compile(r"[^A-Za-z0-9_.+-]")
_WRAPPED = ("train", "_save_checkpoint", "_load_best_model", "_finalize_training")
_TIMES = ("_runtime", "_per_second")
"""Endings of what the Trainer logs about its own speed."""


def attach(
    trainer: "Trainer",
    store: str | os.PathLike[str] | Store,
    *,
    run: str | None = None,
    whole: int | None = 1,
    background: bool = True,
    keep: Policy | Sequence[Policy] = (),
    release: bool = False,
) -> "Attached":
    """Commit every checkpoint of `trainer` to `store`, and resume from there.

    Each save is adopted as a commit with its step, and with what was logged at that step as
    metrics. Older directories become hollow. `trainer.train(resume_from_checkpoint=True)` goes on
    from the newest commit that verifies; it takes a ref, too. Every rank calls this.

    Args:
        trainer: A Trainer, or a subclass of it.
        store: A directory or URL, or an open store.
        run: The run of the commits; default: the last part of `output_dir`.
        whole: How many of the newest directories keep all their files; None: all of them.
        background: Let training go on while a save is adopted; the next save waits for it. False:
            the commit is durable when the save returns.
        keep: Policies. Commits that no policy keeps are forgotten after a save, and collected;
            those whose directory exists stay, and the best by `metric_for_best_model`. So do those
            of hollow directories that were deleted, since copies of them need the commits, unless
            `release` is True, or `store.release` is called.
        release: True says that hollow directories are not copied or moved out of `output_dir`: the
            commit of one that was deleted is kept by policies alone.

    Returns:
        The attachment. Use it as a context manager, or call `close` to detach.

    Raises:
        InvalidInput: The trainer has a store already, or cannot have one.

    Example:
        >>> attached = attach(trainer, "checkpoints")
        >>> trainer.train(resume_from_checkpoint=attached.can_resume)
    """
    _check(trainer, store, run)
    peers = collective_of(timeout_s=float(trainer.args.ddp_timeout))
    policies = [keep] if isinstance(keep, Policy) else list(keep)
    metric = trainer.args.metric_for_best_model
    if policies and metric:
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        policies.append(KeepBest(name, maximize=bool(trainer.args.greater_is_better)))

    opened: list[CheckpointDirectories] = []

    def open_on_first() -> None:
        if peers is None or peers.leads:
            label = run or _UNLABELLED.sub("_", Path(trainer.args.output_dir).resolve().name)
            own = store if isinstance(store, Store) else open_store(store, run=label)
            opened.append(CheckpointDirectories(own, whole=whole, keep=policies, release=release))

    if peers is None:
        open_on_first()
    else:
        peers.share("attach", open_on_first)
    owns = not isinstance(store, Store)
    return Attached(trainer, next(iter(opened), None), peers, background=background, owns=owns)


def _check(trainer: "Trainer", store: object, run: str | None) -> None:
    check_version("transformers", transformers.__version__, OLDEST, "transformers")
    if lacking := [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]:
        raise InvalidInput(
            f"{type(trainer).__name__} of transformers {transformers.__version__} has no "
            f"{', '.join(lacking)}; wanted a Trainer: install a version that ckptstore supports"
        )
    if any(name in vars(trainer) for name in _WRAPPED):
        raise InvalidInput("this trainer has a store already; close that attachment first")
    if trainer.args.save_on_each_node:
        raise InvalidInput(
            "save_on_each_node gives each node a directory of its own; wanted an output_dir that "
            "all nodes share: leave save_on_each_node out"
        )
    if run is not None and isinstance(store, Store) and store.run != run:
        raise InvalidInput(f"the store is open for run {store.run}, wanted {run}: leave run out")


class Attached:
    """A trainer whose checkpoints are commits. Only the first rank has a `store`."""

    def __init__(
        self,
        trainer: "Trainer",
        directories: CheckpointDirectories | None,
        peers: Collective | None,
        *,
        background: bool,
        owns: bool,
    ) -> None:
        self._trainer, self._directories, self._peers = trainer, directories, peers
        self._background, self._owns, self._warned = background, owns, False
        wrappers: tuple[Callable[..., Any], ...] = (
            self._train,
            self._save,
            self._load_best,
            self._finalize,
        )
        for name, wrapper in zip(_WRAPPED, wrappers, strict=True):
            method = getattr(trainer, name)
            setattr(trainer, name, functools.wraps(method)(functools.partial(wrapper, method)))
        self.can_resume = bool(self._on_first("look", self._look))
        """Whether there was a checkpoint to resume from, in the store or in `output_dir`."""

    @property
    def store(self) -> Store | None:
        """The store; None on other ranks than the first."""
        return self._directories.store if self._directories else None

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The damaged commits that the last resume passed over."""
        return self._directories.skipped if self._directories else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until the last save is durable. Raises its error, on every rank; every rank calls
        this."""
        self._on_first("wait", CheckpointDirectories.settle)

    def close(self) -> None:
        """Wait for the last save, close the store unless the caller opened it, and give the trainer
        its own methods back."""
        for name in _WRAPPED:
            vars(self._trainer).pop(name, None)
        if directories := self._directories:
            self._directories = None
            try:
                directories.close()
            finally:
                if self._owns:
                    directories.store.close()

    def _on_first(self, what: str, act: Callable[[CheckpointDirectories], object]) -> str:
        """The text that `act` returns on the first rank, on every rank; so is its error."""

        def mine() -> str:
            found = act(self._directories) if self._directories else None
            return found if isinstance(found, str) else ""

        if self._peers is None:
            return mine()
        return str(self._peers.share(what, mine, lambda found: found[0]))

    def _look(self, directories: CheckpointDirectories) -> str:
        store = directories.store
        return "yes" if store.log(1, run=store.run) or _directories(self._folder()) else ""

    def _save(self, save: Callable[..., object], model: Any, trial: Any) -> None:
        trainer = self._trainer
        place = self._folder(trial) / f"checkpoint-{trainer.state.global_step}"

        def before(directories: CheckpointDirectories) -> None:
            directories.forget(place)

        def after(directories: CheckpointDirectories) -> None:
            (place / INCOMPLETE).unlink(missing_ok=True)
            step, metrics = trainer.state.global_step, self._metrics()
            directories.start(place, step=step, metrics=metrics, busy=self._pushing)
            if not self._background:
                directories.finish()

        self._warn_of_order()
        self._on_first("before save", before)
        save(model, trial)  # where a rank fails, others may wait in a barrier of the Trainer's
        self._on_first("saved", lambda _: None)
        self._on_first("after save", after)

    def _warn_of_order(self) -> None:
        """Warn once of a save within an epoch that a resume would not go on with."""
        args, accelerator = self._trainer.args, self._trainer.accelerator
        loaders = accelerator.gradient_state.dataloader_references
        under_way = [each for each in loaders if each is not None]
        if self._warned or self._directories is None or not under_way:
            return
        if args.ignore_data_skip:
            why = "ignore_data_skip=True begins the epoch anew: leave it out"
        elif any(map(_has_lost_order, under_way)):
            why = (
                "the shuffled order cannot be drawn again: leave use_seedable_sampler of "
                "accelerator_config at True, and train_sampling_strategy at 'random'"
            )
        else:
            return
        self._warned = True
        logger.warning(
            "this checkpoint is within an epoch; resumed there, some samples come twice and others "
            "never, since %s, or save at the ends of epochs",
            why,
        )

    def _folder(self, trial: Any = None) -> Path:
        return Path(self._trainer._get_output_dir(trial=trial))

    def _metrics(self) -> dict[str, float]:
        """What was logged at this step, without the Trainer's times."""
        state = self._trainer.state
        logged: dict[str, float] = {}
        for entry in state.log_history:
            if entry.get("step") == state.global_step:
                logged |= entry
        return {
            name: value
            for name, value in logged.items()
            if isinstance(value, int | float) and name != "step" and not name.endswith(_TIMES)
        }

    def _pushing(self) -> bool:
        """Whether directories are being uploaded to the Hub."""
        push = getattr(self._trainer, "push_in_progress", None)
        return push is not None and not push.is_done()

    def _finalize(self, finalize: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.wait()  # the Trainer deletes directories at its end, maybe the one that is read
        return finalize(*args, **options)

    def _load_best(self, load: Callable[[], object]) -> None:
        best = Path(self._trainer.state.best_model_checkpoint or "")

        def fill(directories: CheckpointDirectories) -> None:
            if snapshot := directories.held(best):
                directories.fill(best, snapshot)

        self._on_first("best model", fill)
        load()

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: str | os.PathLike[str] | int | bool | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        place = resume_from_checkpoint
        if place is not None and place is not False:
            place = self._on_first("resume", lambda own: self._resume(own, place)) or None
        try:
            return train(place, *args, **options)
        finally:
            if self._directories:
                self._directories.drain()

    def _resume(self, directories: CheckpointDirectories, wanted: Any) -> str:
        """The directory to resume from, filled if it has a commit; empty to begin anew."""
        directories.settle()
        newest = next(iter(_directories(self._folder())), None)
        if wanted is True or (newest and _is_directory(wanted) and newest.samefile(wanted)):
            if (found := directories.newest(self._place_of, required=STATE)) is None:
                return self._without_commits()
            if newest and not newest.samefile(found) and not directories.is_saved(newest):
                logger.warning(
                    "%s has no commit, so its save did not finish; going on from %s", newest, found
                )
        elif _is_directory(wanted):
            found = Path(wanted)
            snapshot = directories.held(found) if is_pointer(found / HOLLOW_POINTER) else None
            if snapshot is None:
                return str(wanted)
            with snapshot:  # which another store may have
                directories.fill(found, snapshot)
        else:
            try:
                snapshot = directories.store.checkout(wanted)
            except (InvalidInput, NotFound):
                if isinstance(wanted, int) or os.sep not in str(wanted):
                    raise
                return str(wanted)  # a path: the Trainer says what is wrong with it
            directories.fill(found := self._place_of(snapshot), snapshot)
        self._fill_best(directories, found)
        return str(found)

    def _without_commits(self) -> str:
        """The newest whole directory of a training that had no store so far; empty if a kill left
        none of them whole.

        Raises `InvalidInput`, in the Trainer's words, if there are no directories: with a wrong
        path, a training would begin anew without a word.
        """
        places = _directories(self._folder())
        for place in places:
            if _state_in(place) is not None:
                logger.warning("%s has no commit: it is taken as it is, unverified", place)
                return str(place)
            logger.warning("%s is passed over: its save did not finish", place)
        if not places:
            raise InvalidInput(
                f"No valid checkpoint found in output directory ({self._folder()}), and no commit "
                f"of run {self.store.run if self.store else ''}; to begin anew, leave out "
                "resume_from_checkpoint, or pass `attached.can_resume`"
            )
        return ""

    def _place_of(self, snapshot: Snapshot) -> Path:
        """Where the files of a commit go: the directory that they came from, for a commit of this
        run."""
        own = self.store is not None and snapshot.run == self.store.run
        name = f"checkpoint-{snapshot.step}" if own else f"from-{snapshot.id[:12]}"
        return self._folder() / name

    def _fill_best(self, directories: CheckpointDirectories, place: Path) -> None:
        """Bring back the directory of the best model, if the state in `place` names one that is
        gone: the Trainer forgets such a model."""
        state = _state_in(place) or {}
        best, step = state.get("best_model_checkpoint"), state.get("best_global_step")
        if not best or not step or os.path.isdir(best):
            return
        if Path(best).resolve().parent != self._folder().resolve():
            logger.warning("the best model is not at %s any more", best)
            return
        try:
            directories.fill(Path(best), directories.store.checkout(int(step)))
        except CkptStoreError as error:
            logger.warning("the best model, of step %s, cannot be brought back: %s", step, error)


def _has_lost_order(loader: Any) -> bool:
    """Whether a loader of Accelerate shuffles in an order that a new process cannot draw again."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return draws_anew(sampler) or isinstance(sampler, LengthGroupedSampler)


def _is_directory(wanted: Any) -> bool:
    return isinstance(wanted, str | os.PathLike) and os.path.isdir(wanted)


def _directories(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the largest number first, as the Trainer looks for them."""
    if not folder.is_dir():
        return []
    numbered = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def _state_in(place: Path) -> dict[str, Any] | None:
    """The Trainer's state, which it writes last; None if the file is not there or not whole."""
    try:
        state = json.loads((place / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None
