"""How does an object of the caller's become state: by its state dict, or by a registered codec?

`torch.compile`, DistributedDataParallel and DataParallel nest a module under a fixed name, which
changes the keys of the same weights. `state_dict_of` removes the prefix, only where such a wrapper
stands: a user's module called `module` keeps its name.

Documents name types and classes: registered ones, and those of a restore's target. None is
imported.
"""

import logging
import random
import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ckptstore.core.identity import IdentityDict
from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.state.checkpointable import MARK, alike, is_checkpointable

_logger = logging.getLogger("ckptstore")


@runtime_checkable
class Stateful(Protocol):
    """An object whose state `state_dict` returns and `load_state_dict` sets."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_stateful(value: Any) -> bool:
    # Not by isinstance: that of a protocol takes 70 µs, and takes a dict for one whose attributes
    # are its items.
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(value, type)


def is_matched(value: Any) -> bool:
    """Whether a restore matches the state of a stateful object with its own, key by key; any other
    is handed what was committed."""
    return isinstance(value, nn.Module | Optimizer | StateDict)


def state_of(value: Any) -> Any:
    """The state dict of an object that has one, with the names of wrapped modules; anything else as
    it is."""
    if isinstance(value, nn.Module):
        return state_dict_of(value)
    return value.state_dict() if is_stateful(value) else value


def state_now(value: Any) -> Any:
    """As `state_of`, of a restore's target; None of an object that cannot give its state yet, as
    some cannot before their first call: that it has nothing to fill does not matter to its
    `load_state_dict`."""
    try:
        return state_of(value)
    except Exception:
        return None


_TENSORS = (torch.Tensor, nn.Parameter)
_PLAIN = frozenset((*_TENSORS, int, float, complex, bool, str, bytes, type(None)))


def is_plain(value: Any) -> bool:
    """Whether a value is one leaf, and no code of its own runs when it is asked for its state."""
    return type(value) in _PLAIN and not hasattr(value, MARK)


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a mapping, a list or a tuple holds, by key or number; nothing of anything else."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def found_in(
    value: Any, is_wanted: Callable[[Any], bool], keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The wanted objects in plain containers, outermost only, each after the keys that lead to
    it."""
    if is_wanted(value):
        yield keys, value
        return
    for key, child in items_of(value):
        yield from found_in(child, is_wanted, (*keys, key))


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order of their numbers."""
    return [each for group in optimizer.param_groups for each in group["params"]]


class StateDict(dict[str, Any]):
    """A dict with `state_dict` and `load_state_dict`: what a script must remember beside its
    modules.

    progress = StateDict(epoch=0); store.commit({"progress": progress}); …; progress["epoch"]

    It keeps items. `state_dict` raises `InvalidInput` if it was given attributes, which would be
    lost.
    """

    def state_dict(self) -> dict[str, Any]:
        if held := vars(self):
            name = next(iter(held))
            raise InvalidInput(
                f"a StateDict keeps items, and has the attribute {name!r}, which would be lost; "
                f"set [{name!r}] in place of .{name}"
            )
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clear()
        self.update(state_dict)


class RNGState:
    """The random number generators of Python, numpy, torch on the CPU and, where this process uses
    CUDA, every CUDA device.

    Has no state of its own: `state_dict` reads the generators without drawing from them,
    `load_state_dict` sets them; of CUDA devices, those that both sides have. A restore does so
    after everything else, so that nothing it runs draws afterwards. What TorchSnapshot's object of
    this name has, torch's generator on the CPU as `rng_state`, is taken too.

    Each rank goes on with its own generators, on any number of ranks. A rank for which the commit
    has none begins new streams: its seed is a hash of what all ranks committed, plus its number. So
    the same commit gives the same streams, and no rank draws what another draws. A generator that
    all ranks (two or more) had in the same state stays the same on all.

    Example:
        >>> app_state = {"model": model, "random": ckptstore.RNGState()}
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        # to ask sets it up: memory on every device, no forks any more, an error in a forked child
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "rng_state" in state_dict:
            torch.set_rng_state(state_dict["rng_state"])
            return
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            np.random.set_state(state_dict["numpy"])
        of_devices = state_dict.get("cuda", ())
        present = torch.cuda.device_count() if of_devices else 0
        for device, state in enumerate(of_devices[:present]):
            with suppress(RuntimeError):  # a forked child cannot use CUDA
                torch.cuda.init()  # or torch would seed the generators after what is set here
            torch.cuda.set_rng_state(state, device)


class NewStreams(NamedTuple):
    """The leaves of a tree that are states of another rank's generators, and the seed of those that
    this rank begins instead."""

    seed: int
    leaves: frozenset[int]


