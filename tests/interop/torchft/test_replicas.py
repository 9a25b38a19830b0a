"""Replica processes: one joins late and recovers from a peer, repeatedly, until no peer serves;
DTensors keep their placement.
"""

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.errors import Unavailable
from tests.distributed.pool import Pool
from tests.interop.torchft import replicas
from tests.interop.torchft.conftest import SOON, Start, Wire, assert_same, state_of

METADATA_CHUNKS = 2
LARGE = 96
"""MiB."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.close()


def test_replicas_recover_from_a_peer_twice_and_then_time_out(pool: Pool) -> None:
    source = pool.run(replicas.begin)[0]
    for step, recovering in ((1, (1, 2)), (2, (2,))):
        taken = pool.run(replicas.take_part, step, source, step, recovering, ranks=[0, 1, 2])
        assert all(taken[rank][0] == taken[rank][1] > 0 for rank in recovering)
        pool.run(replicas.withdraw, ranks=[0, 1, 2])
    assert pool.run(replicas.receive, 3, source, 0.01, ranks=[2]) == ["TimeoutError"]
    pool.run(replicas.send, 4, 4, ranks=[2])  # returns at once without readers
    pool.run(replicas.end)


def test_a_large_state_is_received_in_little_memory(pool: Pool) -> None:
    source = pool.run(replicas.begin, ranks=[0])[0]
    pool.run(replicas.send, 1, 5, LARGE, ranks=[0])
    (grown,) = pool.run(replicas.receive_in_little_memory, source, 1, LARGE, ranks=[1])
    assert pool.run(replicas.digests, LARGE, 5, ranks=[1]) == [True]
    print(f"the receiver grew by {grown >> 20} MiB for {LARGE} MiB")
    assert grown < LARGE << 19
    pool.run(replicas.end)


def test_dtensors_of_every_layout_are_placed_on_the_receivers_own_mesh(pool: Pool) -> None:
    pool.run(replicas.exchange_dtensors, 3)


def test_dtensors_whose_mesh_the_receiver_does_not_know_come_on_an_equal_mesh_without_groups(
    pool: Pool,
) -> None:
    pool.run(replicas.exchange_dtensors_without_meshes, 3)


def test_a_dtensor_on_a_mesh_without_dimensions_arrives_whole(pool: Pool) -> None:
    pool.run(replicas.exchange_dtensor_without_dimensions)


def test_a_dtensor_on_a_mesh_that_the_receiver_is_no_rank_of_is_refused_by_its_path(
    pool: Pool,
) -> None:
    assert pool.run(replicas.receive_on_mesh_of_first_two_ranks)[2].startswith("state/w lies on")


@pytest.mark.parametrize(
    ("stopped_s", "options"),
    [(2, {"patience": timedelta(seconds=0.2)}), pytest.param(14, {}, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("after_bytes", [0, 3 << 20])
def test_a_peer_that_is_stopped_for_a_while_gives_the_state_within_the_timeout(
    pool: Pool, start: Start, wire: Wire, stopped_s: int, options: dict[str, Any], after_bytes: int
) -> None:
    """Before the first answer or between chunks: a slow peer is not lost."""
    (metadata,) = pool.run(replicas.begin, ranks=[0])
    pool.run(replicas.send, 1, 1, 24, ranks=[0])
    (pid,) = pool.run(replicas.pid, ranks=[0])
    metadata, proxy = wire(SimpleNamespace(metadata=lambda: metadata))  # type: ignore[arg-type]
    going_on = threading.Timer(stopped_s, os.kill, (pid, signal.SIGCONT))
    passed, one_at_a_time = 0, threading.Lock()

    def stop(data: bytes) -> bytes:
        nonlocal passed
        with one_at_a_time:
            passed += len(data)
            if passed >= after_bytes and not going_on.ident:
                os.kill(pid, signal.SIGSTOP)
                going_on.start()
        return data

    if after_bytes:
        proxy.faults.spoil = stop
    else:
        stop(b"")
    receiver = start(**options)
    try:
        assert_same(receiver.recv_checkpoint(0, metadata, 1, timedelta(seconds=60)), state_of(24))
        assert going_on.ident
    finally:
        if going_on.ident:
            going_on.join()
        pool.run(replicas.end, ranks=[0])


def test_a_peer_that_is_killed_is_unavailable_and_another_gives_the_state(start: Start) -> None:
    pool = Pool(1)
    try:
        (killed,) = pool.run(replicas.begin)
        pool.run(replicas.send, 1, 1)
        receiver, second = start(), start()
        second.send_checkpoint([1], 1, state_of(6), SOON)
        os.kill(pool.run(replicas.pid)[0], signal.SIGKILL)
        with pytest.raises(Unavailable):
            receiver.recv_checkpoint(0, killed, 1, SOON)
        assert_same(receiver.recv_from([killed, second.metadata()], 1, SOON), state_of(6))
    finally:
        pool.close()
