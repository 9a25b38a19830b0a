"""What a gc rewrites pays: in bytes freed, or in objects less."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.core.config import MIB
from ckptstore.maintenance.gc.costs import MANY_PACKS, MERGE_PACKS, Choice, choose
from ckptstore.maintenance.gc.mark import PackUse
from ckptstore.maintenance.retention import KeepBest, KeepEverySteps, KeepLast
from tests.maintenance.simulated_store import (
    BUCKET,
    DISK,
    Place,
    Training,
    a_year,
    training_of,
    use_of,
)

PLACES = st.sampled_from((DISK, BUCKET))


def chosen(
    uses: list[PackUse], place: Place, max_unused: float = 0.05, budget: int | None = None
) -> Choice:
    return choose(
        uses,
        max_unused=max_unused,
        max_repack_bytes=budget,
        pack_bytes=place.pack_bytes,
        prices=place.prices,
    )


def live_packs(count: int, nbytes: int, *, metadata: bool = False) -> list[PackUse]:
    return [use_of(n, [nbytes], [True], metadata=metadata) for n in range(count)]


@pytest.mark.parametrize("place", [DISK, BUCKET])
@pytest.mark.parametrize("nbytes", [4 * MIB, 24 * MIB, 60 * MIB])
def test_live_packs_as_commits_write_them_are_left_alone(place: Place, nbytes: int) -> None:
    choice = chosen(live_packs(32, nbytes), place)
    assert not choice.groups
    assert all(not rewrite.chosen for rewrite in choice.rewrites)


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("place", [DISK, BUCKET])
@pytest.mark.parametrize(("packs", "freed_packs"), [(MERGE_PACKS, MERGE_PACKS), (MANY_PACKS, 0)])
def test_many_tiny_packs_are_merged_and_few_are_not(
    place: Place, metadata: bool, packs: int, freed_packs: int
) -> None:
    """Many is what the bytes freed pay for, or else a listing's worth."""
    freed = [use_of(5000 + n, [5_000], [False], metadata=metadata) for n in range(freed_packs)]
    assert not chosen([*freed, *live_packs(packs - 1, 5_000, metadata=metadata)], place).groups
    assert not chosen(
        [*freed[4:], *live_packs(MERGE_PACKS, 5_000, metadata=metadata)], place
    ).groups
    (rewrite,) = chosen([*freed, *live_packs(packs, 5_000, metadata=metadata)], place).rewrites
    files = 2 if metadata else 1
    assert (rewrite.why, rewrite.chosen, rewrite.packs) == ("small", True, packs)
    assert rewrite.written_bytes == files * rewrite.read_bytes == files * packs * 5_000
    whole = place.prices.object_bytes
    assert rewrite.objects == files * (packs - -(-packs * 5_000 // (whole + 5_000)))


def test_a_gc_with_a_budget_merges_what_does_not_pay() -> None:
    packs = live_packs(32, 24 * MIB)
    (left,) = chosen(packs, DISK).rewrites
    assert (left.packs, left.written_bytes, left.objects) == (32, 768 * MIB, 28)
    assert "leave 32 small packs: to merge them would write 768 MiB for 28 objects" in str(left)
    assert [len(each) for each in chosen(packs, DISK, budget=240 * MIB).groups] == [10]
    assert [len(each) for each in chosen(packs, DISK, budget=9999 * MIB).groups] == [10, 10, 10, 2]


tables = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from((1, 900, 70_000, 300_000, 9 * MIB)), st.booleans()),
            min_size=1,
            max_size=6,
        ),
        st.booleans(),
    ),
    max_size=60,
)


@given(tables, PLACES, st.sampled_from((0.0, 0.05, 0.3)))
def test_no_more_is_dead_than_was_asked_for_and_no_copy_is_superfluous(
    table: list[tuple[list[tuple[int, bool]], bool]], place: Place, max_unused: float
) -> None:
    uses = [
        use_of(n, [size for size, _ in rows], [live for _, live in rows], metadata=metadata)
        for n, (rows, metadata) in enumerate(table)
    ]
    choice = chosen(uses, place, max_unused)
    allowed = max_unused * sum(use.pack.stored_bytes for use in uses if not use.dead)
    assert choice.left_bytes <= allowed
    for rewrite in choice.rewrites:
        if rewrite.why == "small":
            assert rewrite.pays(place.prices) or not rewrite.chosen
    sparse = [rewrite for rewrite in choice.rewrites if rewrite.why == "sparse"]
    if sparse:
        assert choice.left_bytes + sum(each.freed_bytes for each in choice.rewrites) > allowed
    assert {use.number for group in choice.groups for use in group} <= {
        use.number for use in uses if not use.dead
    }


