"""How does a manager of torchtitan's checkpoints keep them in a store? What the managers for all
versions of torchtitan share.

A commit has the keys of torchtitan's states: `model` and `optimizer` by the names of parameters,
`dataloader`, `lr_scheduler`, `train_state`, and `random`. What a rank restores is what its own
state has, so the number of ranks and of pipeline stages may change.
"""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptstore import Async, Ranks, Store, open_pointer, write_pointer
from ckptstore import open as open_store
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.interop.torchtitan.contract import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TORCH_DTYPE_MAP,
    BaseCheckpointManager,
    ModelWrapper,
)
from ckptstore.interop.torchtitan.files import (
    is_dcp,
    load_dcp,
    load_hf,
    step_directories,
    write_hf,
)
from ckptstore.plugin import stores
from ckptstore.plugin.leaves import segment
from ckptstore.plugin.model import Best, parse_ref
from ckptstore.plugin.pointers import is_pointer, read_pointer
from ckptstore.plugin.policies import KeepBest, KeepLast, Policy
from ckptstore.plugin.ranks import collective_of, leads_all
from ckptstore.plugin.snapshots import Snapshot, contents_of
from ckptstore.plugin.stores import outcome
from ckptstore.plugin.values import RNGState, StateDict, children_of, no_classes

if TYPE_CHECKING:
    from ckptstore.plugin.snapshots import PendingCommit

logger = logging.getLogger("ckptstore")

TRAIN_STATE = "train_state"
RANDOM = "random"
BY_NAME = (MODEL, OPTIMIZER, DATALOADER)
"""States whose names differ from rank to rank: pipeline stages have other parameters, and the
data loader of each data-parallel rank has a name of its own."""

AS_DICTS = (*BY_NAME, LR_SCHEDULER)
"""States that are committed as the dicts that they give: their objects are iterated over as data
loaders and stepped as optimizers are, which a commit would take them for."""


class NoCheckpoint(NotFound, FileNotFoundError):
    """The step that `load` was asked for is not there. torchtitan raises `FileNotFoundError`."""

    __str__ = Exception.__str__


