"""Which objects of an accelerator are its state, and what save hooks leave of models' weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckptstore.plugin.values import RNGState


@dataclass(frozen=True, slots=True)
class Hooked:
    """What save hooks have left of the models' weights.

    Attributes:
        weights: Those that are left, in order.
        origins: Of each, the number of the model that it is as it was; -1 if a hook changed it.
    """

    weights: list[dict[str, Any]]
    origins: list[int]


def call_save_hooks(accelerator: Accelerator, directory: Path) -> Hooked | None:
    """Let the hooks see and change the weights; None if they have no say in what is saved."""
    hooks = list(accelerator._save_model_state_pre_hook.values())
    if not hooks:
        return None
    sharded, models = is_sharded(accelerator), accelerator._models
    weights = (
        [] if sharded else [accelerator.get_state_dict(model, unwrap=False) for model in models]
    )
    given = [(each, dict(each)) for each in weights]
    for hook in hooks:
        hook(models, weights, str(directory))
    return None if sharded else Hooked(weights, [_origin(left, given) for left in weights])


def _origin(left: dict[str, Any], given: Sequence[tuple[Any, dict[str, Any]]]) -> int:
    """The number of the model whose weights `left` are, as they were given to hooks."""
    for number, (weights, before) in enumerate(given):
        same = left is weights and left.keys() == before.keys()
        if same and all(left[name] is tensor for name, tensor in before.items()):
            return number
    return -1


def state_to_save(
    accelerator: Accelerator, directory: str, hooked: Hooked | None, origins: Sequence[int] | None
) -> dict[str, Any]:
    """The application state after the hooks.

    As with Accelerate, the first process decides: `directory` and `origins` are its own, and so are
    weights that a hook has changed. Hooks often act on that process only.
    """
    models, edited = list(accelerator._models), []
    if origins is not None:
        models = [accelerator._models[number] if number >= 0 else None for number in origins]
        edited = [place for place, number in enumerate(origins) if number < 0]
    state = live_state(accelerator, models)
    if hooked is not None and accelerator.is_main_process:
        state |= {key_of("model", place): hooked.weights[place] for place in edited}
    made = {
        "directory": directory,
        "edited": edited,
        "custom_objects": len(accelerator._custom_objects),
    }
    return {**state, "accelerate": made}


def is_sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def live_state(accelerator: Accelerator, models: Sequence[Any]) -> dict[str, Any]:
    """What is committed and restored, by name: the live objects of the accelerator. A model that
    is None is left out."""
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
    return {
        key_of(name, place): each
        for name, found in groups
        for place, each in enumerate(found)
        if each is not None
    }


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


def loaders_with_lost_order(accelerator: Accelerator) -> list[int]:
    """The numbers of prepared loaders that are within an epoch, in an order that nothing can draw
    again: that of a random sampler which has no seed of its own for each epoch, and no state."""
    under_way = accelerator.gradient_state.dataloader_references
    return [
        number
        for number, loader in enumerate(accelerator._dataloaders)
        if any(each is loader for each in under_way) and draws_anew(loader.get_sampler())
    ]


def draws_anew(sampler: Any) -> bool:
    """Whether the order of a sampler comes from a generator that has moved on since."""
    is_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    is_repeatable = isinstance(sampler, SeedableRandomSampler) or hasattr(sampler, "state_dict")
    return is_random and not is_repeatable


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
