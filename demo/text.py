"""What the demo reads: the source code of Python's own standard library, as tensors of character
numbers."""

import sysconfig
from functools import cache
from pathlib import Path

import torch

VOCABULARY = 128
"""Characters are ASCII; files with others are left out."""

CONTEXT = 128


@cache
def library(folder: str = "") -> torch.Tensor:
    """The files of the library's top level, or of one of its packages, one behind the other."""
    paths = sorted((Path(sysconfig.get_paths()["stdlib"]) / folder).glob("*.py"))
    sources = [data for path in paths if (data := path.read_bytes()).isascii()]
    return torch.frombuffer(bytearray(b"\n".join(sources)), dtype=torch.uint8)


def batch(
    text: torch.Tensor, size: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`size` random windows and what follows each of their characters, both (size, CONTEXT). Draws
    from torch's generator by default."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
