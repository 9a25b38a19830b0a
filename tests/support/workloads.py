"""What is done to a store while it crashes, and the small stores that it is done to."""

import sqlite3
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.ids import CommitId
from ckptstore.errors import NotFound
from ckptstore.log import log
from ckptstore.repository.store_handle import CATALOG_NAME
from ckptstore.store import Store
from tests.maintenance.collecting import opened, state_of
from tests.support.checker import view_of
from tests.support.patching import small_chunks_too

STORE = "store"
CHUNK_BYTES = 65536
NEVER = 1000
FIFTH_REVISION = """
DROP TABLE statistics;
UPDATE alembic_version SET version_num = '0005';
"""
FOURTH_REVISION = f"""
{FIFTH_REVISION}
DROP TABLE replaced;
DROP INDEX commits_by_age;
DROP INDEX commits_by_run;
DROP INDEX commits_by_step;
ALTER TABLE commits DROP COLUMN place;
ALTER TABLE commits DROP COLUMN thinned;
ALTER TABLE commits DROP COLUMN lossy;
CREATE INDEX commits_by_run ON commits (run, n);
CREATE INDEX commits_by_step ON commits (run, step, n);
UPDATE alembic_version SET version_num = '0004';
"""
THIRD_REVISION = f"""
{FOURTH_REVISION}
DROP INDEX schemas_missing;
ALTER TABLE schemas DROP COLUMN data;
ALTER TABLE schemas ADD COLUMN leaves BIGINT;
CREATE INDEX schemas_missing ON schemas (number) WHERE leaves IS NULL;
CREATE TABLE leaves (schema INTEGER);
CREATE TABLE shards (n INTEGER);
UPDATE alembic_version SET version_num = '0003';
"""
FIRST_REVISION = f"""
{THIRD_REVISION}
DROP TABLE shards;
DROP TABLE entries;
UPDATE alembic_version SET version_num = '0001';
"""
"""Makes the catalog what the first revision of its tables was."""


def small(step: int) -> dict[str, Any]:
    """A small state, with the rounding of what is its own: works store that as a patch of two
    chunks."""
    state = state_of(step, own=20_000, shared=30_000)
    state["model"]["half"] = state["model"]["own"].to(torch.bfloat16)
    return state


def open_small(disk: Path) -> Store:
    return ckptstore.open(
        disk / STORE, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), threads=1
    )


@dataclass(frozen=True)
class Work:
    """Something done to a store of `commits`, of which `forgotten` are forgotten, and to which
    `before` was done, with a checkpoint every so many entries, and with a catalog on which
    `catalog` (SQL) was done."""

    do: Callable[[Store], object]
    commits: int = 3
    forgotten: tuple[int, ...] = ()
    before: Callable[[Store], object] | None = None
    checkpoint_every: int = NEVER
    catalog: str = ""

    def __call__(self, disk: Path) -> None:
        with pytest.MonkeyPatch.context() as patch, small_chunks_too():
            patch.setattr(log, "CHECKPOINT_EVERY", self.checkpoint_every)
            with open_small(disk) as store:
                self.do(store)

    def base(self, disk: Path) -> Path:
        """A disk with a store as it is before; its second commit is tagged."""
        disk.mkdir()
        if self.commits:
            with small_chunks_too(), open_small(disk) as store:
                for step in range(self.commits):
                    store.commit(small(step), step=step, tag="first" if step == 1 else ())
                if self.forgotten:
                    store.forget(self.forgotten)
                if self.before:
                    self.before(store)
        if self.catalog:
            with closing(sqlite3.connect(disk / STORE / "index" / CATALOG_NAME)) as connection:
                connection.executescript(self.catalog)
        return disk


def commit(step: int, **label: Any) -> Callable[[Store], object]:
    return lambda store: store.commit(small(step), step=step, **label)


def save_by_dcp(step: int) -> Callable[[Store], object]:
    def save(store: Store) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptstore.interop.dcp import StoreWriter

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is alone
            dcp.save(
                small(step), storage_writer=StoreWriter(store, step=step, tag=("best", "first"))
            )

    return save


def thin(store: Store) -> None:
    assert store.forget(ckptstore.KeepLast(2).thin("model/own")).thinned


def purge(store: Store) -> None:
    """A mirror gets everything; then the first commit is thinned, forgotten and collected."""
    store.push(mirror_of(store), create=True)
    thin(store)
    store.forget(store.checkout(0).id)
    store.gc(max_unused=0.0, grace_s=0)


def pull(store: Store) -> None:
    assert store.pull(mirror_of(store), 0).sent


def purge_and_pull(store: Store) -> None:
    purge(store)
    pull(store)
    for step in (4, 5):
        store.commit(small(step), step=step)
    store.forget([2, 3])


def mirror_of(store: Store) -> Path:
    return Path(store.url).parent / "mirror"


def undelete(store: Store) -> None:
    store.undelete(list(view_of(Path(store.url)).forgotten))


def checkpoint(store: Store) -> None:
    """What a thread of its own does otherwise: a tracer counts the calls of each thread, and would
    strike the first to make so many."""
    log_of_store = store._handle.log
    log_of_store.saved.write_checkpoint(log_of_store.replay())


def gc(store: Store) -> None:
    assert store.gc(max_unused=0.0, grace_s=0).copied_bytes


WORKS = {
    "a new store and its first commit": Work(commit(0), commits=0),
    "a commit": Work(commit(3, tag=("best", "first"))),
    "a save by DCP": Work(save_by_dcp(3)),
    "a commit of nothing new": Work(commit(0)),
    "a tag": Work(lambda store: store.tag("best", 0)),
    "a tag that moves": Work(lambda store: store.tag("first", 0)),
    "an untag": Work(lambda store: store.untag("first")),
    "a forget": Work(lambda store: store.forget([0]), commits=4),
    "a thinning": Work(
        lambda store: store.forget(ckptstore.KeepLast(2).thin("model/own")), commits=4
    ),
    "a pull of a commit that was purged": Work(pull, commits=4, before=purge),
    "a thinning of a commit that came again": Work(thin, commits=4, before=purge_and_pull),
    "an undelete": Work(undelete, commits=4, forgotten=(0,)),
    "a gc with repack": Work(gc, commits=4, forgotten=(0,)),
    "a checkpoint of the log": Work(lambda store: store.tag("best", 0), checkpoint_every=1),
    "a checkpoint of the log alone": Work(checkpoint),
    "a migration of the catalog": Work(lambda store: store.log(), catalog=FIRST_REVISION),
}


def contents_of(*stores: Path) -> Mapping[CommitId, Mapping[str, Any]]:
    """What was committed there: a commit's step says it."""
    contents = {}
    for place in stores:
        if not place.exists():
            continue
        with ckptstore.open(place) as store:
            for id in view_of(place).commits:
                snapshot = store.checkout(id)
                assert snapshot.step is not None
                contents[id] = small(snapshot.step)
                if any(leaf.gone for leaf in snapshot.leaves()):
                    del contents[id]["model"]["own"]
    return contents


def is_store(place: Path) -> bool:
    """Whether a store has begun to be there. Whether it is whole is for whoever opens it."""
    try:
        with opened(place):
            return True
    except NotFound:
        return False
