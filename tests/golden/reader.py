"""The stand-alone reader of docs/format.md as a module, and what it must find."""

import json
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from ckptstore.state import tensors

FILE = Path(__file__).parents[2] / "docs" / "reader.py"


def load() -> Any:
    spec = spec_from_file_location("format_reader", FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = load()


def read(place: Path, ref: str) -> dict[str, Any]:
    """What the reader finds in a commit, by path: a tensor as dtype, shape and bytes; bytes; or
    the JSON of a value."""
    store = reader.Store(place)
    found: dict[str, Any] = {}
    for path, leaf in store.leaves(store.find(ref)).items():
        data = store.read(leaf)
        match leaf["kinds"]:
            case "tensor":
                found[path] = (leaf["dtypes"], tuple(leaf["shapes"]), data)
            case "value":
                found[path] = json.loads(data)
            case _:
                found[path] = data
    return found


def described(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a flat state: values stay as they are, so those whose JSON differs need their
    JSON."""
    return {
        path: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            bytes(tensors.memory_of(value.contiguous())),
        )
        if isinstance(value, torch.Tensor)
        else value
        for path, value in state.items()
    }
