"""What the coordinator's plan costs as ranks become more: counted, since seconds depend on the
machine."""

from collections import defaultdict

import pytest

from benchmarks import simulated_ranks
from benchmarks.simulated_ranks import descriptions
from ckptstore.distributed.assemble import Assembler
from ckptstore.distributed.merge import Described, SameHolders, decode_description, merge
from ckptstore.distributed.plan import RanksPlan, plan_ranks
from ckptstore.distributed.rank_worker import decode_task, encode_tasks

LAYERS = 1


def plan_of(ranks: int, layers: int = LAYERS) -> RanksPlan:
    known = Described()
    described = [decode_description(each, known) for each in descriptions(ranks, layers)]
    return plan_ranks(merge(described), ranks, simulated_ranks.CHUNK_BYTES, canonical=True)


def tasks_of(plan: RanksPlan) -> list[bytes]:
    keys = [["app"]] * len(plan.load)
    return encode_tasks(plan, keys, trust_replicated=True)


def test_tasks_do_not_grow_with_the_square_of_the_ranks() -> None:
    # Each rank has a piece of every small tensor, and each was told the pieces of all others.
    few, many = (sum(map(len, tasks_of(plan_of(ranks)))) for ranks in (64, 256))
    assert many < 4 * 2 * few


def test_messages_of_two_ranks_name_the_same_pieces() -> None:
    sent: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    for rank, task in enumerate(tasks_of(plan_of(48))):
        for window in decode_task(task, rank).windows:
            for other, message in window.outgoing.items():
                sent[rank, other].append(bytes(message.names))
            for other, message in window.incoming.items():
                received[other, rank].append(bytes(message.names))
    assert sent == received
    assert len(sent) > 48


def test_layers_that_repeat_add_no_row_for_each_rank() -> None:
    def rows(layers: int) -> int:
        plan = plan_of(256, layers)
        kinds = plan.alike.values()
        return len(plan.jobs) + sum(len(kind.own) + len(kind.cut) for kind in kinds)

    assert rows(1) == rows(4)
    one, four = (sum(map(len, tasks_of(plan_of(256, layers)))) for layers in (1, 4))
    assert four < 4 * one


@pytest.mark.parametrize("ranks", [1, 7, 48, 256])
def test_tasks_have_each_chunk_of_the_plan_written_once(ranks: int) -> None:
    plan = plan_of(ranks)
    assembler = Assembler(plan)
    for rank, data in enumerate(tasks_of(plan)):
        task = decode_task(data, rank)
        cells = {
            n for job in task.jobs for n in range(job.number, job.number + job.stop - job.first)
        }
        cut = {number for window in task.windows for number in window.assemblies}
        assert not cells & cut
        assert sorted(cells | cut) == assembler.asked(rank).tolist()
    assert sum(len(assembler.asked(rank)) for rank in range(ranks)) == plan.chunks


def test_descriptions_of_ranks_that_hold_alike_share_their_parts() -> None:
    known = Described()
    trees = [decode_description(each, known)[0] for each in descriptions(64, LAYERS)]
    assert len({id(tree.ways) for tree in trees}) == 1
    assert len({id(tree.schema) for tree in trees}) == 1
    assert len({id(holding.mesh) for tree in trees for holding in tree.holdings}) == 1


@pytest.mark.parametrize("at", [0, 5, -1])
def test_holders_of_one_number_are_those_that_they_stand_for(at: int) -> None:
    holders = SameHolders(tuple(range(0, 12, 2)), 7)
    assert holders[at] == list(holders)[at]
    assert list(holders[:at]) == list(holders)[:at]
    assert len(list(holders)) == len(holders)
