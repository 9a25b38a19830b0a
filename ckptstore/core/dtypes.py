"""How wide each dtype's elements are, by torch's name without `torch.`, for code that does not
import torch.

A sub-byte or packed dtype counts as torch stores it: one byte per stored element. Quantized dtypes
are not here: such tensors are stored as their integers (docs/values.md).
"""

from math import prod

from ckptstore.core.model import Shape
from ckptstore.errors import Corrupt

WIDTHS: dict[str, int] = {
    **dict.fromkeys(
        (
            "bool",
            "uint8",
            "int8",
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        ),
        1,
    ),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def width_of(dtype: str) -> int:
    """Bytes per element. Raises `Corrupt` for a dtype that this version does not know."""
    try:
        return WIDTHS[dtype]
    except KeyError:
        raise Corrupt(
            f"unknown dtype {dtype!r}: the commit is damaged or was written by a newer ckptstore; "
            "run `ckptstore fsck`"
        ) from None


def nbytes_of(dtype: str, shape: Shape) -> int:
    """Raw bytes of a tensor."""
    return width_of(dtype) * prod(shape)
