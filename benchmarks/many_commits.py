"""What a store of many commits costs: `python -m benchmarks.many_commits --commits 100000`.

The store is valid: a few thousand states are committed by the API, and the other commits refer to
them, as commits of a training do in which little changes. Their documents and log entries are
written by the project's own lower layers, which takes a minute for 100,000. Each command is a
process of its own; memory is that process's highest.

    --place PATH    make the store there, or measure the one that is there. Measuring forgets a
                    tenth of the commits, and collects them.
    --only NAME     measure this row only, such as `log` or `gc`
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ckptstore
from benchmarks.command_start import ENVIRONMENT
from benchmarks.progress import note
from benchmarks.status import cpu_seconds, status_bytes
from ckptstore.core.ids import document_key, log_key, new_session_id
from ckptstore.core.model import CommitDocument
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.log.entries import Commit, encode_entry
from ckptstore.log.log import CHECKPOINT_EVERY, Log
from ckptstore.log.state import State, apply, next_entry
from ckptstore.objects.documents import decode_document, encode_document
from ckptstore.store import internals_of

STATES = 3000
"""States that differ; each is the content of consecutive commits."""
COMMITS_MEASURED = 60
BARS_S = {"log -n 20": 0.4, "open": 0.3, "gc of a tenth": 60.0, "ui, first page": 1.0}

Row = tuple[float, float, float]
"""Seconds by the clock and of processor time, and the highest memory of the process."""


def app_state(number: int) -> dict[str, dict[str, torch.Tensor]]:
    """A small state, other than those of all other numbers."""
    return {
        "model": {f"layer.{i}": torch.full((32, 32), float(number)) for i in range(8)},
        "optimizer": {"exp_avg": torch.arange(1024.0) + number},
    }


def make_store(place: Path, commits: int, states: int = STATES) -> None:
    """Make a store of `commits` commits in one run, `states` of them with a state of their own."""
    states = min(states, commits)
    with ckptstore.open(place) as store:
        inside = internals_of(store)
        log = inside.handle.log
        for number in range(states):
            first, stop = (commits * n // states for n in (number, number + 1))
            store.commit(app_state(number), step=first, metrics=_metrics(first))
            state, latest = log.replay(), _latest(place, log)
            for step in range(first + 1, stop):
                state, latest = _again(place, state, latest, step)
                if state.n % CHECKPOINT_EVERY == 0 and commits - step < 2 * CHECKPOINT_EVERY:
                    log.saved.write_checkpoint(state)
                if step % 1000 == 0:
                    note(f"{step:,} of {commits:,} commits made")
            inside.parent_tracker.now(latest.entry.commit)


class _Made(NamedTuple):
    """A commit, as its document and its entry have it."""

    document: CommitDocument
    entry: Commit


def _metrics(step: int) -> dict[str, float]:
    return {"loss": 1 / (1 + step)}


def _latest(place: Path, log: Log) -> _Made:
    body = log.entry(log.state.n).body
    assert isinstance(body, Commit)
    stored = (place / document_key(body.session, body.commit)).read_bytes()
    reused = body.reused | {pack.number for pack in body.packs}
    return _Made(decode_document(stored, body.commit), replace(body, packs=(), reused=reused))


def _again(place: Path, state: State, latest: _Made, step: int) -> tuple[State, _Made]:
    """Commit the content of `latest` once more: a document and an entry, written as files."""
    session, time_ns = new_session_id(), time.time_ns()
    changed: dict[str, Any] = {
        "session": session,
        "step": step,
        "parents": (latest.entry.commit,),
        "metrics": tuple(_metrics(step).items()),
        "new_bytes": 0,
    }
    document = replace(latest.document, time_ns=time_ns, **changed)
    commit, stored = encode_document(document)
    body = replace(latest.entry, commit=commit, document_bytes=len(stored), **changed)
    entry = next_entry(state, body, time_ns)
    data = encode_entry(entry)
    (place / document_key(session, commit)).write_bytes(stored)
    (place / log_key(entry.n)).write_bytes(data)
    entry = replace(entry, hash=data[:64].decode(), bytes=len(data))
    return apply(state, entry), _Made(document, body)


# -- measuring --


def command(place: Path, *words: str) -> Row:
    """A command of `ckptstore` in a process of its own."""
    ours = [sys.executable, "-m", "ckptstore", "-s", str(place), *words]
    found = subprocess.run(
        [sys.executable, "-S", "-c", _TIMED, *ours], stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    clock_s, cpu_s, peak_kib, status = json.loads(found.stdout)
    if status:
        raise subprocess.CalledProcessError(status, ours)
    return clock_s, cpu_s, peak_kib * 1024


_TIMED = """
import json, os, resource, subprocess, sys, time
began = time.perf_counter()
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
took, cpu = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
print(json.dumps([took, cpu, usage.ru_maxrss, status]))
"""
"""Runs a command from a small process: the highest memory of a child begins with its parent's."""


