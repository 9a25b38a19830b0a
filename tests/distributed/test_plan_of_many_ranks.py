"""What the coordinator's plan costs as ranks become more: counted, since seconds depend on the
machine."""

from collections import defaultdict

import pytest

from benchmarks import simulated_ranks
from benchmarks.simulated_ranks import descriptions
from ckptstore.core.model import Schema
from ckptstore.distributed.merge import SameHolders, decode_description, merge
from ckptstore.distributed.plan import plan_ranks
from ckptstore.distributed.rank_worker import decode_task, encode_tasks

LAYERS = 1


def tasks_of(ranks: int) -> list[bytes]:
    schemas: dict[bytes, Schema] = {}
    described = [decode_description(each, schemas) for each in descriptions(ranks, LAYERS)]
    plan = plan_ranks(merge(described), ranks, simulated_ranks.CHUNK_BYTES, canonical=True)
    keys = [[tree.key for tree in own] for own in described]
    return encode_tasks(plan, keys, trust_replicated=True)


def test_tasks_do_not_grow_with_the_square_of_the_ranks() -> None:
    # Each rank has a piece of every small tensor, and each was told the pieces of all others.
    few, many = (sum(map(len, tasks_of(ranks))) for ranks in (64, 256))
    assert many < 4 * 2 * few


def test_messages_of_two_ranks_name_the_same_pieces() -> None:
    sent: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    for rank, task in enumerate(tasks_of(48)):
        for window in decode_task(task, rank).windows:
            for other, message in window.outgoing.items():
                sent[rank, other].append(bytes(message.names))
            for other, message in window.incoming.items():
                received[other, rank].append(bytes(message.names))
    assert sent == received
    assert len(sent) > 48


@pytest.mark.parametrize("at", [0, 5, -1])
def test_holders_of_one_number_are_those_that_they_stand_for(at: int) -> None:
    holders = SameHolders(tuple(range(0, 12, 2)), 7)
    assert holders[at] == list(holders)[at]
    assert list(holders[:at]) == list(holders)[:at]
    assert len(list(holders)) == len(holders)
