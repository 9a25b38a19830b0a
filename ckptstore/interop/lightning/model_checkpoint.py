"""A `ModelCheckpoint` that keeps what the store's retention keeps."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.interop.lightning.checkpoint_io import StoreCheckpointIO
from ckptstore.interop.lightning.packages import trainers
from ckptstore.plugin.policies import KeepBest, Policy


class _KeepsByPolicy:
    """The part of `StoreModelCheckpoint` that is not Lightning's.

    `StoreModelCheckpoint(keep=[KeepLast(3), KeepBest("val_loss", n=2)], every_n_train_steps=100)`
    saves at each trigger, and forgets what no policy keeps after each save. All metrics that the
    trainer has then are on the commit, so any of them can be asked for: `best:val_loss`. The other
    arguments are those of `ModelCheckpoint`, but for `save_top_k`. With `monitor`, the best by it
    stays as well. `save_last=True` makes a link.

    Raises `InvalidInput` without `keep`, for `save_top_k`, and at the first save if the trainer has
    no `StoreCheckpointIO`.
    """

    monitor: str | None
    mode: str
    dirpath: Any
    best_k_models: dict[str, Any]

    def __init__(self, *args: Any, keep: Policy | Sequence[Policy], **kwargs: Any) -> None:
        if "save_top_k" in kwargs:
            raise InvalidInput(
                "save_top_k and keep= both say what stays; leave save_top_k out: "
                "keep=[KeepBest(METRIC, n=K)] is it"
            )
        policies = [keep] if isinstance(keep, Policy) else list(keep)
        if not policies or not all(isinstance(policy, Policy) for policy in policies):
            raise InvalidInput(f"keep is {keep!r:.80}; wanted policies: keep=[KeepLast(3)]")
        if kwargs.get("save_last"):
            kwargs["save_last"] = "link"
        super().__init__(*args, **{**kwargs, "save_top_k": -1})
        if self.monitor is not None:
            policies.append(KeepBest(self.monitor, maximize=kwargs.get("mode") == "max"))
        self._policies = policies

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        plugin = _plugin_of(trainer)
        if self.monitor is not None and self.best_k_models:
            # The newest of equals, as the store has it; Lightning takes the oldest.
            choose = max if self.mode == "max" else min
            scores = self.best_k_models
            self.best_model_path = choose(reversed(scores), key=lambda path: float(scores[path]))
            self.best_model_score = scores[self.best_model_path]
        with plugin.labels(metrics=dict(trainer.callback_metrics)):
            super()._save_checkpoint(trainer, filepath)  # type: ignore[misc]  # ModelCheckpoint's
        if trainer.is_global_zero:
            plugin.retain(self._policies, self.dirpath)

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        # Lightning's own link moves before an asynchronous save is durable.
        if trainer.is_global_zero:
            _plugin_of(trainer).link(filepath, linkpath)
        trainer.strategy.barrier()


def _plugin_of(trainer: Any) -> StoreCheckpointIO:
    plugin = trainer.strategy.checkpoint_io
    if not isinstance(plugin, StoreCheckpointIO):
        raise InvalidInput(
            "StoreModelCheckpoint needs the store's plugin: "
            'Trainer(plugins=[StoreCheckpointIO("checkpoints")])'
        )
    return plugin


@cache
def store_model_checkpoint() -> type:
    """`StoreModelCheckpoint`, of the trainer's package that is installed; of `lightning` if both
    are. Raises `ImportError` if none is."""
    found = trainers()
    if not found:
        raise ImportError('StoreModelCheckpoint needs the trainer: pip install "lightning"')
    base = import_module(f"{found[0]}.callbacks").ModelCheckpoint
    names = {"__module__": "ckptstore.interop.lightning", "__doc__": _KeepsByPolicy.__doc__}
    return type("StoreModelCheckpoint", (_KeepsByPolicy, base), names)