def inside(name: str, *places: Path) -> Row:
    """One of `INSIDE`, measured in a process of its own that has imported all it needs."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_commits", "--inside", name, *map(str, places)],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        check=True,
    )
    clock_s, cpu_s, peak_bytes = json.loads(found.stdout)
    return clock_s, cpu_s, peak_bytes


Took = tuple[float, float]


def timed(act: Callable[[], object]) -> Took:
    """Seconds by the clock and of processor time."""
    clock, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - clock, time.process_time() - cpu


def open_once(place: Path) -> Took:
    ckptstore.open(place.with_name("none")).close()  # imports what it needs
    shutil.rmtree(place.with_name("none"))
    stores: list[ckptstore.Store] = []
    took = timed(lambda: stores.append(ckptstore.open(place, create=False)))
    stores[0].close()
    return took


def checkout_latest(place: Path) -> Took:
    with ckptstore.open(place, create=False) as store:
        return timed(lambda: store.checkout("latest").restore(app_state(-1)))


def commits(place: Path) -> Took:
    """The median of commits of new states, the store being open."""
    with ckptstore.open(place, create=False) as store:
        return _median(_commit(store, number) for number in range(COMMITS_MEASURED))


def commits_against_new(place: Path) -> Took:
    """How long a commit takes, as a multiple of one in a new store; the two take turns."""
    with (
        tempfile.TemporaryDirectory(dir=place.parent) as folder,
        ckptstore.open(place, create=False) as old,
        ckptstore.open(Path(folder, "store")) as new,
    ):
        for store in (old, new):
            _commit(store, -1)
        olds, news = list[Took](), list[Took]()
        for number in range(COMMITS_MEASURED):
            olds.append(_commit(old, number))
            news.append(_commit(new, number))
    (old_s, old_cpu_s), (new_s, new_cpu_s) = _median(olds), _median(news)
    return old_s / new_s, old_cpu_s / new_cpu_s


def _median(times: Iterable[Took]) -> Took:
    found = list(times)
    return statistics.median(each[0] for each in found), statistics.median(
        each[1] for each in found
    )


def _commit(store: ckptstore.Store, number: int) -> Took:
    state = app_state(time.monotonic_ns() % 10**9)
    return timed(lambda: store.commit(state, step=10**7 + number))


def first_page(place: Path) -> Took:
    """From the start of `ckptstore ui` until the first things that the page asks for are there."""
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "ckptstore", "-s", str(place), "--json", "ui"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert server.stdout is not None
    cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    try:
        url = json.loads(server.stdout.readline())["url"]
        base = url.partition("?")[0]
        cookies.open(url).read()
        for part in ("data/site.json", "data/0/store.json"):
            cookies.open(base + part).read()
        return time.perf_counter() - began, cpu_seconds(server.pid)
    finally:
        server.terminate()
        server.wait()


INSIDE: dict[str, Callable[[Path], Took]] = {
    "open": open_once,
    "checkout and restore": checkout_latest,
    "commit": commits,
    "commit, of a new store's": commits_against_new,
    "ui, first page": first_page,
}


def measure(place: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    """All rows that are `wanted`, in an order in which none spoils another."""
    tasks: list[tuple[str, Callable[[], Row]]] = [
        ("log -n 20", lambda: command(place, "log", "-n", "20")),
        ("show latest", lambda: command(place, "show", "latest")),
        ("stats", lambda: command(place, "stats")),
        ("fsck", lambda: command(place, "fsck")),
        *((name, lambda name=name: inside(name, place)) for name in INSIDE),
        ("gc of a tenth", lambda: gc_of_a_tenth(place)),
        ("reindex", lambda: command(place, "reindex")),
        ("open behind", lambda: open_without_index(place)),
    ]
    for name, task in tasks:
        if wanted(name):
            yield name, task()


def gc_of_a_tenth(place: Path) -> Row:
    """Forget the oldest tenth, and collect it."""
    with ckptstore.open(place, create=False) as store:
        infos = store.log()
        store.forget([info.id for info in infos[-len(infos) // 10 :]])
    return command(place, "gc", "--now")


def open_without_index(place: Path) -> Row:
    """The first `log` on a host that has no index yet."""
    shutil.rmtree(place / "index")
    return command(place, "log", "-n", "20")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", type=int, default=3000)
    parser.add_argument("--place", type=Path)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--inside", choices=INSIDE, metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("where", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        seconds, cpu_s = INSIDE[args.inside](args.where)
        print(json.dumps([seconds, cpu_s, status_bytes("VmHWM")]))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = args.place or Path(folder, "store")
        if not place.exists():
            began = time.perf_counter()
            make_store(place, args.commits)
            print(f"{args.commits:,} commits, made in {seconds_text(time.perf_counter() - began)}")
        for name, (clock_s, cpu_s, peak_bytes) in measure(
            place, lambda name: args.only is None or name in args.only
        ):
            bar = f"at most {BARS_S[name]}" if name in BARS_S else ""
            print(
                f"{name:26} {clock_s:8.3f} {cpu_s:8.3f}  {bytes_text(peak_bytes):>10}  {bar}",
                flush=True,
            )


if __name__ == "__main__":
    main()
