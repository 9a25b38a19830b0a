"""Helpers for an application state: a dict restored in place, and all random generators."""

import random
import sys
from contextlib import suppress
from typing import Any

import torch


class StateDict(dict[str, Any]):
    """A dict with `state_dict` and `load_state_dict`: what a script must remember beside its
    modules.

    progress = StateDict(epoch=0); store.commit({"progress": progress}); …; progress["epoch"]
    """

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.clear()
        self.update(state_dict)


class RNGState:
    """The random number generators of Python, numpy, torch on the CPU and, where this process uses
    CUDA, every CUDA device.

    Has no state of its own: `state_dict` reads the generators without drawing from them,
    `load_state_dict` sets them; of CUDA devices, those that both sides have. A restore does so
    after everything else, so that nothing it runs draws afterwards. What TorchSnapshot's object of
    this name has, torch's generator on the CPU as `rng_state`, is taken too.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        # to ask sets it up: memory on every device, no forks any more, an error in a forked child
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "rng_state" in state_dict:
            torch.set_rng_state(state_dict["rng_state"])
            return
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            np.random.set_state(state_dict["numpy"])
        for device, state in zip(
            range(torch.cuda.device_count() if "cuda" in state_dict else 0),
            state_dict.get("cuda", ()),
            strict=False,
        ):
            with suppress(RuntimeError):  # a forked child cannot use CUDA
                torch.cuda.init()  # or torch would seed the generators after what is set here
            torch.cuda.set_rng_state(state, device)
