"""Stores of small tensors that are full of patches, and of weights that round their masters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import ckptstore
from ckptstore.commit import masters, patching
from ckptstore.objects.pack import entries
from ckptstore.repository.footers import read_table
from ckptstore.repository.patch_chains import RoundedChunk


@contextmanager
def small_chunks_too() -> Iterator[None]:
    """Within, the smallest chunks may become patches, of the rounding of masters, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "LEAF_BYTES_MIN", 0)
        patch.setattr(masters, "LEAF_BYTES_MIN", 1 << 10)
        patch.setattr(patching, "CHUNK_BYTES_MIN", 64)
        yield


def roundings(store: ckptstore.Store) -> list[RoundedChunk]:
    """The chunks of a store that are the rounding of others."""
    handle = store._handle
    tables = [read_table(handle.storage, pack) for pack in handle.log.replay().packs.values()]
    return handle.objects.rounded(b"".join(e.chunk for table in tables for e in entries(table)))


def nudged(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of which a hundredth changes at every step; equal steps give equal tensors."""
    generator = torch.Generator().manual_seed(77)
    found = torch.randn(shape, generator=generator)
    flat = found.view(-1)
    for _ in range(step):
        at = torch.randint(len(flat), (max(len(flat) // 100, 1),), generator=generator)
        flat[at] += 0.01
    return found.to(dtype)
