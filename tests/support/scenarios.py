"""What do the children of the fork server do? Each scenario reports what it has achieved, and is
over when it cannot go on."""

import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch

import ckptstore
from ckptstore.core import process
from ckptstore.errors import CkptStoreError, Conflict, NotFound
from ckptstore.index import catalog
from ckptstore.log.log import Log
from ckptstore.maintenance.check import Level
from ckptstore.maintenance.mirror import MirrorOptions, mirror
from ckptstore.maintenance.mirror_plan import choose
from ckptstore.maintenance.retention import KeepLast
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.store import Store
from tests.cli.running import call
from tests.maintenance.stores import check
from tests.support.background_scenarios import (
    Report,
    commit_async_on,
    commit_beside_a_child,
    commit_lazily_on,
    commit_together_on,
)
from tests.support.checker import assert_same
from tests.support.following_scenarios import commit_steps_on, follow_steps_on
from tests.support.strace import allow_tracing
from tests.support.workloads import CHUNK_BYTES, WORKS, small

_FINISHED, _FAILED = 0, 1
_ATTEMPTS = 4
_PATIENCE_S = 60.0


def live(request: dict[str, Any]) -> None:
    """The whole life of a child. Does not return."""
    code = _FAILED
    try:
        torch.set_num_threads(1)
        allow_tracing()
        lines = os.open(request["lines"], os.O_WRONLY | os.O_APPEND)

        def report(kind: str, *words: object) -> None:
            os.write(
                lines,
                (
                    "\t".join([kind, *(str(word).replace("\n", " ") for word in words)]) + "\n"
                ).encode(),
            )

        if request["scenario"] == use.__name__:
            _import_what_it_needs(**request["given"])
            report("ready")
        with suppress(OSError), open(request["gate"]):  # a fault may strike this close
            pass
        SCENARIOS[request["scenario"]](report, **request["given"])
        code = _FINISHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def work(report: Report, disk: str, name: str) -> None:
    """One of `tests.support.workloads`; says whether it was done, or what was raised."""
    try:
        WORKS[name](Path(disk))
        report("done")
    except CkptStoreError as error:
        report("error", type(error).__name__, error)


def change_on(report: Report, place: str, first: int) -> None:
    """Commit, tag, forget, bring back and collect, and again, until storage is gone. What may take
    something away is said before, too."""
    try:
        with ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
            for step in range(first, first + 10_000):
                report("committed", step, store.commit(small(step), step=step).id)
                if step % 7 == 0:
                    store.tag(f"tag-{step}")
                    report("tagged", f"tag-{step}")
                if step % 3 == 2:
                    _forget_one(store, report, back=step % 2 == 0)
                if step % 5 == 4:
                    report("collecting")
                    report("collected", store.gc(max_unused=0.0, grace_s=0).freed_bytes)
    except CkptStoreError as error:
        report("error", type(error).__name__, error)


def _forget_one(store: Store, report: Report, *, back: bool) -> None:
    """Forget the oldest commit that may go; with `back`, bring it back."""
    tagged = set(store.tags().values())
    own = store.log(run=store.run)
    for info in [info for info in reversed(own[2:]) if info.id not in tagged][:1]:
        report("forgetting", info.id)
        store.forget(info.id)
        report("forgotten", info.id)
        if back:
            report("returning", info.id)
            try:
                store.undelete(info.id)
            except NotFound:
                report("purged", info.id)  # by another's gc, which may come in between
            else:
                report("returned", info.id)


def read_with_little_memory(report: Report, place: str, more_bytes: int) -> None:
    """Restore every commit and check the store, with no more than `more_bytes` of address space
    above what is taken already."""
    with ckptstore.open(place) as store:
        commits = store.log()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, -1))
        try:
            bytearray(2 * more_bytes)
        except MemoryError:
            report("limited")
        for info in commits:
            with suppress(CkptStoreError):
                store.checkout(info.id).state_dict()
    found = check(Path(place), Level.DATA)
    report("checked", len(found.damaged_commits), found.damaged)


