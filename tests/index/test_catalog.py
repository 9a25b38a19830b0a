"""The catalog folds the log into tables, in portions of any size."""

import math
import multiprocessing
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.core.ids import CommitId
from ckptstore.core.refs import Best
from ckptstore.errors import NotFound
from ckptstore.index import catalog_sqlite
from ckptstore.index.catalog import Catalog
from ckptstore.log.entries import (
    Condemn,
    Delete,
    Entry,
    Forget,
    Moved,
    Over,
    Register,
    Settings,
    Tag,
    Undelete,
    origin,
)
from ckptstore.log.state import State, apply, genesis
from ckptstore.objects.schema import encode_schema
from tests.index.building import MODEL, OPTIMIZER, STORE, LogBuilder, flat_schema, record

spawn = multiprocessing.get_context("spawn")

QUERY_STEPS = 5_000


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog.open(tmp_path / "index" / "catalog.sqlite", STORE)) as opened:
        yield opened


def dump(catalog: Catalog) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table that entries fold into."""
    ask = catalog.queries()._ask
    names = (
        "position",
        "commits",
        "parents",
        "metrics",
        "tags",
        "packs",
        "schemas",
        "commit_trees",
        "replaced",
    )
    return {name: sorted(map(tuple, ask(f"SELECT * FROM {name}", {})), key=repr) for name in names}


def steps(catalog: Catalog, work: Callable[[], object]) -> int:
    """What `work` cost SQLite: instructions of its virtual machine, in whole hundreds. The same on
    every machine, however busy."""
    connection = catalog._opened().connection
    hundreds = count()
    connection.set_progress_handler(lambda: next(hundreds) < 0, 100)
    try:
        assert work()
    finally:
        connection.set_progress_handler(None, 0)
    return next(hundreds) * 100


def eventful(seed: int, length: int) -> list[Entry]:
    """A log with entries of all kinds, each of which `check` would let pass or nearly so."""
    rng, log = random.Random(seed), LogBuilder(seed)
    live: list[CommitId] = []
    soft: list[CommitId] = []
    packs, condemned, next_pack = set[int](), set[int](), 1
    for n in range(length):
        kind = rng.choice(
            (
                "commit",
                "commit",
                "commit",
                "thin",
                "tag",
                "forget",
                "undelete",
                "condemn",
                "register",
                "delete",
                "other",
            )
        )
        some = frozenset(rng.sample(sorted(packs), min(len(packs), 3)))
        if kind == "commit" or not live:
            names = [f"t{rng.randrange(4)}"] if rng.random() < 0.3 else []
            schemas = [("model", rng.choice((MODEL, "c" * 64))), ("optimizer", OPTIMIZER)]
            measured = [("loss", rng.choice((rng.random(), math.nan, math.inf)))]
            new = range(next_pack, next_pack + rng.randrange(3))
            live.append(
                log.commit(
                    run=rng.choice("ab"),
                    step=n,
                    parents=live[-1:],
                    metrics=measured,
                    tags=names,
                    packs=new,
                    reused=some,
                    schemas=schemas,
                )
            )
            next_pack += len(new)
            packs |= set(new)
            condemned -= some
        elif kind == "thin":
            old = rng.choice(live)
            live[live.index(old)] = log.thin(old)
            soft.append(old)
        elif kind == "tag":
            log.append(Tag(f"t{rng.randrange(4)}", rng.choice((*live, None)), some))
            condemned -= some
        elif kind == "forget":
            gone = rng.sample(live, min(2, len(live)))
            live = [commit for commit in live if commit not in gone]
            soft += gone
            log.append(Forget(tuple(gone), "test"))
        elif kind == "undelete" and soft:
            back = soft.pop(rng.randrange(len(soft)))
            log.append(Undelete((back,), some))
            rows = folded(log.entries).commits
            by_age = sorted(rows, key=lambda commit: rows[commit].age)
            live = [commit for commit in by_age if not rows[commit].soft]
            soft = [commit for commit in by_age if rows[commit].soft]
            condemned -= some
        elif kind == "condemn":
            purge, soft = soft[:1], soft[1:]
            condemned |= some
            log.append(Condemn(n, 0, some, tuple(purge)))
        elif kind == "register":
            log.append(
                Register(record(next_pack).id[:24], n, 0, (record(next_pack),), some - condemned)
            )  # type: ignore[arg-type]
            packs.add(next_pack)
            condemned |= some
            next_pack += 1
        elif kind == "delete" and condemned:
            log.append(Delete(frozenset(condemned)))
            packs -= condemned
            condemned = set()
        else:
            log.append(rng.choice((Over(()), Settings((("a", 1),)), Moved("log/", 2))))
    return log.entries


def folded(entries: list[Entry]) -> State:
    state = genesis(STORE, 1)
    for entry in entries:
        state = apply(state, entry)
    return state


def test_an_empty_catalog_stands_at_the_log_s_origin(catalog: Catalog) -> None:
    assert catalog.position() == origin(STORE)
    assert catalog.queries().log() == []
    assert not catalog._opened().in_memory


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 60), max_size=4))
def test_the_catalog_says_what_the_fold_of_the_state_says(seed: int, cuts: list[int]) -> None:
    entries = eventful(seed, 60)
    state, catalog = folded(entries), Catalog.temporary(STORE)
    for cut in (*sorted(cuts), len(entries)):
        assert catalog.fold(entries[:cut])
    queries = catalog.queries()
    commits = {info.id: info for info in queries.log(forgotten=True)}
    assert catalog.position() == state.position
    assert {
        (c, i.n, i.run, i.step, i.parents, i.forgotten, i.time_ns, i.thinned)
        for c, i in commits.items()
    } == {
        (c, r.n, r.run, r.step, state.parents_of(c), r.soft != 0, r.time_ns, r.thinned)
        for c, r in state.commits.items()
    }
    assert list(commits) == sorted(commits, key=lambda c: state.commits[c].age, reverse=True)
    for run in ("a", "b", None):
        assert queries.newest(run) == state.newest(run, None)
        found = queries.best(Best("loss", "min", None), run)
        assert found == state.best(Best("loss", "min", None), run)
    assert {
        (p.number, p.id, p.bytes, p.chunks, p.metadata, not p.condemned) for p in queries.packs()
    } == {(number, *pack[:5]) for number, pack in state.packs.items()}
    assert {(tag.name, tag.commit) for tag in queries.tags()} <= set(state.tags.items())
    assert repr({c: i.metrics for c, i in sorted(commits.items())}) == repr(
        {c: dict(r.metrics) for c, r in sorted(state.commits.items())}
    )
    assert set(queries.missing_schemas()) == {
        schema for info in commits.values() for schema in info.schemas.values()
    }


def test_folding_in_any_portions_again_and_again_gives_the_same_rows(
    tmp_path: Path, seed: int
) -> None:
    entries, rng = eventful(seed, 1200), random.Random(seed)
    with (
        closing(Catalog.open(tmp_path / "a", STORE)) as at_once,
        closing(Catalog.open(tmp_path / "b", STORE)) as bit_by_bit,
    ):
        assert at_once.fold(iter(entries))
        while (n := bit_by_bit.position().n) < len(entries):
            start = max(0, n - rng.randrange(5))
            assert bit_by_bit.fold(entries[start : n + rng.randrange(1, 40)])
        a, b = dump(at_once), dump(bit_by_bit)
    assert a == b


def test_entries_that_do_not_follow_are_not_folded(catalog: Catalog) -> None:
    entries, others = eventful(1, 10), eventful(2, 20)
    assert not catalog.fold(entries[1:])
    assert catalog.fold(entries)
    assert not catalog.fold(others[10:])
    assert catalog.position() == entries[-1].position


def test_a_purged_commit_leaves_nothing_behind(catalog: Catalog) -> None:
    log = LogBuilder()
    kept = log.commit(schemas=[("model", MODEL)])
    gone = log.commit(
        parents=[kept],
        metrics=[("loss", 1.0)],
        schemas=[("model", MODEL), ("optimizer", OPTIMIZER)],
    )
    catalog.fold(log.entries)
    catalog.add_schemas({OPTIMIZER: encode_schema(flat_schema(3))})
    before = dump(catalog)
    log.append(Forget((gone,), "test"), Condemn(3, 0, frozenset(), (gone,)))
    catalog.fold(log.entries)
    assert [info.id for info in catalog.queries().log(forgotten=True)] == [kept]
    assert catalog.queries().schema(OPTIMIZER) is None
    assert catalog.missing_schemas() == [MODEL]
    after = dump(catalog)
    assert len(before["schemas"]) == 2
    assert len(after["schemas"]) == 1
    assert not after["parents"]
    assert not after["metrics"]


def test_a_reused_pack_is_condemned_no_more(catalog: Catalog) -> None:
    log = LogBuilder()
    log.commit(packs=[1, 2])
    log.append(Condemn(1, 0, frozenset({1, 2}), ()))
    catalog.fold(log.entries)
    assert [pack.condemned for pack in catalog.queries().packs()] == [True, True]
    log.commit(reused=[2])
    catalog.fold(log.entries)
    assert [(pack.number, pack.condemned) for pack in catalog.queries().packs()] == [
        (1, True),
        (2, False),
    ]
    log.append(Delete(frozenset({1})))
    catalog.fold(log.entries)
    assert [pack.number for pack in catalog.queries().packs()] == [2]


def test_schemas_that_commits_name_are_added_and_no_others(catalog: Catalog) -> None:
    log = LogBuilder()
    log.commit()
    catalog.fold(log.entries)
    schema = flat_schema(5)
    assert catalog.missing_schemas() == [MODEL]
    assert catalog.queries().schema(MODEL) is None
    for _ in range(2):
        assert catalog.add_schemas({MODEL: encode_schema(schema)})
    assert catalog.missing_schemas() == []
    assert catalog.queries().schema(MODEL) == schema
    assert catalog.add_schemas({"f" * 64: encode_schema(schema)})
    assert catalog.queries().schema("f" * 64) is None


def test_twenty_thousand_leaves_are_added_in_few_steps_and_lie_compactly(
    catalog: Catalog, tmp_path: Path
) -> None:
    log = LogBuilder()
    log.commit()
    catalog.fold(log.entries)
    data = encode_schema(flat_schema(20_000))
    assert steps(catalog, lambda: catalog.add_schemas({MODEL: data})) < QUERY_STEPS
    catalog.close()
    stored_bytes = (tmp_path / "index" / "catalog.sqlite").stat().st_size
    assert stored_bytes < len(data) + 250_000


def test_folding_a_commit_costs_the_same_after_a_long_history(
    catalog: Catalog, tmp_path: Path
) -> None:
    log = LogBuilder()
    for n in range(1, 4001):
        log.commit(
            step=n,
            metrics=[("loss", 1 / n)],
            tags=["newest"],
            packs=[n],
            reused=range(max(1, n - 20), n),
        )
    with closing(Catalog.open(tmp_path / "old" / "catalog.sqlite", STORE)) as old:
        old.fold(log.entries[:3900])

        catalog.fold(log.entries[:40])
        early = max(
            steps(catalog, lambda i=i: catalog.fold([log.entries[i]])) for i in range(40, 100)
        )
        late = max(steps(old, lambda i=i: old.fold([log.entries[i]])) for i in range(3900, 3960))
        print(f"{early} steps, {late} after 3,900 commits")
        assert late <= 1.2 * early


def test_the_log_of_ten_thousand_commits_is_asked_without_looking_through_it(
    catalog: Catalog,
) -> None:
    log = LogBuilder()
    for n in range(10_000):
        log.commit(step=n, run=f"run{n % 3}", metrics=[("loss", 1 / (n + 1))])
    catalog.fold(log.entries)
    queries = catalog.queries()
    for ask in (
        lambda: queries.log(limit=20),
        lambda: queries.log("run1", 20),
        lambda: [queries.best(Best("loss"), "run2")],
    ):
        taken = steps(catalog, lambda ask=ask: ask())
        print(f"{taken} steps")
        assert taken < QUERY_STEPS


def test_threads_fold_and_ask_at_once(catalog: Catalog) -> None:
    entries = eventful(3, 300)
    threads = [
        Thread(target=lambda: [catalog.fold(entries[:n]) for n in range(0, 301, 10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(catalog.queries().log(limit=5)) <= 5
    for thread in threads:
        thread.join()
    assert catalog.position() == entries[-1].position


def _fold_in_process(path: Path, seed: int) -> None:
    entries = eventful(5, 200)
    rng = random.Random(seed)
    with closing(Catalog.open(path, STORE)) as catalog:
        while (n := catalog.position().n) < len(entries):
            catalog.fold(entries[n : n + rng.randrange(1, 60)])


def test_processes_create_and_fold_one_catalog_at_once(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    workers = [spawn.Process(target=_fold_in_process, args=(path, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 3
    with closing(Catalog.open(path, STORE)) as shared, closing(Catalog.temporary(STORE)) as alone:
        assert not shared._opened().in_memory
        alone.fold(eventful(5, 200))
        assert dump(shared) == dump(alone)


def test_a_busy_catalog_is_not_folded_and_not_thrown_away(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = eventful(1, 10)
    catalog.fold(entries[:5])
    path = tmp_path / "index" / "catalog.sqlite"
    catalog.close()
    monkeypatch.setattr("ckptstore.index.catalog.LOCK_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not catalog.fold(entries)
        assert catalog.position().n == 5
        other.execute("ROLLBACK")
    assert catalog.fold(entries)


def test_a_forked_child_opens_its_own_connection(catalog: Catalog) -> None:
    entries = eventful(1, 40)
    catalog.fold(entries[:20])
    child = multiprocessing.get_context("fork").Process(
        target=lambda: exit(0 if catalog.fold(entries) else 1)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert catalog.position() == entries[-1].position


def test_a_fork_waits_for_a_catalog_that_another_thread_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has locks of its own: a child that is forked within them waits for ever."""
    connect, within, connected = sqlite3.connect, Event(), list[bool]()

    def slow(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        if not within.is_set():
            within.set()
            while not catalog_sqlite.calls._halting:  # until the fork waits
                time.sleep(0.001)
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connected.append(True)
        return connection

    monkeypatch.setattr("ckptstore.index.catalog.sqlite3.connect", slow)
    place = tmp_path / "catalog.sqlite"
    opening = Thread(target=lambda: Catalog.open(place, STORE).close(), daemon=True)
    opening.start()
    assert within.wait(60)
    child = multiprocessing.get_context("fork").Process(target=lambda: exit(0 if connected else 1))
    child.start()
    opening.join(60)
    child.join(60)
    assert child.exitcode == 0


def test_a_catalog_that_another_process_replaced_is_opened_again(
    catalog: Catalog, tmp_path: Path
) -> None:
    entries = eventful(1, 10)
    catalog.fold(entries)
    with closing(Catalog.open(tmp_path / "index" / "catalog.sqlite", STORE)) as other:
        other.reset()
        assert other.position().n == 0
        other.fold(entries[:4])
        assert catalog.position().n == 4


def test_a_commit_that_is_not_there_is_not_found(catalog: Catalog) -> None:
    with pytest.raises(NotFound, match="purged"):
        catalog.queries().commit(CommitId("f" * 64))
