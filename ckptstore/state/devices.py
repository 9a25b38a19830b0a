"""How bytes leave a CUDA device: on a stream beside training's, behind what training had launched, into memory that is pinned for it.

The copy of a piece waits on its thread, without the GIL, until the piece has arrived; several threads keep the device's copy engine busy.
Only states with tensors on such a device come here.
"""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import finalize

import torch

from ckptstore.state.arenas import Arena

logger = logging.getLogger("ckptstore")


def devices_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """The CUDA devices that some of `tensors` lie on."""
    return frozenset(tensor.device for tensor in tensors if tensor.device.type == "cuda")


def prepare(devices: Iterable[torch.device], arena: Arena) -> None:
    """What is copied to `arena` from here on was written by what the caller's streams have been given so far, and by nothing later
    that waits for the copy."""
    for device in devices:
        _stream(device).wait_stream(torch.cuda.current_stream(device))
        _pin(arena)


def beside_training(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, copies from `device` do not wait for what training launches meanwhile, nor training for them."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pin(arena: Arena) -> None:
    """Once per arena. Where the host allows no more locked memory, copies go through the driver's own buffers: slower, not wrong."""
    if arena.pinned:
        return
    cudart: Any = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(arena.address, arena.nbytes, 0))
    arena.pinned = True  # or not to be asked again
    if error:
        logger.warning(
            "%d bytes of staging memory could not be pinned (CUDA error %d): copies from the device are slower", arena.nbytes, error
        )
    else:
        finalize(arena, cudart.cudaHostUnregister, arena.address)
