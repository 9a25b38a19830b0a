"""A numpy Generator comes back with the sequence from which it spawns: its children do not repeat
those that were spawned before the commit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptstore.core.model import Node, Schema
from ckptstore.errors import Corrupt, InvalidInput
from tests.state.carrying import Carried, carry

SEEDS: list[Any] = [
    np.random.SeedSequence(7),
    np.random.SeedSequence([1, 2, 3], spawn_key=(4, 5), pool_size=8),
    np.random.SeedSequence((9,), n_children_spawned=6),
    np.random.SeedSequence(2**127 + 1),
]


def drawn(generator: np.random.Generator) -> list[Any]:
    return [child.integers(2**60) for child in [generator, *generator.spawn(2)]]


@pytest.mark.parametrize("seeds", SEEDS, ids=repr)
@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_children_go_on_where_they_were(seeds: Any, bits: Any) -> None:
    made = np.random.Generator(bits(seeds))
    made.spawn(3)
    carried = carry({"g": made})
    new = carried.inflate()["g"]
    target = {"g": np.random.Generator(bits(1))}
    there = target["g"]
    carried.restore(target)
    assert target["g"] is there
    wanted = made.bit_generator.seed_seq.state
    assert new.bit_generator.seed_seq.state == wanted
    assert there.bit_generator.seed_seq.state == wanted
    assert drawn(new) == drawn(there) == drawn(made)


def test_a_commit_without_a_sequence_leaves_that_of_the_target() -> None:
    """As commits of earlier versions are."""
    made, there = np.random.default_rng(1), np.random.default_rng(2)
    carried = carry({"g": made})
    carried = Carried(without_seeds(carried.schema), carried.content)
    before = there.bit_generator.seed_seq.state
    carried.restore({"g": there})
    assert there.bit_generator.seed_seq.state == before
    assert there.integers(2**60) == made.integers(2**60)


def without_seeds(schema: Schema) -> Schema:
    assert isinstance(schema.skeleton, Node)
    (generator,) = schema.skeleton.children
    assert isinstance(generator, Node)
    (state,) = generator.children
    assert isinstance(state, Node)
    old = state.filtered(lambda key, child: key != "seed_sequence")
    return replace(
        schema, skeleton=replace(schema.skeleton, children=(replace(generator, children=(old,)),))
    )


def test_a_generator_without_a_sequence_comes_back_without_one() -> None:
    made = np.random.Generator(np.random.MT19937(1))
    made.bit_generator._legacy_seeding(3)  # type: ignore[attr-defined]  # as RandomState seeds it
    new = carry({"g": made}).inflate()["g"]
    assert new.integers(2**60) == made.integers(2**60)
    with pytest.raises(TypeError):
        new.spawn(1)


class Own(np.random.bit_generator.ISpawnableSeedSequence):
    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.zeros(n_words, dtype)

    def spawn(self, n_children: int) -> Any:
        return []


@pytest.mark.parametrize("seeds", [Own(), np.random.SeedSequence(1, pool_size=2000)])
def test_seeds_that_cannot_be_stored_are_refused_at_commit(seeds: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^s/g: a numpy Generator with the seeds .*SeedSequ"):
        carry({"g": np.random.Generator(np.random.PCG64(seeds))})


def test_a_hostile_pool_gets_no_memory() -> None:
    carried = carry({"g": np.random.default_rng(1)})
    pool = carried.schema.paths.index("s/g/seed_sequence/pool_size")
    content = [*carried.content]
    content[pool] = b"9007199254740992"
    with pytest.raises(Corrupt, match="pool"):
        Carried(carried.schema, content).inflate()