def reseeded(state: dict[str, Any], names: Iterable[str], seed: int) -> dict[str, Any]:
    """`state`, that of an `RNGState`, with the generators in `names` seeded anew.

    torch's generator on the CPU takes the last 32 bits of a seed; seeds that follow each other
    differ there. A device's state is its seed and its offset; to write it needs no device.
    """

    def on_cpu() -> torch.Tensor:
        return torch.Generator("cpu").manual_seed(seed).get_state()

    def on_cuda() -> torch.Tensor:
        return torch.tensor([seed, 0], dtype=torch.int64, device="cpu").view(torch.uint8)

    def of_numpy() -> Any:
        from numpy.random import MT19937, RandomState

        return RandomState(MT19937(seed)).get_state(legacy=False)

    new: dict[str, Callable[[], Any]] = {
        "python": lambda: random.Random(seed).getstate(),
        "torch": on_cpu,
        "rng_state": on_cpu,
        "numpy": of_numpy,
        "cuda": lambda: [on_cuda()] * torch.cuda.device_count(),
    }
    return {**state, **{name: new[name]() for name in names if name in new}}


def state_dict_of(module: nn.Module) -> "OrderedDict[str, Any]":
    """`module.state_dict()` under the names it would have without wrappers; tensors share memory
    with the module's."""
    state: OrderedDict[str, Any] = module.state_dict()  # type: ignore[assignment]  # it is one
    for place, each in module.named_modules(remove_duplicate=False):
        for last, own in chain(each._parameters.items(), each._buffers.items()):
            if own is not None and hasattr(own, MARK) and is_checkpointable(own):
                name = f"{place}.{last}" if place else last
                if name in state:
                    state[name] = _as_part(state[name], own)  # torch's `detach` drops attributes
    prefixes = _wrapper_prefixes(module)
    return _renamed(state, lambda key: _without(key, prefixes)) if prefixes else state


