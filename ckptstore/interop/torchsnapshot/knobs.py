"""Which of TorchSnapshot's environment variables have an effect here?

* `TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES` is the `memory_budget_bytes` of commits and restores.
* `TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE` is the size above which the manifest shows a tensor
  in ranges of rows; stored bytes do not change.
* `TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE` does the same for one rank's part of a divided
  tensor.
* `TORCHSNAPSHOT_DISABLE_BATCHING` and `TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE` have no
  effect; scripts may set them.

Slab size and batching have no counterpart: packs always combine small tensors, and replicas are
always divided among ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.errors import InvalidInput

_BUDGET = "TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES"
_CHUNK = "TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"
_SHARD = "TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE"
_SLAB = "TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE"
_UNBATCHED = "TORCHSNAPSHOT_DISABLE_BATCHING"
_DEFAULT_BYTES = 512 << 20
_DEFAULT_SLAB_BYTES = 128 << 20


def get_memory_budget_bytes() -> int | None:
    return _number(_BUDGET)


def get_max_chunk_size_bytes() -> int:
    return _number(_CHUNK) or _DEFAULT_BYTES


def get_max_shard_size_bytes() -> int:
    return _number(_SHARD) or _DEFAULT_BYTES


def get_slab_size_threshold_bytes() -> int:
    return _number(_SLAB) or _DEFAULT_SLAB_BYTES


def is_batching_disabled() -> bool:
    return os.environ.get(_UNBATCHED, "").lower() in ("true", "1")


@contextmanager
def override_max_chunk_size_bytes(max_chunk_size_bytes: int) -> Iterator[None]:
    with _overridden(_CHUNK, max_chunk_size_bytes):
        yield


@contextmanager
def override_max_shard_size_bytes(max_shard_size_bytes: int) -> Iterator[None]:
    with _overridden(_SHARD, max_shard_size_bytes):
        yield


@contextmanager
def override_slab_size_threshold_bytes(slab_size_threshold_bytes: int) -> Iterator[None]:
    with _overridden(_SLAB, slab_size_threshold_bytes):
        yield


@contextmanager
def override_is_batching_disabled(disabled: bool) -> Iterator[None]:
    with _overridden(_UNBATCHED, int(disabled)):
        yield


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
    _set(variable, str(value))
    try:
        yield
    finally:
        _set(variable, before)


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
