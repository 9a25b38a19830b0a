"""torch's random generator as a part of an application state."""

from typing import Any

import torch

import ckptstore.state.stateful


class RNGState(ckptstore.state.stateful.RNGState):
    """torch's random generator on the CPU, under the key `rng_state`, as in TorchSnapshot.

    After a restore it has the state that it had after the snapshot was taken. `ckptstore.RNGState`,
    which includes the generators of Python, numpy and CUDA, may replace it.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"rng_state": torch.get_rng_state()}
