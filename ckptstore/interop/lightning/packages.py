"""Which of Lightning's packages are installed, and how do they come to take our plugin and to read
our checkpoints?

`lightning` has Fabric and the trainer in it; `lightning_fabric` and `pytorch_lightning` are the
same code under names of their own, with classes of their own.
"""

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ckptstore.errors import InvalidInput
from ckptstore.interop.lightning.pointers import is_pointer_file, pointer_of, resolved
from ckptstore.plugin.snapshots import Snapshot
from ckptstore.plugin.stores import open_commit
from ckptstore.plugin.values import register_value, registered

logger = logging.getLogger("ckptstore")

OLDEST = (2, 6)
"""The oldest release that is tested."""

_FABRIC = {"lightning": "lightning.fabric", "lightning_fabric": "lightning_fabric"}
_TRAINER = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

_READERS = (
    (_TRAINER, "core.saving", "pl_load"),
    (_TRAINER, "strategies.fsdp", "_lazy_load"),
    (_FABRIC, "strategies.fsdp", "_lazy_load"),
)
"""Functions that read a checkpoint's file without the plugin."""


@cache
def fabrics() -> tuple[str, ...]:
    """The modules of Fabric that are installed. Raises `ImportError` if none is, or for a release
    that is older than the tested ones."""
    found = _installed(_FABRIC)
    if not found:
        raise ImportError('Lightning is not installed: pip install "ckptstore[lightning]"')
    for name in found:
        version = import_module(name.partition(".")[0]).__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ImportError(
                f"{name} is {version}; ckptstore's plugin is tested with "
                f"{'.'.join(map(str, OLDEST))} and newer: pip install -U lightning"
            )
    return found


def trainers() -> tuple[str, ...]:
    """The modules of the trainer that are installed."""
    return _installed(_TRAINER)


def torch_io() -> Any:
    """Lightning's own plugin, for files that are no checkpoints."""
    return import_module(f"{fabrics()[0]}.plugins.io.torch_io").TorchCheckpointIO()


def register(plugin: type) -> None:
    """Make `plugin` a `CheckpointIO` of every installed package, teach what reads checkpoints
    itself about pointers, and the registry of values about classes of hyperparameters."""
    for fabric in fabrics():
        import_module(f"{fabric}.plugins.io.checkpoint_io").CheckpointIO.register(plugin)
    for packages, module, name in _READERS:
        for package in _installed(packages):
            place = import_module(f"{package}.{module}")
            setattr(place, name, _reads_pointers(getattr(place, name)))
    if registered(Namespace) is None:
        register_value("argparse.Namespace", Namespace, vars, lambda found: Namespace(**found))
    if find_spec("omegaconf"):
        omegaconf = import_module("omegaconf")
        for cls in (omegaconf.DictConfig, omegaconf.ListConfig):
            _HPARAMS[f"{cls.__module__}.{cls.__qualname__}"] = cls
            if registered(cls) is None:
                to_plain = omegaconf.OmegaConf.to_container
                register_value(
                    f"omegaconf.{cls.__name__}", cls, to_plain, omegaconf.OmegaConf.create
                )


def _installed(packages: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for package, name in packages.items() if find_spec(package))


_HPARAMS: dict[str, type] = {"argparse.Namespace": Namespace}
"""Classes of hyperparameters that a checkpoint may name."""

_HPARAMS_TYPES = ("hparams_type", "datamodule_hparams_type")
"""Keys of a checkpoint whose value is a class."""


def storable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """`checkpoint` with the names of its classes of hyperparameters."""
    classes = {
        key: f"{cls.__module__}.{cls.__qualname__}"
        for key in _HPARAMS_TYPES
        if isinstance(cls := checkpoint.get(key), type)
    }
    return {**checkpoint, **classes}


def checkpoint_of(
    snapshot: Snapshot, map_location: Any = None, *, allow_pickle: bool = False
) -> dict[str, Any]:
    """The checkpoint that was saved as `snapshot`, in memory of the host or where `map_location`,
    as `torch.load` has it, says."""
    found: dict[str, Any] = snapshot.state_dict(allow_pickle=allow_pickle)
    for key in _HPARAMS_TYPES:
        if isinstance(name := found.get(key), str):
            if name not in _HPARAMS:
                raise InvalidInput(
                    f"the hyperparameters of commit {snapshot.id[:12]} are a {name}, which is not "
                    "installed or not known to ckptstore; give load_from_checkpoint hparams_file="
                )
            found[key] = _HPARAMS[name]
    device = _device(map_location)
    return found if device is None else _moved(found, device)


def _reads_pointers(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, which also takes a pointer file, or a snapshot."""
    if getattr(load, "__module__", "") == __name__:
        return load

    @wraps(load, assigned=("__name__", "__doc__"))
    def read(source: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        allow_pickle = weights_only is False
        if isinstance(source, Snapshot):
            return checkpoint_of(source, map_location, allow_pickle=allow_pickle)
        if isinstance(source, str | os.PathLike) and is_pointer_file(source):
            place = resolved(source)
            with open_commit(pointer_of(place), place) as snapshot:
                return checkpoint_of(snapshot, map_location, allow_pickle=allow_pickle)
        given = {"map_location": map_location, "weights_only": weights_only}
        return load(source, **{name: value for name, value in given.items() if value is not None})

    return read


def _device(map_location: Any) -> torch.device | None:
    """The device that `map_location` sends tensors of the host to; None if they stay."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    elif callable(map_location):
        found = map_location(torch.UntypedStorage(0, device="cpu"), "cpu")
        map_location = None if found is None else found.device
    device = None if map_location is None else torch.device(map_location)
    return None if device is None or device.type == "cpu" else device


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; dicts and lists are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, device)
    elif isinstance(value, list):
        value[:] = [_moved(item, device) for item in value]
    elif type(value) is tuple:
        return tuple(_moved(item, device) for item in value)
    return value
