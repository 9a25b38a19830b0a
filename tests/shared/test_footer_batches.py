"""A host without a cache reads the footers of many packs from few objects, and rejects footers
that do not match."""

import secrets
from collections import Counter
from pathlib import Path

import pytest

from ckptstore.core.ids import footers_key
from ckptstore.errors import Corrupt
from ckptstore.objects.frames import bundle, compress, seal, unbundle
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.repository.footers import BATCH_PACKS, read_footer
from ckptstore.storage.contract import FOOTERS_BYTES_MAX
from tests.maintenance.collecting import state_of
from tests.maintenance.stores import assert_equal
from tests.shared.sites import Site

COMMITS = BATCH_PACKS // 2 + 5
"""Of two packs each."""


def unbundled(data: bytes) -> dict[str, bytes]:
    return unbundle(data, "a batch of footers", FOOTERS_BYTES_MAX)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(f"memory://{secrets.token_hex(8)}")
    with site.open(tmp_path_factory.mktemp("maker")) as store:
        for step in range(COMMITS):
            store.commit(state_of(step), step=step)
    return site


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tails of packs and batches are read."""
    asked: Counter[str] = Counter()
    for name in ("read_tail", "read"):
        real = getattr(BucketStorage, name)

        def counting(
            self: BucketStorage, key: str, *more: int, _name: str = name, _real: object = real
        ) -> object:
            asked["batches" if key.startswith("footers/") else _name] += 1
            return _real(self, key, *more)  # type: ignore[operator]

        monkeypatch.setattr(BucketStorage, name, counting)
    return asked


def test_a_host_without_a_cache_reads_a_batch_instead_of_a_hundred_footers(
    site: Site, tmp_path: Path, asked: Counter[str]
) -> None:
    with site.opened(tmp_path) as handle:
        state = handle.log.replay()
        handle.warm()
        assert len(handle.objects.index.indexed()) == len(state.packs) == 2 * COMMITS
        assert asked["batches"] == 1
        assert asked["read_tail"] <= len(state.packs) - BATCH_PACKS + 4
    with site.open(tmp_path) as store:
        for step in (0, COMMITS - 1):
            assert_equal(store.checkout(step).state_dict(), state_of(step))
        again = store.commit(state_of(3), step=1000)
        assert again.stats is not None and again.stats.new_chunks == 0


def test_a_batch_holds_the_footers_as_they_lie_in_the_packs(site: Site, tmp_path: Path) -> None:
    with site.opened(tmp_path) as handle:
        packs = handle.log.replay().packs
        tails = unbundled(handle.storage.read(footers_key(0)))
        assert sorted(tails) == sorted(packs[n].id for n in range(1, BATCH_PACKS))
        for n in range(1, BATCH_PACKS, 7):
            footer = read_footer(handle.storage, packs[n])
            assert tails[packs[n].id] == footer.tail


@pytest.mark.parametrize("wrong", ["absent", "cut", "flipped", "exchanged", "foreign"])
def test_a_batch_that_is_not_what_it_should_be_is_not_believed(
    site: Site, tmp_path: Path, asked: Counter[str], wrong: str
) -> None:
    with site.opened(tmp_path / "mine") as handle:
        storage, good = handle.storage, handle.storage.read(footers_key(0))
        tails = unbundled(good)
        names = list(tails)
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        exchanged = dict(zip(names, [bytes(72), *list(tails.values())[1:]], strict=True))
        spoilt = {
            "cut": good[:-9],
            "flipped": bytes(flipped),
            "exchanged": bundle(exchanged),
            "foreign": bundle({"x": b"y"}),
        }
        storage.delete(footers_key(0))
        if wrong in spoilt:
            storage.put(footers_key(0), spoilt[wrong])
        asked.clear()
        handle.warm()
        assert len(handle.objects.index.indexed()) == 2 * COMMITS
        assert asked["read_tail"] >= (1 if wrong == "exchanged" else BATCH_PACKS)
        storage.put(footers_key(0), good)


def test_an_index_that_is_made_anew_is_made_from_the_packs_themselves(
    site: Site, tmp_path: Path, asked: Counter[str]
) -> None:
    with site.open(tmp_path) as store:
        asked.clear()
        store.reindex()
    assert asked["batches"] == 0
    assert asked["read_tail"] >= 2 * COMMITS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"0" * 64 + b"\n",
        seal(b"no frame"),
        seal(compress(b"x" * 43)),  # ends within a name
        seal(compress(b"x".ljust(40, b"\0") + bytes([4, 0, 0, 0]) + b"abc")),  # within a part
    ],
)
def test_an_invalid_batch_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unbundled(data)


def test_batches_of_packs_that_are_all_gone_are_deleted(tmp_path: Path) -> None:
    site = Site(f"memory://{secrets.token_hex(8)}")
    site.open(tmp_path).close()
    with site.opened(tmp_path) as handle:
        storage = handle.storage
        storage.put(footers_key(7), bundle({}))
    with site.open(tmp_path) as store:
        for step in range(BATCH_PACKS // 2):
            store.commit(state_of(step), step=step)
    assert [key for key, _ in storage.list("footers/")] == [footers_key(0)]
