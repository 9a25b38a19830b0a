"""Tasks of replica processes in tests; each keeps its transport between tasks."""

import os
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptstore.core.ids import digest
from ckptstore.errors import InvalidInput
from ckptstore.interop.torchft import StoreTransport
from ckptstore.state.tensors import memory_of
from tests.distributed.layouts import LAYOUTS, full, layout, mesh_of
from tests.interop.torchft.conftest import assert_same, copy_of, state_of, weights_of

SOON = timedelta(seconds=30)
kept: dict[str, Any] = {}


def begin(rank: int, **options: Any) -> str:
    """A new transport; returns its metadata."""
    end(rank)
    kept["transport"] = StoreTransport(SOON, **options)
    return str(kept["transport"].metadata())


def end(rank: int) -> None:
    if "transport" in kept:
        kept.pop("transport").shutdown()
    kept.clear()


def send(rank: int, step: int, seed: int, chunks: int = 6) -> None:
    kept["transport"].send_checkpoint([1, 2], step, state_of(chunks, seed), SOON)


def take_part(
    rank: int, step: int, source: str, seed: int, recovering: tuple[int, ...], chunks: int = 6
) -> tuple[int, int] | None:
    """Rank 0 sends; recovering ranks receive and compare. Returns the number of received chunks and
    of all chunks.
    """
    if rank == 0:
        send(rank, step, seed, chunks)
        return None
    if rank not in recovering:
        return None
    got = kept["transport"].recv_checkpoint(0, source, step, SOON)
    assert_same(got, state_of(chunks, seed))
    return kept["transport"].received.fetched_chunks, kept["transport"].received.chunks


def withdraw(rank: int) -> None:
    kept["transport"].disallow_checkpoint()


def receive(rank: int, step: int, source: str, timeout_s: float) -> str:
    """The class of the error."""
    try:
        kept["transport"].recv_checkpoint(0, source, step, timedelta(seconds=timeout_s))
    except Exception as error:
        return type(error).__name__
    return ""


def receive_in_little_memory(rank: int, source: str, step: int, chunks: int) -> int:
    """The growth of this process in bytes while it receives a large state into live tensors."""
    live = copy_of(state_of(chunks, seed=77))
    transport: StoreTransport[Any] = StoreTransport(SOON, state_dict=lambda: live, in_place=True)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        transport.recv_checkpoint(0, source, step, SOON)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    finally:
        transport.shutdown()
    kept["digests"] = {name: digest(memory_of(tensor)) for name, tensor in weights_of(live).items()}
    return grown << 10


def digests(rank: int, chunks: int, seed: int) -> bool:
    return bool(
        kept["digests"]
        == {
            name: digest(memory_of(tensor))
            for name, tensor in weights_of(state_of(chunks, seed)).items()
        }
    )


def exchange_dtensors(rank: int, n: int) -> None:
    """Every rank sends DTensors of all layouts to a transport of another mesh with the same
    ranks.
    """
    sent = {name: layout(name, full(), n) for name in LAYOUTS}
    others = [mesh_of.__wrapped__(n, two_dimensional) for two_dimensional in (False, True)]
    sender: StoreTransport[Any] = StoreTransport(SOON)
    receiver: StoreTransport[Any] = StoreTransport(SOON, meshes=others)
    try:
        sender.send_checkpoint([0], 1, sent, SOON)
        _check_dtensors(receiver.recv_checkpoint(0, sender.metadata(), 1, SOON), sent, others)
        live = {name: layout(name, full() * 0, n) for name in LAYOUTS}
        addresses = {name: tensor._local_tensor.data_ptr() for name, tensor in live.items()}
        in_place: StoreTransport[Any] = StoreTransport(SOON, state_dict=lambda: live, in_place=True)
        try:
            got = in_place.recv_checkpoint(0, sender.metadata(), 1, SOON)
        finally:
            in_place.shutdown()
        _check_dtensors(got, sent, [tensor.device_mesh for tensor in live.values()])
        assert {name: tensor._local_tensor.data_ptr() for name, tensor in got.items()} == addresses
    finally:
        sender.shutdown()
        receiver.shutdown()


def carried(state: dict[str, Any]) -> dict[str, Any]:
    """The result of sending `state` to a transport without options."""
    sender: StoreTransport[Any] = StoreTransport(SOON)
    receiver: StoreTransport[Any] = StoreTransport(SOON)
    try:
        sender.send_checkpoint([0], 1, state, SOON)
        got: dict[str, Any] = receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
        return got
    finally:
        sender.shutdown()
        receiver.shutdown()


def exchange_dtensors_without_meshes(rank: int, n: int) -> None:
    """Received DTensors have the sender's specs, and can be copied to live DTensors without
    collectives.
    """
    sent = {name: layout(name, full(), n) for name in LAYOUTS}
    got = carried(sent)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name]._spec == tensor._spec, name
        live = layout(name, full() * 0, n)
        live.copy_(got[name])
        assert torch.equal(live._local_tensor, tensor._local_tensor), name
    assert (
        len({id(tensor.device_mesh) for tensor in got.values()}) == 2
    )  # one for each of the sender's


def exchange_dtensor_without_dimensions(rank: int) -> None:
    """Such a mesh names one rank; every process with a tensor on it has all of the tensor."""
    mesh = DeviceMesh("cpu", 1)
    sent = {
        "w": distribute_tensor(torch.arange(6.0).view(2, 3).t(), mesh, []),
        "empty": distribute_tensor(torch.empty(0, 2), mesh, []),
    }
    got = carried(sent)
    for name, tensor in sent.items():
        assert torch.equal(got[name]._local_tensor, tensor._local_tensor), name
        assert got[name]._spec == tensor._spec, name


def receive_on_mesh_of_first_two_ranks(rank: int) -> str:
    """Rank 0 sends a DTensor on ranks 0 and 1; returns each rank's refusal."""
    tensors: list[Any] = [None]
    if rank < 2:
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
        tensors = [DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)]
    metadata: list[Any] = [begin(rank)]
    if rank == 0:
        kept["transport"].send_checkpoint([1, 2], 1, {"w": tensors[0]}, SOON)
    dist.broadcast_object_list(metadata, 0)
    try:
        kept["transport"].recv_checkpoint(0, metadata[0], 1, SOON)
    except InvalidInput as error:
        return str(error)
    finally:
        dist.barrier()
        end(rank)
    return ""


def _check_dtensors(got: dict[str, Any], sent: dict[str, Any], meshes: list[Any]) -> None:
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(got[name]._local_tensor, tensor._local_tensor), name
        assert got[name].placements == tensor.placements and got[name].shape == tensor.shape, name
        assert any(got[name].device_mesh is mesh for mesh in meshes), name


def pid(rank: int) -> int:
    return os.getpid()
