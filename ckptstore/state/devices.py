"""How are bytes copied to and from a CUDA device, in order with the caller's kernels?

A commit or restore that the caller waits for uses the stream current at the call, on any copying
thread: after earlier launches, before later ones. Staging uses a side stream, ordered after what
training launched before the call, and copies into pinned memory. Each copying thread waits for its
piece without the GIL; several threads keep the copy engine busy.
"""

import logging
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import finalize

import torch

from ckptstore.state.staging_buffers import Buffer

logger = logging.getLogger("ckptstore")

AWAY = frozenset(["cuda"])
"""Kinds of devices whose bytes arrive by themselves, while the processor hashes others."""

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every device, not only the current one."""


def is_away(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes take a way on which the processor is free."""
    return tensor.device.type in AWAY


def current_stream(tensor: torch.Tensor) -> Any:
    """The stream that the calling thread launches on where the tensor lies; None for one in this
    host's memory."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def through(stream: Any) -> AbstractContextManager[Any]:
    """Within it, copies go through `stream`. Each thread has a current stream of its own, which may
    be another than the caller's."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def devices_of(tensors: Iterable[torch.Tensor]) -> frozenset[torch.device]:
    """The CUDA devices that some of `tensors` lie on."""
    return frozenset(tensor.device for tensor in tensors if tensor.device.type == "cuda")


def prepare(devices: Iterable[torch.device], arena: Buffer) -> None:
    """What is copied to `arena` from here on was written by what the caller's streams have been
    given so far, and by nothing later that waits for the copy."""
    for device in devices:
        _stream(device).wait_stream(torch.cuda.current_stream(device))
        _pin(arena, device)


def beside_training(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, copies from `device` do not wait for what training launches meanwhile, nor
    training for them."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


_streams: dict[torch.device, torch.cuda.Stream] = {}
_making_streams = threading.Lock()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for the device. Of two, made by threads that commit at once, the one that waits could be
    another than the one that copies."""
    with _making_streams:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


def _pin(arena: Buffer, device: torch.device) -> None:
    """Once per arena, for every device, by way of `device`: one that is not used would be set up
    for it, which takes memory. Where the host allows no more locked memory, copies go through the
    driver's own buffers: slower, not wrong."""
    if arena.pinned:
        return
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = int(cudart.cudaHostRegister(arena.address, arena.nbytes, _PORTABLE))
    arena.pinned = True  # or not to be asked again
    if error:
        # CUDA reports it once more, to whoever launches a kernel next: that must not be training.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        logger.warning(
            "%d bytes of staging memory could not be pinned (CUDA error %d): copies from the "
            "device are slower",
            arena.nbytes,
            error,
        )
    else:
        finalize(arena, cudart.cudaHostUnregister, arena.address)
