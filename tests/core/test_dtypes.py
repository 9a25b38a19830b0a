"""The table of widths that code without torch goes by, held against torch itself."""

import torch

from ckptstore.core.geometry import WIDTHS
from ckptstore.state.tensors import DTYPES, QUANTIZED


def test_every_dtype_of_torch_that_is_stored_as_itself_has_torch_s_width() -> None:
    stored = {name: dtype.itemsize for name, dtype in DTYPES.items() if dtype not in QUANTIZED}
    assert {name: WIDTHS.get(name) for name in stored} == stored


def test_no_width_is_listed_that_torch_denies() -> None:
    assert {
        name: width
        for name, width in WIDTHS.items()
        if hasattr(torch, name) and getattr(torch, name).itemsize != width
    } == {}