def optimizer_state_of(optimizer: Optimizer) -> Any:
    """`optimizer.state_dict()`. What it has in the shape of a parameter that is a
    CheckpointableTensor is the same boxes of a whole."""
    state = optimizer.state_dict()
    marked = ((n, each) for n, each in enumerate(parameters_of(optimizer)) if hasattr(each, MARK))
    parts = {n: each for n, each in marked if is_checkpointable(each)}
    if not parts or type(state) is not dict or type(state.get("state")) is not dict:
        return state
    entries = {
        key: {name: _as_part(each, parts[key]) for name, each in entry.items()}
        if key in parts and type(entry) is dict
        else entry
        for key, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _as_part(value: Any, model: torch.Tensor) -> Any:
    """A plain tensor of the shape of `model` as the same boxes of a whole; else `value`."""
    if type(value) not in _TENSORS or value.shape != model.shape or not value.ndim:
        return value
    return value if is_checkpointable(value) else alike(model, lambda _: value.detach())


def with_wrappers(module: nn.Module, state: "OrderedDict[str, Any]") -> "OrderedDict[str, Any]":
    """`state`, named as `state_dict_of` names, under the names that `module.load_state_dict`
    expects."""
    prefixes = _wrapper_prefixes(module)
    return _renamed(state, lambda key: _with(key, prefixes)) if prefixes else state


def named_parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters()` under the names of `state_dict_of`."""
    prefixes = _wrapper_prefixes(module)
    for name, parameter in module.named_parameters():
        yield _without(name, prefixes), parameter


def name_without_wrappers(module: nn.Module, name: str) -> str:
    """The name in `state_dict_of(module)` of what `module.state_dict()` calls `name`."""
    return _without(name, _wrapper_prefixes(module))


def _renamed(
    state: "OrderedDict[str, Any]", rename: Callable[[str], str]
) -> "OrderedDict[str, Any]":
    renamed = OrderedDict((rename(key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # Metadata is named after modules, not after what they hold. A wrapper and its module get
        # one name; the module's entry is the later.
        entries = ((f"{name}." if name else "", entry) for name, entry in metadata.items())
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(name).removesuffix("."), entry) for name, entry in entries
        )
    return renamed


def own_loading(module: nn.Module) -> tuple[str, ...]:
    """The prefixes, as in `state_dict_of`, of submodules that change a state dict on its way in, so
    that its keys need not match theirs."""
    wrappers = _wrapper_prefixes(module)
    return tuple(
        _without(prefix, wrappers)
        for prefix, each in _modules_in(module)
        if each._load_state_dict_pre_hooks
        or type(each)._load_from_state_dict is not nn.Module._load_from_state_dict
    )


def extra_states(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of `names`, of its `state_dict_of`, under which `set_extra_state` of some module gets
    whatever its `get_extra_state` returned: anything, of any size."""
    found = {name for name in names if name.rpartition(".")[2] == _EXTRA_STATE}
    if found:
        own = chain(named_parameters_of(module), module.named_buffers())
        found -= {name for name, _ in own if name.endswith(_EXTRA_STATE)}
    return found


def _wrapper_prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """(outer, inner) prefixes of every wrapper within `module`, outermost first: keys below `outer`
    begin with `inner`."""
    return [
        (prefix, f"{prefix}{inner}.")
        for prefix, each in _modules_in(module)
        if (inner := _wrapped_name(each))
    ]


def _modules_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """`module` and all below it, outer ones first, each after the prefix of its keys. torch's own
    `named_modules` takes several times as long."""
    found = [("", module)]
    for prefix, each in found:  # which grows meanwhile
        children = each._modules.items()
        found += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return found


def _wrapped_name(module: nn.Module) -> str | None:
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    # torch._dynamo takes a second to import; without it there is no compiled module.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if dynamo and isinstance(module, dynamo.OptimizedModule) else None


def _without(key: str, prefixes: list[tuple[str, str]]) -> str:
    # Innermost first: an inner wrapper's prefix is spelled with the outer wrappers' names.
    for outer, inner in reversed(prefixes):
        if key.startswith(inner):
            key = outer + key[len(inner) :]
    return key


def _with(key: str, prefixes: list[tuple[str, str]]) -> str:
    for outer, inner in prefixes:
        if key.startswith(outer):
            key = inner + key[len(outer) :]
    return key


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict(state)` without torch's cast of the state to its parameters'
    dtype, which would round fp32 moments under bf16 parameters."""
    optimizer.load_state_dict(state)
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        if number in state["state"]:
            optimizer.state[parameter] = _in_own_dtype(
                optimizer.state[parameter], state["state"][number], None
            )


def _in_own_dtype(loaded: Any, saved: Any, name: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        # A fused or capturable optimizer wants its step as float32 and has seen to it.
        return loaded if loaded.dtype == saved.dtype or name == "step" else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _in_own_dtype(loaded[key], saved[key], key)
    elif type(saved) in (list, tuple) and type(loaded) is type(saved):
        there = dict(items_of(saved))
        return type(saved)(_in_own_dtype(each, there[n], name) for n, each in items_of(loaded))
    return loaded


Classes: TypeAlias = Callable[[str], type | None]
"""Classes by name that decoding may use besides the registered ones."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True, slots=True)
class Registered:
    """A type of the caller's: `encode` turns it into something that can be stored, `decode`
    back."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def content_of(self, value: Any) -> Any:
        """What is stored for `value`. Raises `InvalidInput` if the codec raises."""
        return self._run(self.encode, value, "encode")

    def object_of(self, content: Any) -> Any:
        """The object of what was stored. Raises `InvalidInput` if the codec raises."""
        return self._run(self.decode, content, "decode")

    def _run(self, function: Callable[[Any], Any], argument: Any, what: str) -> Any:
        try:
            return function(argument)
        except CkptStoreError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"the codec {self.name!r} cannot {what} {argument!r:.80}: {type(error).__name__}: "
                f"{error}; mend what was registered for {class_name(self.cls)} with "
                "ckptstore.register_value"
            ) from error


STORED_AS_THEY_ARE: set[type] = set()
"""Types that need no codec of the caller's (`values.add_codec`)."""

_REGISTERED: dict[type, Registered] = {}
_REGISTERED_NAMES: dict[str, Registered] = {}
_CLASSES: dict[str, type] = {}
_CLASS_NAMES: dict[type, str] = {}


def register_value(
    name: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Store every `cls` as what `encode` makes of it, under `name`; `decode` makes the object
    again.

    `encode` may return anything that can be stored, tensors and dicts included. `name` is what
    documents hold: keep it when the class moves. Raises `InvalidInput` if `name` or `cls` is taken
    by another.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} cannot name a codec: wanted A-Z a-z 0-9 and _ . : -, beginning with a "
            "letter or _"
        )
    if cls in STORED_AS_THEY_ARE:
        raise InvalidInput(f"{class_name(cls)} is stored as it is; register a class of your own")
    for known in (_REGISTERED.get(cls), _REGISTERED_NAMES.get(name)):
        if known and (known.name, known.cls) != (name, cls):
            raise InvalidInput(
                f"codec {name!r} for {class_name(cls)}: {known.name!r} already stands for "
                f"{class_name(known.cls)}"
            )
    _REGISTERED[cls] = _REGISTERED_NAMES[name] = Registered(name, cls, encode, decode)


