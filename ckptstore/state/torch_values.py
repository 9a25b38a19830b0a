"""The small values that torch defines: dtypes, devices, layouts, memory formats, sizes."""

from typing import Any

import torch

from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.values import add_codec

_LAYOUTS = {
    str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_FORMATS = {
    str(form): form for form in vars(torch).values() if isinstance(form, torch.memory_format)
}
_QSCHEMES = {
    str(scheme): scheme for scheme in vars(torch).values() if isinstance(scheme, torch.qscheme)
}


def _named(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise InvalidInput(
            f"this torch ({torch.__version__}) has no {name[:60]!r}; read with the torch that "
            "wrote it or a newer one"
        )
    return known[name]


add_codec(
    torch.dtype,
    "torch.dtype",
    lambda x: [tensors.DTYPE_NAMES[x]],
    lambda p, _: tensors.dtype_of(p[0]),
)
add_codec(torch.device, "torch.device", lambda x: [str(x)], lambda p, _: torch.device(p[0]))
add_codec(torch.layout, "torch.layout", lambda x: [str(x)], lambda p, _: _named(_LAYOUTS, p[0]))
add_codec(
    torch.memory_format,
    "torch.memory_format",
    lambda x: [str(x)],
    lambda p, _: _named(_FORMATS, p[0]),
)
add_codec(torch.qscheme, "torch.qscheme", lambda x: [str(x)], lambda p, _: _named(_QSCHEMES, p[0]))
add_codec(torch.Size, "torch.Size", lambda x: list(x), lambda p, _: torch.Size(p))
