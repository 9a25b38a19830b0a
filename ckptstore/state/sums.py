"""How are tensors in memory added up?"""

from collections.abc import Iterable

import torch


def flat_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements in `memory`, as a vector."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def weighted_sum(tensors: Iterable[torch.Tensor], factors: Iterable[float]) -> torch.Tensor:
    """The sum of tensors of floats, each times its factor, as one of their dtype. It is made in 64
    bits of theirs, else in 32."""
    total: torch.Tensor | None = None
    for tensor, factor in zip(tensors, factors, strict=True):
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        total = wide * factor if total is None else total.add_(wide, alpha=factor)
    assert total is not None
    return total.to(tensor.dtype)