def register_class(cls: type, name: str | None = None) -> type:
    """Let documents refer to `cls`, an Enum, a namedtuple, a dataclass or a tensor subclass, by
    `name` (else by module and qualified name).

    Restoring into a target that holds an object of the class needs no registration. Returns `cls`,
    so it can decorate.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if _CLASSES.get(name, cls) is not cls:
        raise InvalidInput(
            f"class name {name!r} already stands for {_CLASSES[name]!r}; choose another"
        )
    _CLASSES[name], _CLASS_NAMES[cls] = cls, name
    return cls


def registered_classes() -> set[type]:
    """The classes that the caller registered, by `register_class` or `register_value`."""
    return {*_CLASS_NAMES, *_REGISTERED}


def registered(cls: type) -> Registered | None:
    """The caller's codec for `cls`."""
    return _REGISTERED.get(cls)


def registered_name(name: str) -> Registered:
    """The caller's codec called `name`; `InvalidInput` if it is not registered here."""
    if name not in _REGISTERED_NAMES:
        raise InvalidInput(
            f"stored with the codec {name!r}, which is not registered here; call "
            "ckptstore.register_value first"
        )
    return _REGISTERED_NAMES[name]


def class_name(cls: type) -> str:
    """The name under which documents hold `cls`."""
    return _CLASS_NAMES.get(cls) or f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: str, classes: Classes) -> type:
    """The class that a document calls `name`: registered here or with torch, or present in the
    target. It is never imported."""
    found = _CLASSES.get(name) or classes(name) or _safe_globals().get(name)
    if found is None:
        raise InvalidInput(
            f"the class {name} is neither registered nor in the target, and ckptstore imports no "
            "class that a document names; "
            f"call ckptstore.register_class on it, or restore into a target that holds one"
        )
    return found


def _safe_globals() -> dict[str, type]:
    """The classes that `torch.serialization.add_safe_globals` was given, by name: whoever gave them
    lets files make objects of them."""
    named = (
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        for each in torch.serialization.get_safe_globals()
    )
    return {name: cls for cls, name in named if isinstance(cls, type)}


_told: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers whose classes were looked at once they had a state."""


def tell_of_unknown_classes(optimizer: Optimizer, path: str, app_state: Any) -> None:
    """Log, once, which classes in the state of an optimizer a new process would not know: there it
    has no state until its first step, so that a restore finds no object of them in the target."""
    if optimizer in _told or not optimizer.state:
        return
    _told.add(optimizer)
    held = {
        type(value): name
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    own = {cls: name for cls, name in held.items() if not _is_known(cls)}
    if not own:
        return
    rest = [each for each in app_state.values() if not isinstance(each, Optimizer)]
    there = classes_in([*rest, parameters_of(optimizer)])
    for cls, name in own.items():
        if there(class_name(cls)) is None:
            _logger.warning(
                "%s has the state %r as a %s, which a new process cannot restore until it calls"
                " ckptstore.register_class(%s)",
                path,
                name,
                class_name(cls),
                cls.__name__,
            )


_STORED_AS_PARTS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    "torch.nested._internal.nested_tensor.NestedTensor",
)
"""Classes of tensors that a commit does not name; other subclasses of torch's own are named."""


def _is_known(cls: type) -> bool:
    """Whether a tensor of this class needs no class in the target."""
    return (
        cls in (torch.Tensor, nn.Parameter)
        or cls in _CLASS_NAMES
        or cls in _REGISTERED
        or class_name(cls) in _STORED_AS_PARTS
        or class_name(cls) in _safe_globals()
    )


def no_classes(name: str) -> None:
    """No class besides the registered ones."""


def classes_in(target: Any) -> Classes:
    """The classes of the objects in `target`; looked for when the first is asked for."""
    found = cache(lambda: {class_name(cls): cls for cls in _classes_in(target, IdentityDict())})
    return lambda name: found().get(name)


def _classes_in(value: Any, seen: IdentityDict[Any, bool]) -> Iterator[type]:
    if value in seen:
        return
    seen[value] = True
    cls = type(value)
    if isinstance(value, Enum | torch.Tensor) or is_dataclass(cls) or hasattr(cls, "_fields"):
        yield cls
    is_container = isinstance(value, dict | tuple | torch.Tensor) or is_dataclass(cls)
    beside = getattr(value, "__dict__", {}).values() if is_container else ()
    value = state_now(value)
    below: Any = ()
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        if isinstance(factory, type):
            yield factory
        below = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        below = value
    elif is_dataclass(type(value)):
        below = [getattr(value, field.name, None) for field in fields(value)]
    for child in (*beside, *below):
        yield from _classes_in(child, seen)
