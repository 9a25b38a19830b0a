"""A system call that fails once, at any place of a commit or a restore: an error that says so,
nothing lost, and the next try succeeds."""

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from shutil import copytree, rmtree

import pytest

import ckptstore
from ckptstore.core.ids import log_key
from ckptstore.log.log import APPEND_TIMEOUT_S
from tests.maintenance.collecting import opened
from tests.support import strace
from tests.support.checker import assert_sound, view_of
from tests.support.fixtures import store_of
from tests.support.fork_server import Nursery
from tests.support.strace import every_call, traced
from tests.support.workloads import STORE, WORKS, small

STEP = 3
SAMPLED = 5
WRITES = "pwritev,pwritev2,pwrite64,fsync,fdatasync,renameat,linkat,mkdir,mkdirat,unlink,unlinkat"
READS = "pread64,preadv,preadv2"


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


@pytest.fixture
def template(scratch: Path) -> Path:
    return store_of(scratch / "template", STEP)


def _places(
    scenario: str, calls: str, template: Path, scratch: Path, nursery: Nursery
) -> list[tuple[str, int]]:
    place = copytree(template, scratch / "counted")
    step = STEP if scenario == "commit_twice" else 0
    assert not traced(
        nursery.start(scenario, place=str(place), step=step), scratch / "log", calls=calls
    )
    return every_call(scratch / "log")


def _commits(
    places: Sequence[tuple[str, int]], error: str, template: Path, scratch: Path, nursery: Nursery
) -> None:
    before = view_of(template)
    for call, n in places:
        where = f"{error} at {call} number {n}"
        place = copytree(template, scratch / "store")
        child = nursery.start("commit_twice", place=str(place), step=STEP)
        code = traced(
            child, scratch / "log", "-e", f"inject={call}:error={error}:when={n}", calls=WRITES
        )
        committed = child.reports("committed")
        assert not code and [int(step) for step, _ in committed] == [STEP, STEP + 1], (
            f"{where}: {code} {child.reports('error')}"
        )
        for kind, message in child.reports("error"):
            assert kind in ("Unavailable", "NoSpace") and str(place) in message, (
                f"{where}: {kind} {message}"
            )
        view = view_of(place)
        assert view.live == before.live | {commit for _, commit in committed}, where
        with ckptstore.open(place) as store:
            assert_sound(place, {info.id: small(info.step or 0) for info in store.log()})
        rmtree(place)


def _restores(
    places: Sequence[tuple[str, int]], template: Path, scratch: Path, nursery: Nursery
) -> None:
    for call, n in places:
        where = f"EIO at {call} number {n}"
        place = copytree(template, scratch / "store")
        child = nursery.start("restore_twice", place=str(place), step=0)
        code = traced(
            child, scratch / "log", "-e", f"inject={call}:error=EIO:when={n}", calls=READS
        )
        assert not code and child.reports("restored"), f"{where}: {code} {child.reports('error')}"
        for kind, message in child.reports("error"):
            assert kind == "Unavailable" and str(place) in message, f"{where}: {kind} {message}"
        rmtree(place)


def test_some_failing_writes_of_a_commit(
    template: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    places = Random(seed).sample(
        _places("commit_twice", WRITES, template, scratch, nursery), SAMPLED
    )
    _commits(places, "EIO", template, scratch, nursery)


def test_some_failing_reads_of_a_restore(
    template: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    places = Random(seed).sample(
        _places("restore_twice", READS, template, scratch, nursery), SAMPLED
    )
    _restores(places, template, scratch, nursery)


def test_a_log_that_cannot_be_written_any_more_is_reported_within_seconds(
    scratch: Path, nursery: Nursery
) -> None:
    base = WORKS["a commit"].base(scratch / "base")
    disk = copytree(base, scratch / "disk")
    child = nursery.start("work", disk=str(disk), name="a commit")
    with opened(base / STORE) as handle:
        entry = disk / STORE / log_key(handle.log.replay().n + 1)
    started = time.monotonic()
    assert not traced(
        child,
        scratch / "log",
        "-P",
        str(entry.parent),
        "-e",
        "inject=linkat:error=EIO",
        calls="linkat",
    )
    assert time.monotonic() - started < APPEND_TIMEOUT_S / 2
    ((kind, message),) = child.reports("error")
    assert kind == "Unavailable" and "Input/output error" in message and "delete nothing" in message
    assert view_of(disk / STORE) == view_of(base / STORE)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_every_failing_write_of_a_commit(
    error: str, template: Path, scratch: Path, nursery: Nursery
) -> None:
    places = _places("commit_twice", WRITES, template, scratch, nursery)
    _commits(places, error, template, scratch, nursery)
    print(f"{error} at each of {len(places)} calls of two commits")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_failing_read_of_a_restore(template: Path, scratch: Path, nursery: Nursery) -> None:
    places = _places("restore_twice", READS, template, scratch, nursery)
    _restores(places, template, scratch, nursery)
    print(f"EIO at each of {len(places)} reads of two restores")