# -- over the life of a store

YEARS = [(DISK, MIB), (BUCKET, 8 * MIB)]
"""Places, and the least bytes of a layer there."""


@pytest.mark.parametrize(("place", "least_bytes"), YEARS)
@pytest.mark.parametrize("scattered", [0.0, 0.1])
@settings(max_examples=3, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_in_a_year_gcs_write_no_more_than_they_free(
    place: Place, least_bytes: int, scattered: float, seed: int
) -> None:
    training = training_of(seed, least_bytes=least_bytes, scattered=scattered)
    store = a_year(training, place, seed)
    assert store.written_bytes <= store.freed_bytes
    assert store.most_unused <= 0.05


@pytest.mark.parametrize("place", [DISK, BUCKET])
@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    least_bytes=st.sampled_from((5_000, 50_000)),
    scattered=st.sampled_from((0.0, 0.02, 0.1)),
)
def test_in_a_year_of_tiny_commits_gcs_write_no_more_than_they_free(
    place: Place, seed: int, least_bytes: int, scattered: float
) -> None:
    training = training_of(seed, least_bytes=least_bytes, scattered=scattered)
    store = a_year(training, place, seed)
    assert store.written_bytes <= store.freed_bytes
    assert store.most_unused <= 0.05


@pytest.mark.parametrize("place", [DISK, BUCKET])
@settings(max_examples=4, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    patched=st.sampled_from((0.001, 0.02, 0.1)),
    gc_every=st.sampled_from((1, 7, 30)),
    last=st.sampled_from((3, 20, 100)),
)
def test_in_a_year_of_patches_gcs_write_no_more_than_they_free(
    place: Place, seed: int, patched: float, gc_every: int, last: int
) -> None:
    """Commits that stay need the patches of those that were forgotten: these were merged."""
    training = Training(
        layer_bytes=(2 * MIB, 2 * MIB),
        cadence=(1, 1),
        threads=1,
        policies=(KeepLast(last), KeepEverySteps(50)),
        thin_after=0,
        gc_every=gc_every,
        patched=patched,
    )
    store = a_year(training, place, seed)
    assert store.written_bytes <= store.freed_bytes


@pytest.mark.parametrize("place", [DISK, BUCKET])
def test_objects_stay_few_though_nothing_is_ever_freed(place: Place) -> None:
    training = Training(
        layer_bytes=(MIB,),
        cadence=(1,),
        threads=1,
        policies=(KeepLast(10**6),),
        thin_after=0,
        gc_every=250,
        patched=0.02,
    )
    store = a_year(training, place, 0, commits=2500)
    files_a_commit, whole_chunks = 3, 2500 // 64
    assert store.objects() < files_a_commit * (MANY_PACKS + training.gc_every) + whole_chunks * 2
    assert store.written_bytes < store.bytes()
    assert store.objects() + store.objects_less == files_a_commit * 2500


@pytest.mark.parametrize("place", [DISK, BUCKET])
def test_a_policy_that_keeps_fewer_commits_never_has_theirs_merged(place: Place) -> None:
    """Adapters, of which a daily gc left the newest 50: they were merged, to be sparse soon."""
    training = Training(
        layer_bytes=(10_000, 30_000, 60_000),
        cadence=(1, 1, 1),
        threads=1,
        policies=(KeepLast(50), KeepBest("loss", n=10)),
        thin_after=0,
        gc_every=1,
    )
    store = a_year(training, place, 0)
    assert store.written_bytes <= 0.1 * store.freed_bytes


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("place", "least_bytes"), YEARS)
@pytest.mark.parametrize("scattered", [0.0, 0.02, 0.1])
def test_in_many_years_gcs_write_no_more_than_they_free(
    place: Place, least_bytes: int, scattered: float
) -> None:
    shares = []
    for seed in range(100):
        training = training_of(seed, least_bytes=least_bytes, scattered=scattered)
        store = a_year(training, place, seed)
        assert store.most_unused <= 0.05
        shares.append(store.written_bytes / max(store.freed_bytes, 1))
    shares.sort()
    print(f"written per byte freed: median {shares[50]:.3f}, most {shares[-1]:.2f}")
    assert shares[-1] <= 1.0
