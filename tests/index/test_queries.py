"""Refs are resolved and sums are right, through either connection."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import reduce
from pathlib import Path
from random import Random

import pytest

from ckptstore.core.ids import CommitId, StoreId
from ckptstore.core.model import CommitInfo
from ckptstore.core.refs import find, parse_ref
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.index.catalog import Catalog
from ckptstore.index.catalog_sqlite import open_catalog
from ckptstore.index.queries import Point, Queries, RunInfo, TagInfo, Totals
from ckptstore.log.entries import Condemn, Forget, Tag
from ckptstore.log.resolve import resolve
from ckptstore.log.state import State, apply, genesis
from tests.index.building import STORE, LogBuilder

ALIKE = "abcdef0" + "1" * 57, "abcdef0" + "2" * 57
DIGITS = "123456" + "0" * 58


def history() -> LogBuilder:
    """Two runs; step 2 of `main` was made twice, step 4 is forgotten, the root of run `b` was
    purged."""
    log = LogBuilder()
    first = log.commit(step=1, metrics=[("loss", 3.0), ("acc", 0.5)], id_="1" * 64, packs=[1, 2])
    log.commit(step=2, parents=[first], metrics=[("loss", math.nan)], id_=ALIKE[0])
    second = log.commit(
        step=2, parents=[first], metrics=[("loss", 1.0)], id_=ALIKE[1], tags=["good"]
    )
    third = log.commit(
        step=3, parents=[second], metrics=[("loss", 1.0), ("acc", math.inf)], id_="3" * 64
    )
    fourth = log.commit(step=4, parents=[third], metrics=[("loss", 0.1)], id_="4" * 64)
    root = log.commit(run="b", step=1, id_="5" * 64)
    log.commit(run="b", step=7, parents=[root], metrics=[("loss", 0.5)], id_=DIGITS)
    log.append(
        Tag("prod/eu", third, frozenset()),
        Forget((fourth, root), "policy"),
        Condemn(9, 0, frozenset({2}), (root,)),
    )
    return log


@pytest.fixture(params=["sqlite3", "sqlalchemy"])
def queries(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Queries]:
    with closing(Catalog.open(tmp_path / "catalog.sqlite", STORE)) as catalog:
        catalog.fold(history().entries)
        if request.param == "sqlalchemy":
            yield catalog.queries()
            return
        opened = open_catalog(tmp_path / "catalog.sqlite", STORE)
        assert opened
        with closing(opened):
            yield opened


def folded(log: LogBuilder) -> State:
    return reduce(apply, log.entries, genesis(STORE, 1))


RESOLVED: list[tuple[str | int, str | None, str]] = [
    (1, "main", "1" * 64),
    (2, "main", ALIKE[1]),
    ("2", None, ALIKE[1]),
    ("b@7", "main", DIGITS),
    (7, None, DIGITS),
    ("latest", "main", "3" * 64),
    ("latest", None, DIGITS),
    ("b@latest", "main", DIGITS),
    ("good", "main", ALIKE[1]),
    ("prod/eu", "main", "3" * 64),
    ("333333", "main", "3" * 64),
    ("444444", "main", "4" * 64),
    (ALIKE[0], "main", ALIKE[0]),
    ("abcdef02", "main", ALIKE[1]),
    ("123456", "main", DIGITS),
    ("best:loss", "main", "3" * 64),
    ("best:loss:max", "main", "1" * 64),
    ("best:acc:max", "main", "3" * 64),
    ("best:loss", None, DIGITS),
    ("latest~1", "main", ALIKE[1]),
    ("latest~2", "main", "1" * 64),
    ("prod/eu~~", "main", "1" * 64),
    ("444444~", "main", "3" * 64),
]


@pytest.mark.parametrize(("ref", "run", "commit"), RESOLVED, ids=str)
def test_a_ref_is_resolved_by_catalog_and_log(
    queries: Queries, ref: str | int, run: str | None, commit: str
) -> None:
    for commits in (queries, folded(history())):
        assert find(commits, parse_ref(ref), run) == commit


REFUSED: list[tuple[str | int, type[CkptStoreError], str]] = [
    (4, NotFound, "step 4 in run 'main' is forgotten.*; the nearest steps are 1, 2, 3"),
    ("nope@3", NotFound, "in run 'nope'; runs with commits: b, main"),
    ("nope@latest", NotFound, "runs with commits: b, main"),
    ("god", NotFound, "no tag 'god'; there are the tags good"),
    ("ffffff", NotFound, "no tag or commit 'ffffff'"),
    ("987654", NotFound, "no commit of step 987654"),
    ("abcdef", InvalidInput, r"abcdef011111.*abcdef022222.*more digits"),
    ("best:nope", NotFound, "there are acc, loss"),
    ("b@best:acc", NotFound, "no commit in run 'b' has a metric 'acc'; run 'main' has it: 'main@b"),
    ("last", NotFound, "no tag 'last'; did you mean 'latest'"),
    ("latest~3", NotFound, "2 generations"),
    ("b@7~1", NotFound, "555555555555, has been purged"),
]


@pytest.mark.parametrize(("ref", "error", "words"), REFUSED, ids=str)
def test_an_unknown_ref_is_refused_with_near_names(
    queries: Queries, ref: str | int, error: type[CkptStoreError], words: str
) -> None:
    state = folded(history())
    with pytest.raises(error, match=words):
        resolve(state, ref, "main")
    with pytest.raises(error, match=words):  # as `find_id` asks: the catalog, then the log
        find(queries, parse_ref(ref), "main") or resolve(state, ref, "main")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("generations", [3, 100_000_000])
def test_a_circle_of_parents_is_not_walked_for_ever(tmp_path: Path, generations: int) -> None:
    log, ids = LogBuilder(), ["1" * 64, "2" * 64]
    for commit, parent in zip(ids, ids[::-1], strict=True):
        log.commit(id_=commit, parents=[CommitId(parent)])
    with closing(Catalog.open(tmp_path / "catalog.sqlite", STORE)) as catalog:
        catalog.fold(log.entries)
        for commits in (catalog.queries(), folded(log)):
            assert find(commits, parse_ref("latest~2"), "main") == ids[1]
            with pytest.raises(Corrupt, match="lead back to it"):
                find(commits, parse_ref(f"latest~{generations}"), "main")


def test_an_empty_store_says_so() -> None:
    for ref in ("latest", 3, "tag", "best:loss", "abcdef12"):
        with pytest.raises(NotFound, match=r"no commits|none has metrics"):
            resolve(folded(LogBuilder()), ref, None)


def test_the_log_is_newest_first(queries: Queries) -> None:
    assert [info.n for info in queries.log()] == [7, 4, 3, 2, 1]
    assert [info.n for info in queries.log("main", 2)] == [4, 3]
    assert [info.n for info in queries.log(forgotten=True)] == [7, 5, 4, 3, 2, 1]
    assert queries.log("nope") == []
    assert queries.log(limit=0) == []


def test_a_commit_has_everything_that_the_log_says_of_it(queries: Queries) -> None:
    info = queries.commit(CommitId("3" * 64))
    assert (info.run, info.step, info.parents, info.tags, info.metrics) == (
        "main",
        3,
        (ALIKE[1],),
        ("prod/eu",),
        {"acc": math.inf, "loss": 1.0},
    )
    assert (
        info.n,
        info.time_ns,
        info.logical_bytes,
        info.new_bytes,
        info.leaves,
        info.message,
    ) == (4, 4000, 1000, 10, 3, "message")
    assert info.schemas == {"model": "d" * 64}
    assert not info.forgotten
    assert queries.commit(CommitId("4" * 64)).forgotten
    assert math.isnan(queries.commit(CommitId(ALIKE[0])).metrics["loss"])


def test_runs_tags_and_totals(queries: Queries) -> None:
    assert queries.runs() == [
        RunInfo("b", 1, DIGITS, 7, 7000),
        RunInfo("main", 4, "3" * 64, 3, 4000),
    ]
    assert queries.tags() == [
        TagInfo("good", ALIKE[1], "main", 2),
        TagInfo("prod/eu", "3" * 64, "main", 3),
    ]
    assert queries.totals() == Totals(5, 1, 2, 2)


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_points_have_the_most_frequent_metric_of_their_run(
    tmp_path: Path, seed: int, limit: int
) -> None:
    random, log, path = Random(seed), LogBuilder(), tmp_path / "catalog.sqlite"
    shares = {name: random.random() for name in ("Loss", "a", "loss", "train/loss", "é")}
    commits = [
        log.commit(
            run=random.choice("abc"),
            step=step,
            metrics=[
                (name, random.choice((1.0, math.nan, -math.inf)))
                for name, share in shares.items()
                if random.random() < share
            ],
        )
        for step in range(40)
    ]
    log.append(Forget(tuple(random.sample(commits, 10)), "policy"))
    with closing(Catalog.open(path, STORE)) as catalog:
        catalog.fold(log.entries)
        opened = open_catalog(path, STORE)
        assert opened
        with closing(opened):
            for queries in (opened, catalog.queries()):
                assert queries.points(limit) == as_points(queries.log(limit=limit))


def as_points(infos: Sequence[CommitInfo]) -> list[Point]:
    points = list[Point]()
    for info in infos:
        counts = Counter(name for each in infos if each.run == info.run for name in each.metrics)
        ranked = sorted(counts, key=lambda name: (-counts[name], "loss" not in name, name))
        metric = next((name for name in ranked[:1] if name in info.metrics), None)
        value = info.metrics[metric] if metric else math.nan
        points.append(
            Point(
                *(info.id, info.run, info.time_ns, info.logical_bytes, info.new_bytes),
                metric,
                None if math.isnan(value) else value,
            )
        )
    return points


def test_a_catalog_of_another_store_or_none_at_all_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    assert open_catalog(path, STORE) is None
    with closing(Catalog.open(path, STORE)):
        pass
    assert open_catalog(path, StoreId("6" * 32)) is None
    path.write_bytes(b"no database" * 1000)
    assert open_catalog(path, STORE) is None


def test_asking_needs_no_sqlalchemy(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    with closing(Catalog.open(path, STORE)) as catalog:
        catalog.fold(history().entries)
    code = (
        "import sys; from ckptstore.index.catalog_sqlite import open_catalog; "
        f"print(len(open_catalog({str(path)!r}, {STORE!r}).log()),"
        " {'sqlalchemy', 'numpy', 'lmdb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "set()"]


def test_a_metric_that_is_nan_everywhere_is_said_to_be() -> None:
    log = LogBuilder()
    log.commit(step=1, metrics=[("loss", math.nan)], id_="1" * 64)
    with pytest.raises(NotFound, match=r"every commit in run .main. .* .loss. has NaN for it"):
        resolve(folded(log), "best:loss", "main")