def commit_twice(report: Report, place: str, step: int, ballast: str = "") -> None:
    """Two commits by one store object. What fails is tried again, a few times (a fault strikes each
    thread), once `ballast` is gone."""
    store = None
    for wanted in (step, step + 1):
        for _ in range(_ATTEMPTS):
            try:
                store = store or ckptstore.open(place, threads=1)
                report("committed", wanted, store.commit(small(wanted), step=wanted).id)
                break
            except CkptStoreError as error:
                report("error", type(error).__name__, error)
                if ballast:
                    Path(ballast).unlink(missing_ok=True)
    if store:
        store.close()


def restore_twice(report: Report, place: str, step: int) -> None:
    """Open the store and restore; and again."""
    for _ in range(2):
        try:
            with ckptstore.open(place, threads=1) as store:
                assert_same(store.checkout(step).state_dict(), small(step), "restored")
            report("restored")
        except CkptStoreError as error:
            report("error", type(error).__name__, error)


def use(report: Report, place: str, what: str, step: int) -> None:
    """Something that a trainer or a keeper does, and again until it was done; says what each
    attempt came to, and how long it took."""
    for _ in range(_ATTEMPTS):
        started = time.monotonic()
        try:
            _use(report, place, what, step)
            report("done", time.monotonic() - started)
            return
        except CkptStoreError as error:
            report("error", type(error).__name__, error, time.monotonic() - started)
        except BaseException as error:
            traceback.print_exc()
            at = [
                f"{frame.name} at {Path(frame.filename).name}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)[-5:]
            ]
            report("raw", type(error).__name__, error, at)


def _use(report: Report, place: str, what: str, step: int) -> None:
    what, _, executor = what.partition(" by a ")
    # of the two words
    with ckptstore.open(
        place, create=False, background=ckptstore.Async(executor=executor or "thread")
    ) as store:  # type: ignore[arg-type]
        match what:
            case "commit":
                report("committed", step, store.commit(small(step), step=step).id)
            case "commit_async":
                report(
                    "committed",
                    step,
                    store.commit_async(small(step), step=step).wait(_PATIENCE_S).id,
                )
            case "restore":
                assert_same(store.checkout(0).state_dict(), small(0), "restored")
            case "gc":
                store.gc(grace_s=0)
            case "fsck":
                assert not store.fsck(read_data="100%").damaged


