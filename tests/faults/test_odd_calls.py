"""Calls that hardly ever fail (a thread, a mapping, a lock, a close, a listing) fail once: an error
of ours soon, or done; nothing lost."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from shutil import copytree, rmtree

import pytest

import ckptstore
from tests.support import strace
from tests.support.checker import assert_sound, view_of
from tests.support.fixtures import store_of
from tests.support.fork_server import Child, Nursery
from tests.support.strace import every_call, traced
from tests.support.workloads import small

STEP = 3
SOON_S = 30.0
HANG_S = 150.0
SAMPLED = 1
ERRORS = {
    "clone3": "EAGAIN",
    "clone": "EAGAIN",
    "mmap": "ENOMEM",
    "flock": "EIO",
    "close": "EIO",
    "memfd_create": "EMFILE",
    "getdents64": "EACCES",
}
CALLS = ",".join(ERRORS)
SCENARIOS = (
    "commit",
    "restore",
    "gc",
    "fsck",
    "commit_async by a thread",
    "commit_async by a process",
)


@pytest.fixture(autouse=True)
def _traceable() -> None:
    if reason := strace.problem():
        pytest.skip(reason)


@pytest.fixture
def template(scratch: Path) -> Path:
    return store_of(scratch / "template", STEP)


def ready(child: Child) -> Child:
    """`child` when it has imported what it needs and waits at its gate."""
    while not child.reports("ready"):
        assert child.alive()
        time.sleep(0.01)
    return child


def places(what: str, template: Path, scratch: Path, nursery: Nursery) -> list[tuple[str, int]]:
    place = copytree(template, scratch / "counted")
    child = ready(nursery.start("use", place=str(place), what=what, step=STEP))
    assert not traced(child, scratch / "log", calls=CALLS) and child.reports("done"), child.reports(
        "raw"
    )
    mapped = sum(
        line.startswith((f"{child.pid} mmap(", f"{child.pid}  mmap("))
        for line in (scratch / "log").read_text().splitlines()
    )
    return [(call, n) for call, n in every_call(scratch / "log") if call != "mmap" or n <= mapped]


def strike(
    what: str, at: Sequence[tuple[str, int]], template: Path, scratch: Path, nursery: Nursery
) -> list[str]:
    """What went wrong where each of the calls `at` failed once."""
    wrong: list[str] = []
    before = view_of(template)
    for call, n in at:
        where = f"{what}: {ERRORS[call]} at {call} number {n}"
        place = copytree(template, scratch / "store")
        child = ready(nursery.start("use", place=str(place), what=what, step=STEP))
        hung = threading.Timer(HANG_S, os.kill, (child.pid, signal.SIGKILL))
        hung.start()
        # A new thread that has no memory for its first steps lets `Thread.start` wait for ever:
        # that is CPython's.
        fault = f"inject={call}:error={ERRORS[call]}:when={n}"
        code = traced(child, scratch / "log", "-e", fault, calls=CALLS, threads=call != "mmap")
        hung.cancel()
        wrong += [f"{where}: {' '.join(raw)}" for raw in child.reports("raw")]
        wrong += [
            f"{where}: {kind} without words"
            for kind, message, _ in child.reports("error")
            if len(message) < 20
        ]
        slow = [
            seconds
            for *_, seconds in [*child.reports("error"), *child.reports("done")]
            if float(seconds) > SOON_S
        ]
        wrong += [f"{where}: took {seconds} s" for seconds in slow]
        done = not code and child.reports("done")
        if not done and (scratch / "log").read_text().count("(INJECTED)") > 1:
            # strace counts by threads: new ones in each attempt were struck in each attempt.
            again = ready(nursery.start("use", place=str(place), what=what, step=STEP))
            again.go()
            done = not again.wait() and again.reports("done")
        if not done:
            wrong.append(
                f"{where}: was not done in the end (exit {code}): {child.reports('error')}"
            )
        live = view_of(place).live
        if not before.live | {commit for _, commit in child.reports("committed")} <= live:
            wrong.append(f"{where}: a commit was lost")
        with ckptstore.open(place) as store:
            contents = {info.id: small(info.step or 0) for info in store.log()}
        assert_sound(place, contents)
        rmtree(place)
    return wrong


@pytest.mark.parametrize("what", SCENARIOS)
def test_some_calls_that_hardly_ever_fail(
    what: str, template: Path, scratch: Path, nursery: Nursery, seed: int
) -> None:
    found = places(what, template, scratch, nursery)
    wrong = strike(
        what, Random(seed).sample(found, min(SAMPLED, len(found))), template, scratch, nursery
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", ERRORS)
@pytest.mark.parametrize("what", SCENARIOS)
def test_every_call_that_hardly_ever_fails(
    what: str, call: str, template: Path, scratch: Path, nursery: Nursery
) -> None:
    found = [place for place in places(what, template, scratch, nursery) if place[0] == call]
    wrong = strike(what, found, template, scratch, nursery)
    print(f"{what}: each of {len(found)} calls of {call} failed once")
    assert not wrong, "\n".join(wrong)
