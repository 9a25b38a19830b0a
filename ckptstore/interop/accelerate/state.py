"""Which objects of an accelerator are its state, and what save hooks leave of models' weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType

from ckptstore.state.stateful import RNGState


def state_to_save(accelerator: Accelerator, directory: Path) -> dict[str, Any]:
    """The application state, after the hooks have seen and changed the weights."""
    models, edited = list(accelerator._models), []
    if hooks := list(accelerator._save_model_state_pre_hook.values()):
        sharded = is_sharded(accelerator)
        weights = (
            [] if sharded else [accelerator.get_state_dict(model, unwrap=False) for model in models]
        )
        given = [(each, dict(each), model) for each, model in zip(weights, models, strict=False)]
        for hook in hooks:
            hook(accelerator._models, weights, str(directory))
        if not sharded:
            models = [_as_given(left, given) for left in weights]
            edited = [place for place, model in enumerate(models) if isinstance(model, dict)]
    made = {
        "directory": str(directory),
        "edited": edited,
        "custom_objects": len(accelerator._custom_objects),
    }
    return {**live_state(accelerator, models), "accelerate": made}


def _as_given(left: dict[str, Any], given: Iterable[tuple[Any, dict[str, Any], Any]]) -> Any:
    """The model whose weights a hook has left as they were, else the weights."""
    for weights, before, model in given:
        same = left is weights and left.keys() == before.keys()
        if same and all(left[name] is tensor for name, tensor in before.items()):
            return model
    return left


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def live_state(accelerator: Accelerator, models: Sequence[Any]) -> dict[str, Any]:
    """What is committed and restored, by name: the live objects of the accelerator."""
    optimizers = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    loaders = [_loader_state(each) for each in accelerator._dataloaders]
    groups: tuple[tuple[str, Sequence[Any]], ...] = (
        ("model", models),
        ("optimizer", optimizers),
        ("scheduler", accelerator._schedulers),
        ("dataloader", loaders),
        ("custom", accelerator._custom_objects),
        ("scaler", () if accelerator.scaler is None else (accelerator.scaler,)),
        ("step", (_Step(accelerator),)),
        ("random", (RNGState(),)),
    )
    return {key_of(name, place): each for name, found in groups for place, each in enumerate(found)}


def key_of(name: str, place: int) -> str:
    return f"{name}_{place}" if place else name


class _Step:
    """The accelerator's count of batches, for the accumulation of gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


class _Epoch:
    """The epoch of a prepared loader, and what its sampler shuffles with.

    A generator within an epoch has drawn its order already, which it cannot draw again. It is left
    out there: a script that skips batches begins that epoch as Accelerate itself does.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        sampler = loader.get_sampler()
        self._sampler = sampler if isinstance(sampler, SeedableRandomSampler) else None
        self._generator = getattr(loader, "synchronized_generator", None)

    def state_dict(self) -> dict[str, Any]:
        state = {"iteration": self._loader.iteration}
        if self._sampler is not None:
            state["initial_seed"] = self._sampler.initial_seed
        under_way = self._loader.gradient_state.dataloader_references
        if self._generator is not None and all(each is not self._loader for each in under_way):
            state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.iteration = state["iteration"]
        if self._sampler is not None and "initial_seed" in state:
            self._sampler.initial_seed = state["initial_seed"]
        if self._generator is not None and "generator" in state:
            self._generator.set_state(state["generator"])


def _loader_state(loader: Any) -> dict[str, Any]:
    """The epoch of a prepared loader and, of a stateful one, its place in the data, which is the
    rank's own."""
    state: dict[str, Any] = {"epoch": _Epoch(loader)}
    if getattr(loader, "use_stateful_dataloader", False):
        state["position"] = loader
    return state