def _import_what_it_needs(place: str, what: str, step: int) -> None:
    """A child tries the scenario out, so that no fault strikes Python while it imports modules, and
    nothing else has been done before."""
    readable, writable = os.pipe()
    if not (child := os.fork()):
        with suppress(BaseException), tempfile.TemporaryDirectory() as folder:
            _use(lambda *_: None, str(shutil.copytree(place, Path(folder, "store"))), what, step)
        os.write(writable, "\n".join(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(writable)
    with open(readable) as found:
        names = found.read().split("\n")
    os.waitpid(child, 0)
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def carry_on(report: Report, place: str, step: int) -> None:
    """What a run does when it starts again, and what its keepers do: resume, commit, look and
    collect."""

    def resume(store: Store) -> int | None:
        snapshot = store.resume(state := dict(small(step)))
        assert snapshot is not None and snapshot.step is not None
        assert_same(state, small(snapshot.step), "resumed")
        return snapshot.step

    works: dict[str, Callable[[Store], object]] = {
        "resumed": resume,
        "committed": lambda store: store.commit(small(step), step=step).id,
        "looked": lambda store: len(store.fsck(read_data="100%").findings),
        "collected": lambda store: store.gc(max_unused=0.0, grace_s=0).freed_bytes,
    }
    with ckptstore.open(place, threads=1) as store:
        for kind, act in works.items():
            try:
                report(kind, act(store))
            except CkptStoreError as error:
                report("error", kind, type(error).__name__, error)


def command(report: Report, words: list[str]) -> None:
    """`ckptstore words… --json`; says the exit code and the document."""
    done = call(*words, "--json")
    report("exit", done.code, done.out)


def point(report: Report, place: str, path: str) -> None:
    """Write a pointer file that names the newest commit."""
    with ckptstore.open(place, read_only=True) as store:
        ckptstore.write_pointer(path, store)
    report("pointed")


def push(report: Report, source: str, target: str, batch_bytes: int) -> None:
    """Bring every commit of one store into another, in batches."""
    with (
        closing(StoreHandle(source, read_only=True)) as ours,
        closing(StoreHandle(target)) as theirs,
    ):
        wanted = choose(ours, (), run=None)
        done = mirror(ours, theirs, wanted, MirrorOptions(batch_bytes=batch_bytes), ThreadPool(1))
    report("sent", len(done.sent), done.chunks)


# -- many at once
# ------------------------------------------------------------------------------------------


def churn(
    report: Report,
    place: str,
    me: int,
    everybody: int,
    seed: int,
    seconds: float,
    rounds: int = sys.maxsize,
    cache: str = "",
) -> None:
    """Commit, restore, forget and collect for `rounds`, or until time is up, in a run of one's own,
    on a host whose cache directory is `cache` if given; says how long each wait for others took.

    Retained are the commits that bear a tag `keep-…`, which nobody removes: whoever finds one
    restores it.
    """
    _time_waits(report)
    if cache:
        os.environ["CKPTSTORE_CACHE"] = cache
    random = Random(f"{seed} {me}")
    deadline = time.monotonic() + seconds
    with ckptstore.open(
        place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES), run=f"run-{me}", threads=1
    ) as store:
        step = me
        _commit(store, step, report, keep=True)
        for _ in range(rounds):
            if time.monotonic() > deadline:
                break
            what = random.choices(
                ["commit", "restore", "forget", "gc", "retag"], [45, 30, 10, 8, 7]
            )[0]
            try:
                if what == "commit":
                    step += everybody
                    _commit(store, step, report, keep=random.random() < 0.1)
                elif what == "restore":
                    _restore_a_kept_one(store, random, report)
                elif what == "forget":
                    report("forgotten", len(store.forget(KeepLast(2)).forgotten))
                elif what == "gc":
                    report("collected", store.gc(max_unused=0.0, grace_s=0).freed_bytes)
                else:
                    store.tag("shared", "latest")
            except Conflict as error:
                report("conflict", what, error)
        _restore_a_kept_one(store, random, report)


def _commit(store: Store, step: int, report: Report, *, keep: bool) -> None:
    started = time.monotonic()
    store.commit(small(step), step=step, tag=f"keep-{step}" if keep else ())
    report("committed", step, time.monotonic() - started)


def _restore_a_kept_one(store: Store, random: Random, report: Report) -> None:
    name = random.choice(sorted(name for name in store.tags() if name.startswith("keep-")))
    snapshot = store.checkout(name)
    assert_same(snapshot.state_dict(), small(int(name.removeprefix("keep-"))), name)
    report("restored", name)


def _time_waits(report: Report) -> None:
    """Report how long it takes to append an entry, and to get each lock that the processes of a
    host share."""

    def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                report("waited", what, time.monotonic() - started)

        return call

    Log.append = timed("append", Log.append)  # type: ignore[method-assign]
    process._take = timed("lock", process._take)
    catalog.Catalog._write = timed("catalog", catalog.Catalog._write)  # type: ignore[method-assign]


_ALL = (
    work,
    change_on,
    commit_async_on,
    commit_lazily_on,
    commit_beside_a_child,
    commit_together_on,
    commit_twice,
    read_with_little_memory,
    restore_twice,
    carry_on,
    command,
    point,
    use,
    push,
    churn,
    commit_steps_on,
    follow_steps_on,
)
SCENARIOS: dict[str, Callable[..., None]] = {scenario.__name__: scenario for scenario in _ALL}
