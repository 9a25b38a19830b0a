"""Import and export checkpoints of other formats.

* A `.safetensors` file, a `.safetensors.index.json` with its shards, or any directory becomes
  tensors and files, and is exported again byte for byte.
* A `.pt` file (`torch.save`), a DCP directory or a TorchSnapshot directory becomes its state.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.interop.formats.exports import export
    from ckptstore.interop.formats.imports import Labels, import_path

__all__ = ["Labels", "export", "import_path"]

_LATER = {"Labels": "imports", "export": "exports", "import_path": "imports"}
"""Where each is. Imports need torch, and most exports do not."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
