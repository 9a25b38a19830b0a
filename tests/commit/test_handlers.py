"""A signal handler that calls the store, at any step of any call that it interrupts: it is refused
at once with the way that works, and what it interrupted goes on."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import isfunction
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput, KeepBest, KeepLast, PendingCommit, Snapshot, Store
from ckptstore.plugins.schedule.schedule import Schedule
from tests.maintenance.stores import make_store, state

SIGNAL = signal.SIGUSR1

OUTER: dict[str, Callable[[Store, Path], object]] = {
    "commit": lambda store, out: store.commit(state(9), step=9, metrics={"loss": 0.5}),
    "commit_async": lambda store, out: store.commit_async(state(10), step=10),
    "wait": lambda store, out: store.commit_async(state(11), step=11).wait(),
    "every": lambda store, out: store.every(steps=1)(state(12), step=12),
    "committing": lambda store, out: store.committing().__enter__(),
    "resume": lambda store, out: store.resume(state(0)),
    "restore": lambda store, out: store.checkout("latest").restore(state(0)),
    "read": lambda store, out: store.checkout("latest").read("model/weight"),
    "state_dict": lambda store, out: store.checkout("latest").state_dict(),
    "verify": lambda store, out: store.checkout("latest").verify(),
    "log": lambda store, out: store.log(),
    "tag": lambda store, out: (store.tag("t"), store.tags(), store.untag("t")),
    "diff": lambda store, out: store.diff("latest", "latest~1"),
    "history": lambda store, out: store.history("model/*"),
    "adopt": lambda store, out: store.adopt(out.parent / "adopted"),
    "materialize": lambda store, out: store.adopt(out.parent / "adopted").materialize(out / "tree"),
    "forget": lambda store, out: store.forget([KeepLast(2), KeepBest("loss", n=2)]),
    "undelete": lambda store, out: store.undelete([info.id for info in store.forgotten()]),
    "gc": lambda store, out: store.gc(grace_s=0),
    "usage": lambda store, out: (store.usage(), store.sessions()),
    "fsck": lambda store, out: store.fsck("packs"),
    "push": lambda store, out: store.push(out / "mirror", create=True),
    "reindex": lambda store, out: store.reindex(),
    "open": lambda store, out: ckptstore.open(out / "another").close(),
    "clone": lambda store, out: ckptstore.clone(store.url, out / "clone").close(),
}


def methods(kind: type) -> Iterator[str]:
    """The public methods of a class, its properties left out."""
    for name in dir(kind):
        if (not name.startswith("_") or name == "__call__") and isfunction(getattr(kind, name)):
            yield name


KINDS: tuple[type, ...] = (Store, Snapshot, PendingCommit, Schedule)

INNER: list[tuple[type | None, str]] = [
    *(
        (kind, name)
        for kind in (Store, Snapshot, PendingCommit, Schedule)
        for name in methods(kind)
    ),
    *((None, name) for name in ("open", "clone", "open_pointer", "write_pointer")),
]
"""Every public call. The handler calls each without arguments: it is refused before they count."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(SIGNAL, handler)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def interrupted(call: Callable[[], object], at: int) -> int:
    """Run `call`; the signal comes at line number `at` of this package's that it runs. Returns how
    many lines it ran."""
    lines = 0

    def in_ours(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == at:
                sys.settrace(None)
                signal.raise_signal(SIGNAL)
        return in_ours

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        ours = frame.f_globals.get("__name__", "").startswith("ckptstore.")
        return in_ours if ours and lines < at else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "adopted").mkdir()
    (tmp_path / "adopted" / "notes.txt").write_text("notes")
    with ckptstore.open(make_store(tmp_path / "store")) as opened:
        yield opened


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outer", OUTER)
def test_a_handler_that_interrupts_a_call_is_refused_at_once(
    outer: str, store: Store, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    snapshot, pending = store.checkout("latest"), store.commit_async(state(8), step=8)
    pending.wait()
    owners = {Store: store, Snapshot: snapshot, PendingCommit: pending}
    owners[Schedule] = store.every(steps=1)  # type: ignore[assignment,index]
    inner: list[tuple[type | None, str]] = []
    said: list[str] = []

    def out(n: int, at: int) -> Path:
        return tmp_path / f"{n}-{at}"

    def handler(number: int, frame: FrameType | None) -> None:
        kind, name = inner[-1]
        method = getattr(owners[kind] if kind else ckptstore, name)  # type: ignore[index]
        with pytest.raises(InvalidInput) as refused:
            method()
        said.append(str(refused.value))

    with handling(handler):
        most = interrupted(lambda: OUTER[outer](store, out(0, 0)), sys.maxsize)
        for n in range(1, 5):
            inner.append(random.choice(INNER))
            at = 1 if n == 1 else random.randint(1, most)
            # A later call may run fewer lines, and end before the signal.
            while (lines := interrupted(partial(OUTER[outer], store, out(n, at)), at)) < at:
                at = random.randint(1, lines)
    assert len(said) == len(inner)
    for (_, name), text in zip(inner, said, strict=True):
        assert text.startswith(f"{name} was called by the signal handler") and "on_signal" in text
    assert not store.fsck("data").damaged


@pytest.mark.timeout(60)
def test_every_public_call_is_refused_within_an_interrupted_commit(store: Store) -> None:
    snapshot, pending = store.checkout("latest"), store.commit_async(state(8), step=8)
    pending.wait()
    calls = [getattr(store, name) for name in methods(Store)]
    calls += [getattr(snapshot, name) for name in methods(Snapshot)]
    calls += [getattr(pending, name) for name in methods(PendingCommit)]
    calls += [store.every(steps=1), *(getattr(ckptstore, name) for kind, name in INNER if not kind)]
    refused = 0

    def handler(*args: object) -> None:
        nonlocal refused
        for call in calls:
            with pytest.raises(InvalidInput, match="signal handler"):
                call()
            refused += 1

    with handling(handler):
        interrupted(lambda: store.commit_async(state(10), step=10), 100)
    assert refused == len(calls)
    assert store.log(1)[0].step == 10


def test_a_handler_that_interrupts_nothing_of_ours_may_commit(store: Store) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        store.commit_async(state(9), step=9).wait()

    with handling(handler):
        signal.raise_signal(SIGNAL)
    assert store.log(1)[0].step == 9


def test_a_state_dict_and_a_callback_may_read_the_store(store: Store) -> None:
    """They are called by a commit as a handler is, and hold no lock."""
    seen: list[int | None] = []

    class Reads:
        def state_dict(self) -> dict[str, Any]:
            return {"last": store.log(1)[0].step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    told = ckptstore.Async(on_progress=lambda progress: seen.append(store.log(1)[0].step))
    pending = store.commit_async({"reads": Reads(), "t": torch.ones(9)}, step=9, background=told)
    pending.then(lambda ended: store.tag("good", ended.wait().id))
    pending.wait()
    assert store.checkout("good").read("reads/last") == 100 and set(seen) >= {100}
