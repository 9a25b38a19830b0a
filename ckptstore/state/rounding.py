"""How does torch round float32 words to 16 bits? Several times as fast as numpy, on the calling
thread alone.

A thread may be set to take the numbers next to zero for zero (`torch.set_flush_denormal`), which
docs/format.md does not: on such a thread nothing is done. Nor is it where torch rounds otherwise.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptstore.objects import patches

_DTYPES = {patches.BFLOAT16: torch.bfloat16, patches.FLOAT16: torch.float16}
PIECE = 1 << 15
"""Torch starts no threads for so few numbers: a commit has its own, and a trainer needs torch's."""
_TINY, _ONE = 5e-324, 1.0
_LOW = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000)
"""The low bits of numbers next to the middle of two of 16 bits."""


def round_words(function: int, bits: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
    """Round the float32 numbers whose `bits` are given into `out`; NaN to any NaN. Returns False,
    with `out` undefined, where torch cannot, or makes others than it should."""
    keeps_tiny = _TINY * _ONE > 0  # asked anew, since each thread can be set
    if not keeps_tiny or not bits.flags.writeable or not _is_as_stated(function):
        return False  # torch warns of memory that is read-only
    numbers = torch.frombuffer(bits, dtype=torch.float32)
    rounded = torch.frombuffer(out, dtype=_DTYPES[function])
    if len(bits) <= PIECE:
        rounded.copy_(numbers)
    else:
        torch._foreach_copy_(rounded.unsafe_split(PIECE), numbers.unsafe_split(PIECE))
    return True


@cache
def _is_as_stated(function: int) -> bool:
    """Whether torch rounds numbers of each exponent, but those of NaN, as it should."""
    exponents, signs = np.arange(255, dtype="<u4") << 23, np.array([0, 1 << 31], "<u4")
    low = np.array(_LOW, "<u4")
    bits = (low + exponents[:, np.newaxis] + signs[:, np.newaxis, np.newaxis]).reshape(-1)
    wanted = np.empty(len(bits), "<u2")
    patches.round_exactly(function, bits, wanted)
    found = torch.from_numpy(bits.view("<f4")).to(_DTYPES[function])
    return torch.equal(found.view(torch.int16), torch.from_numpy(wanted.view("<i2")))


patches.fast_rounding = round_words
