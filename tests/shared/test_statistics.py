"""Statistics in a catalog that a database keeps for many hosts."""

from pathlib import Path

import pytest
import torch

from ckptstore.core.statistics import Moments, has_statistics
from ckptstore.store import internals_of
from tests.shared.sites import Site
from tests.support.servers.postgres import PostgresServer


@pytest.fixture
def site(tmp_path: Path, postgres: PostgresServer) -> Site:
    return Site(str(tmp_path / "store"), None, {"index": postgres.new_url()})


def test_statistics_take_the_place_of_moments_and_stay(site: Site, tmp_path: Path) -> None:
    with site.open(tmp_path / "host") as store:
        made = store.commit({"w": torch.ones(90_000)}, step=1, stats=True)
        assert type(made.stats.tensors["w"]) is Moments
        handle = internals_of(store).handle
        assert store.history("w")[0].max == 1.0
        key = b"some chunk"
        whole = bytes(64)
        for data in (Moments().encode(), whole, Moments().encode()):
            handle.keep_statistics({key: data})
        kept = handle.queries().statistics([key])[key]
        assert kept == whole
        assert has_statistics(kept)
