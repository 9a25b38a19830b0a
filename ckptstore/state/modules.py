"""How are the prefixes that module wrappers add to state dict keys removed and restored?

`torch.compile`, DistributedDataParallel and DataParallel nest a module under a fixed name, which
changes the keys of the same weights. The prefix is removed only where such a wrapper stands: a
user's module called `module` keeps its name.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def state_dict_of(module: nn.Module) -> "OrderedDict[str, Any]":
    """`module.state_dict()` under the names it would have without wrappers; tensors share memory
    with the module's."""
    state: OrderedDict[str, Any] = module.state_dict()  # type: ignore[assignment]  # it is one
    prefixes = _wrapper_prefixes(module)
    return _renamed(state, lambda key: _without(key, prefixes)) if prefixes else state


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


def named_without_wrappers(module: nn.Module, name: str) -> str:
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
    prefixes = _wrapper_prefixes(module)
    found = (
        f"{name}." if name else ""
        for name, each in module.named_modules(remove_duplicate=False)
        if _adapts(each)
    )
    return tuple(_without(prefix, prefixes) for prefix in found)


def _adapts(module: nn.Module) -> bool:
    return (
        bool(module._load_state_dict_pre_hooks)
        or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    )


def _wrapper_prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """(outer, inner) prefixes of every wrapper within `module`, outermost first: keys below `outer`
    begin with `inner`."""
    return list(_find_wrappers(module, ""))


def _find_wrappers(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    inner = _wrapped_name(module)
    if inner:
        yield prefix, f"{prefix}{inner}."
    for name, child in module._modules.items():
        if child is not None:
            yield from _find_wrappers(child, f"{prefix}{name}.")


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