# torchtitan has no types for mypy
class StoreManager(BaseCheckpointManager):  # type: ignore[misc]
    """What the managers for all versions of torchtitan share."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """`disabled` returns when the commit is durable. The others copy the state, through pinned
        memory where it is on a GPU, and commit the copy in the background."""

        store: str = ""
        """Directory or URL of a store that trainings share; default: `store` in the folder."""

        run: str = "main"
        """The run whose commits this training makes. Trainings that share a store need different
        ones."""

        keep_best: str = ""
        """A metric, such as `loss_metrics/global_avg_loss` or `accuracy:max`, whose best commit
        stays beside the latest ones."""

        on_error: Literal["raise", "warn"] = "raise"
        """`warn`: training goes on where storage fails, as `Async(on_error="warn")` says."""

        max_unsaved_steps: int = 0
        """With `warn`, the steps that may be without a durable commit; 0: any number."""

        def __post_init__(self) -> None:
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise ValueError(f"Invalid async_mode: {self.async_mode}")
            keep = self.keep_latest_k  # type: ignore[has-type]  # a field of the base
            # The base refuses 1, as its newest checkpoint may be half written. A commit is not.
            self.keep_latest_k = 2 if keep == 1 else keep  # type: ignore[misc]
            BaseCheckpointManager.Config.__post_init__(self)
            self.keep_latest_k = keep  # type: ignore[misc]

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = getattr(config, "enable", True)
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("last_save_in_hf needs a model that has an sd_adapter; it has none")
        self.config, self.sd_adapter, self.load_only = config, sd_adapter, config.load_only
        self.folder = os.path.join(base_folder, config.folder)
        self.states = states
        self.states |= {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        self.states.setdefault(RANDOM, RNGState())
        exempt = getattr(config, "purge_exempt", None)
        self.purge_exempt = exempt.build() if exempt else None
        self.save_future: Future[None] | None = None
        self._pending: PendingCommit | None = None
        self._metrics: tuple[int, dict[str, float]] = (-1, {})
        self._thread = ThreadPoolExecutor(1, "ckptstore-torchtitan")
        place = config.store or os.path.join(self.folder, "store")
        limit = config.max_unsaved_steps or None
        background = Async(on_error=config.on_error, max_unsaved_steps=limit)
        self.store: Store = open_store(place, run=config.run, background=background)

    def record(self, step: int, **metrics: float) -> None:
        """Numbers that the commit of `step` shall have, besides those that torchtitan logs. To be
        called before the step is saved, on every rank."""
        known = self._metrics[1] if self._metrics[0] == step else {}
        self._metrics = step, known | metrics

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        due = first or last_step or curr_step % self.config.interval == 0
        if self.load_only or not due:
            return False
        if self.config.on_error == "raise" or self.save_future is None or self.save_future.done():
            self.maybe_wait_for_saving()
        # Else `commit_async` waits, as long as `max_wait_s`, and all ranks skip it or none.
        if last_step and self.config.last_save_model_only:
            self._save_model(curr_step)
            return True
        state = {
            key: StateDict(value.state_dict()) if key in AS_DICTS else value
            for key, value in self.states.items()
            if value is not None
        }
        at, metrics = self._metrics
        label: dict[str, Any] = {"step": curr_step, "metrics": metrics if at == curr_step else {}}
        if last_step or self.config.async_mode == "disabled":
            self._made(self._commit(state, label, last_step=last_step), purge=not last_step)
        else:
            self._pending = pending = self.store.commit_async(state, **label)
            self.save_future = self._thread.submit(
                lambda: self._made(outcome(self.store, pending, bounded=False), purge=True)
            )
        return True

    def _commit(
        self, state: dict[str, Any], label: dict[str, Any], *, last_step: bool
    ) -> Snapshot | None:
        """Commit now; None if training goes on without it. The last step has to be durable."""
        if self.config.on_error == "raise":
            return self.store.commit(state, **label)
        pending = self.store.commit_async(state, **label)
        return pending.wait() if last_step else outcome(self.store, pending)

    def _save_model(self, step: int) -> None:
        """Commit the weights alone, in the export dtype, and export them if asked for."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {
            name: value.to(dtype) if torch.is_floating_point(value) else value
            for name, value in self.states[MODEL].state_dict().items()
        }
        snapshot = self.store.commit({MODEL: StateDict(weights)}, step=step)
        self._made(snapshot, purge=False)
        if self.config.last_save_in_hf:
            write_hf(self.sd_adapter, weights, self._directory(step))

    def _directory(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _made(self, snapshot: Snapshot | None, *, purge: bool) -> None:
        """The commit is durable: leave a directory that points to it, and forget older ones."""
        if snapshot is None or not leads_all():
            return
        if "://" not in self.folder and snapshot.step is not None:
            pointer = os.path.join(self._directory(snapshot.step), ".metadata")
            self._beside(lambda: write_pointer(pointer, self.store, snapshot.id))
        if purge and self.config.keep_latest_k:
            self._beside(self._purge)

    def _beside(self, act: Callable[[], object]) -> None:
        """Do what no training should end for."""
        try:
            act()
        except (CkptStoreError, OSError) as error:
            logger.warning("the commits in %s are durable, but %s", self.store.url, error)

    def _purge(self) -> None:
        policies: list[Policy] = [KeepLast(self.config.keep_latest_k)]
        if self.config.keep_best:
            policies.append(_keep_best(self.config.keep_best))
        gone = {
            decision.commit
            for decision in self.store.forget(policies, dry_run=True).forgotten
            if not (self.purge_exempt and self.purge_exempt(decision.row.step))
        }
        if not gone:
            return
        self.store.forget(sorted(gone))
        for directory in step_directories(self.folder).values():
            if is_pointer(directory) and read_pointer(directory).id in gone:
                rmtree(directory)
        if not self.config.store:
            self.store.gc(grace_s=0)  # disks are sized for keep_latest_k checkpoints

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        self._listen()
        if step != -1:
            self._load_step(step)
            return True
        if self._resume():
            return True
        if native := [each for each in step_directories(self.folder).items() if is_dcp(each[1])]:
            at, directory = max(native)
            logger.info("the store has no commit; loading %s, which DCP wrote", directory)
            self._load_dcp(directory, model_only=at == 0)
            return True
        return self._load_initial()

    def _load_step(self, step: int) -> None:
        try:
            snapshot = self.store.checkout(step)
        except NotFound as error:
            directory = self._directory(step)
            if is_dcp(directory):
                self._load_dcp(directory, model_only=step == 0)
                return
            raise NoCheckpoint(
                f"--checkpoint.load_step={step} is not found, neither in the store nor as "
                f"{directory}: {error}"
            ) from error
        self._restore(snapshot, model_only=is_model_only(snapshot))

    def _resume(self) -> bool:
        """Restore the newest commit that is intact. Commits of weights alone are what a training
        ends with; only a seed is gone on from."""
        peers = collective_of()
        damaged: list[str] = []
        passed: list[int | None] = []
        for commit in stores.candidates(self.store, peers):
            try:
                snapshot = peers.on_all(commit.snapshot) if peers else commit.snapshot()
                model_only = is_model_only(snapshot)
                if model_only and commit.step != 0:
                    passed.append(commit.step)
                    continue
                self._restore(snapshot, model_only=model_only)
            except (Corrupt, NotFound) as error:
                damaged.append(str(error))
                logger.warning(
                    "skipped commit %s (step %s): %s", commit.id[:12], commit.step, error
                )
                continue
            logger.info("resumed commit %s (step %s)", commit.id[:12], commit.step)
            return True
        if damaged:
            raise Corrupt(
                f"none of the commits of run {self.config.run} in {self.store.url} can be "
                f"restored; the newest: {damaged[0]}"
            )
        if passed:
            logger.warning(
                "the commits of run %s have weights alone (step %s): no training can go on from "
                "them; initial_load_path=%s begins another one with these weights",
                self.config.run,
                passed[0],
                self._directory(passed[0] or 0),
            )
        return False

    def _load_initial(self) -> bool:
        config = self.config
        in_hf, model_only = config.initial_load_in_hf, config.initial_load_model_only
        place = config.initial_load_path or (
            in_hf and getattr(self.sd_adapter, "hf_assets_path", "")
        )
        if not place:
            logger.info("no checkpoint was provided, this is a fresh start")
            return False
        if "://" not in place and not os.path.isdir(place):
            raise ValueError(f"initial_load_path {place} is not a directory")
        if in_hf:
            load_hf(self.sd_adapter, self.states[MODEL], place, config.initial_load_in_hf_quantized)
        elif is_pointer(place):
            with open_pointer(place) as snapshot:
                self._restore(snapshot, model_only=model_only or is_model_only(snapshot))
        else:
            self._load_dcp(place, model_only=model_only)
        return True

    def _wanted(self, model_only: bool) -> dict[str, Any]:
        if model_only:
            return {MODEL: self.states[MODEL]}
        for key in self.config.exclude_from_loading:
            if key not in self.states:
                raise ValueError(f"exclude_from_loading names {key}, which is none of the states")
        return {
            key: value
            for key, value in self.states.items()
            if key not in self.config.exclude_from_loading and value is not None
        }

    def _restore(self, snapshot: Snapshot, *, model_only: bool) -> None:
        """Restore what this rank has from what the commit has of it."""
        wanted = self._wanted(model_only)
        state = {
            key: StateDict(value.state_dict()) if key in AS_DICTS else value
            for key, value in wanted.items()
        }
        peers = collective_of()
        check = partial(_check_fits, snapshot, state)
        if peers:
            peers.on_all(check)
        else:
            check()
        names = {f"{key}/{segment(name)}" for key in BY_NAME for name in state.get(key, ())}

        def is_here(path: str) -> bool:
            return path.partition("/")[0] not in BY_NAME or "/".join(path.split("/")[:2]) in names

        world = snapshot.layout.world if snapshot.layout else 1
        new = range(world, peers.size if peers else 1)
        if new and TRAIN_STATE in state:
            # A new rank has no count of tokens of its own yet; it begins with the first rank's.
            ranks = Ranks(private_from=dict.fromkeys(new, 0))
            snapshot.restore({TRAIN_STATE: state.pop(TRAIN_STATE)}, ranks=ranks)
        snapshot.restore(state, select=is_here)
        for key in AS_DICTS:  # the schedulers last: they look at the optimizers
            if key in wanted:
                wanted[key].load_state_dict(dict(state[key]))

    def _load_dcp(self, directory: str, *, model_only: bool) -> None:
        wanted = self._wanted(model_only)
        wanted.pop(RANDOM, None)
        load_dcp(wanted.pop(MODEL), wanted, directory)

    def _listen(self) -> None:
        """Take the metrics that the trainer logs, from now on. Of pipeline stages only the last one
        knows the loss; others would tell a wrong one."""
        trainer = self.states.get(TRAIN_STATE)
        processor = getattr(trainer, "metrics_processor", None)
        if processor is None or not getattr(trainer, "pp_has_last_stage", True):
            return
        if not isinstance(processor.logger, _Listener):
            processor.logger = _Listener(processor.logger, self)

    def _maybe_wait_for_staging(self) -> None:
        if self._pending:
            self._pending.wait_staged()
            self._pending = None

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None
        if saving:
            saving.result()

    def _close(self) -> None:
        try:
            self._wait_for_saving()
        finally:
            self._thread.shutdown()
            self.store.close()


class _Listener:
    """A logger of torchtitan's metrics that also remembers them for the commit of their step."""

    def __init__(self, behind: Any, manager: StoreManager) -> None:
        self._behind, self._manager = behind, manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        wanted = {
            name: float(value)
            for name, value in metrics.items()
            if name.startswith("loss_metrics/") or name in ("grad_norm", "lr")
        }
        self._manager.record(step, **wanted)
        self._behind.log(metrics, step)


def _keep_best(metric: str) -> KeepBest:
    best = parse_ref(f"best:{metric}")
    assert isinstance(best, Best)
    return KeepBest(best.metric, maximize=best.order == "max")


def is_model_only(snapshot: Snapshot) -> bool:
    return snapshot.keys() == [MODEL]


def _names(snapshot: Snapshot, key: str) -> set[Any]:
    skeleton = contents_of(snapshot).tree(key).schema.skeleton
    return set() if isinstance(skeleton, int) else set(children_of(skeleton, no_classes))


def _check_fits(snapshot: Snapshot, state: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for what this rank has and the commit lacks; nothing was changed."""
    committed = snapshot.keys()
    if lacking := [key for key in state if key not in committed]:
        raise InvalidInput(
            f"commit {snapshot.id[:12]} has {', '.join(committed)}, and no "
            f"{', '.join(lacking)}: exclude_from_loading={lacking} begins them anew"
        )
    for key in BY_NAME:
        names = _names(snapshot, key) if key in state else set()
        lacking = [name for name in state.get(key, ()) if name not in names]
        loader = key == DATALOADER and "world_size" in state.get(key, ()) and "world_size" in names
        then = snapshot.read(f"{DATALOADER}/world_size") if loader else None
        if loader and (lacking or then != state[key]["world_size"]):
            raise InvalidInput(
                f"the data loader of commit {snapshot.id[:12]} is one of {then} data-parallel "
                f"ranks, and there are {state[key]['world_size']} now: places in the data would be "
                "lost or visited twice; exclude_from_loading=['dataloader'] begins the data anew"
            )
        if lacking:
            raise InvalidInput(
                f"commit {snapshot.id[:12]} lacks {len(lacking)} of {len(state[key])} names of "
                f"{key}, {lacking[0]!r} first: it is of another model or optimizer"
            )
