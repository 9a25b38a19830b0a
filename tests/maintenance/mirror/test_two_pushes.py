"""Two pushes into one mirror at once."""

from pathlib import Path

import ckptstore
from tests.maintenance.stores import make_store


def test_tags_of_a_commit_that_another_push_brings_first_arrive(tmp_path: Path) -> None:
    place, target = make_store(tmp_path / "store"), tmp_path / "target"
    with ckptstore.open(place) as store, ckptstore.open(place) as other:
        store.push(target, 0, create=True)
        store.tag("mine", 1)

        def meanwhile(phase: str, done: int, total: int) -> None:
            if not done:
                other.push(target, tags=False)

        assert not store.push(target, progress=meanwhile).sent
        with ckptstore.open(target) as there:
            assert there.tags() == store.tags()
