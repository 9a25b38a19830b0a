"""TorchSnapshot's environment variables.

* `TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES` is the `memory_budget_bytes` of commits and restores.
* `TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE` is the size above which the manifest shows a tensor
  in ranges of rows; stored bytes do not change.
* `TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE` does the same for one rank's part of a divided
  tensor.
* `TORCHSNAPSHOT_DISABLE_BATCHING` and `TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE` have no
  effect; scripts may set them. Packs always combine small tensors, and replicas are always divided
  among ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ckptstore.errors import InvalidInput

_CHUNK = "TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"
_SHARD = "TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE"
_DEFAULT_BYTES = 512 << 20


def get_memory_budget_bytes() -> int | None:
    return _number("TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES")


def get_max_chunk_size_bytes() -> int:
    return _number(_CHUNK) or _DEFAULT_BYTES


def get_max_shard_size_bytes() -> int:
    return _number(_SHARD) or _DEFAULT_BYTES


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.strip().isdecimal() or not int(text):
        raise InvalidInput(f"${variable} is {text!r}; wanted a number of bytes greater than zero")
    return int(text)


@contextmanager
def _overridden(variable: str, value: int) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = str(int(value))
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


override_max_chunk_size_bytes = partial(_overridden, _CHUNK)
override_max_shard_size_bytes = partial(_overridden, _SHARD)
override_slab_size_threshold_bytes = partial(
    _overridden, "TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE"
)
override_is_batching_disabled = partial(_overridden, "TORCHSNAPSHOT_DISABLE_BATCHING")
