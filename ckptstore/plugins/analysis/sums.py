"""How are tensors in memory added up?"""

from collections.abc import Iterable, Sequence

import numkong
import torch

PIECE = 1 << 15
"""Torch starts no threads for so few numbers, as a trainer needs them."""


def flat_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements in `memory`, as a vector."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def add_up(tensors: Iterable[torch.Tensor], factors: Iterable[float], out: torch.Tensor) -> None:
    """Write the sum of vectors of floats, each times its factor, to `out`, one of their dtype. It
    is made in 64 bits of theirs, else in 32, by the calling thread alone."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)

    def split(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        pieces: Sequence[torch.Tensor] = (tensor,) if total is out else tensor.split(PIECE)
        return pieces

    targets = [piece.numpy() for piece in split(total)]
    add = False
    for tensor, factor in zip(tensors, factors, strict=True):
        for target, piece in zip(targets, split(tensor), strict=True):
            numbers = piece.to(wide).numpy()
            if add:
                numkong.blend(numbers, target, alpha=factor, beta=1.0, out=target)
            else:
                numkong.scale(numbers, alpha=factor, beta=0.0, out=target)
        add = True
    if total is not out:
        for narrow, piece in zip(split(out), split(total), strict=True):
            narrow.copy_(piece)
