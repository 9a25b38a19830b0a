"""A peer on this host serves chunks from its memory, if it is the right process and allows it;
never a wrong tensor.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ckptstore.errors import Corrupt, Unavailable
from ckptstore.interop.chunk_transfer.process_vm import address_of, read_memory
from ckptstore.interop.chunk_transfer.protocol import Near, decode_invitation, encode_invitation
from ckptstore.interop.torchft import StoreTransport
from tests.interop.chunk_transfer.conftest import (
    SOON,
    Start,
    Wire,
    assert_same,
    copy_of,
    state_of,
    weights_of,
)

MIB = 1 << 20


def near_wire(
    wire: Wire,
    sender: StoreTransport[object],
    change: Callable[[Near], Near | None] = lambda near: near,
) -> tuple[str, list[int]]:
    """Metadata that lead through a proxy on this host, and the bytes that pass it."""
    metadata, proxy = wire(sender)
    came: list[int] = []
    proxy.faults.spoil = lambda data: came.append(len(data)) or data  # type: ignore[func-returns-value]
    near = decode_invitation(sender.metadata()).near
    assert near is not None, "this kernel has no process_vm_readv"
    return encode_invitation(replace(decode_invitation(metadata), near=change(near))), came


@pytest.mark.parametrize("live", [False, True])
def test_a_near_peer_sends_no_tensor_through_the_network(
    start: Start, wire: Wire, live: bool
) -> None:
    state = state_of(8) | {
        "others": {
            "transposed": torch.randn(600, 700).t(),
            "bytes": b"x" * 200_000,
            "scalar": torch.tensor(3),
        }
    }
    old = copy_of(state)
    weights_of(old)["a"].zero_()
    sender, receiver = start(), start(state_dict=(lambda: old) if live else None, in_place=live)
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, came = near_wire(wire, sender)
    for tensor in weights_of(state).values():
        tensor.add_(1)
    got = receiver.recv_checkpoint(0, metadata, 1, SOON)
    for tensor in weights_of(got).values():
        tensor.add_(1)
    assert weights_of(got)["a"].equal(weights_of(state)["a"]) and weights_of(got)["b"].equal(
        weights_of(state)["b"]
    )
    assert sum(came) < 50_000
    assert receiver.received is not None and receiver.received.fetched_bytes >= 4 * MIB


@pytest.mark.parametrize(
    "change",
    [
        lambda near: replace(near, where="0" * 32),
        lambda near: replace(near, address=near.address + 1),
        lambda near: replace(near, address=16),
        lambda near: replace(near, pid=os.getppid()),
        lambda near: replace(near, pid=(1 << 31) - 1),
        lambda near: None,
    ],
)
def test_who_is_not_the_peer_or_cannot_be_read_is_not_near(
    start: Start, wire: Wire, change: Callable[[Near], Near | None]
) -> None:
    state = state_of(4)
    sender = start()
    sender.send_checkpoint([1], 1, state, SOON)
    metadata, came = near_wire(wire, sender, change)
    assert_same(start().recv_checkpoint(0, metadata, 1, SOON), state)
    assert sum(came) > 4 * MIB


def test_a_near_peer_whose_memory_is_damaged_gives_no_tensor(start: Start) -> None:
    sender = start()
    sender.send_checkpoint([1], 1, state_of(4), SOON)
    arena = sender._publication._offer._arena  # type: ignore[union-attr]
    assert arena is not None
    arena.memory[3 * MIB + 5] ^= 4
    with pytest.raises(Corrupt, match="damaged"):
        start().recv_checkpoint(0, sender.metadata(), 1, SOON)
    arena.memory[3 * MIB + 5] ^= 4
    assert_same(start().recv_checkpoint(0, sender.metadata(), 1, SOON), state_of(4))


def test_several_receivers_take_from_one_near_peer_and_what_it_withdraws_is_not_taken(
    start: Start,
) -> None:
    sender, receivers = start(), [start(), start()]
    for step in range(3):
        sender.send_checkpoint([1, 2], step, state_of(6, seed=step), SOON)
        for receiver in receivers:
            assert_same(
                receiver.recv_checkpoint(0, sender.metadata(), step, SOON), state_of(6, seed=step)
            )
    sender.shutdown()
    with pytest.raises(Unavailable):
        receivers[0].recv_checkpoint(0, sender.metadata(), 2, SOON)


def test_the_memory_of_another_process_is_read_while_it_lives() -> None:
    script = (
        "import ctypes, sys; b = ctypes.create_string_buffer(b'found' * 1000); "
        "print(ctypes.addressof(b), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout and child.stdin
        address, out = int(child.stdout.readline()), memoryview(bytearray(5000))
        assert read_memory(child.pid, address, out) and out == b"found" * 1000
        assert not read_memory(child.pid, 16, out)
        child.stdin.close()
        child.wait()
        assert not read_memory(child.pid, address, out)


def test_only_memory_that_stays_has_an_address() -> None:
    buffer = bytearray(100)
    address = address_of(memoryview(buffer)[10:20])
    assert address == ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + 10
    assert address_of(memoryview(b"bytes")) is None
    assert address_of(memoryview(buffer)[:0]) is None
