"""Import and export checkpoints of other formats.

* A `.safetensors` file, a `.safetensors.index.json` with its shards, or any directory becomes
  tensors and files, and is exported again byte for byte.
* A `.pt` file (`torch.save`), a DCP directory or a TorchSnapshot directory becomes its state.
"""

from ckptstore.interop.formats.exports import export
from ckptstore.interop.formats.imports import Labels, import_path

__all__ = ["Labels", "export", "import_path"]
