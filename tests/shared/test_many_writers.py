"""Thirty-two concurrent writers append to one log, and none starves."""

import json
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ckptstore.log import log as log_module
from ckptstore.log.log import Log
from ckptstore.plugins.postgres.log import PostgresLog
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from tests.log.builders import STORE, fresh_commit
from tests.shared.sites import Site
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.proxy import Proxy, proxy_to
from tests.support.servers.s3 import S3Server, new_url

WRITERS = 32
LATENCY_S = 0.02
PROCESSES = 4
LONGEST_S = 10.0
TURN_ROUND_TRIPS = 8
"""So many answers whoever has a turn in PostgreSQL may wait for while the others wait: 32 turns at
20 ms take 5 s."""


class Network:
    """A clock that stands still while anybody computes: when every writer waits, one latency
    passes, and the server answers all requests that are on their way, in any order, each of which
    takes it so long. To the log it is the module `time`."""

    time_ns = staticmethod(time.time_ns)

    def __init__(self, writers: int, seed: int, request_s: float) -> None:
        self.now_s = 0.0
        self.requests = 0
        self._request_s = request_s
        self._random = random.Random(seed)
        self._asleep: dict[Future[Any], float] = {}
        self._lock = threading.Lock()
        self._here = writers
        self._pending: list[tuple[int, Callable[[], Any], Future[Any]]] = []

    def ask(self, writer: int, request: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._pending.append((writer, request, answer))
            self._pass_if_all_wait()
        return answer.result()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """A writer waits."""
        woken: Future[Any] = Future()
        with self._lock:
            self._asleep[woken] = self.now_s + seconds
            self._pass_if_all_wait()
        woken.result()

    def leave(self) -> None:
        """A writer is done."""
        with self._lock:
            self._here -= 1
            self._pass_if_all_wait()

    def _pass_if_all_wait(self) -> None:
        waiting = len({writer for writer, _, _ in self._pending}) + len(self._asleep)
        if waiting < self._here or not waiting:
            return
        if self._pending:
            self.now_s += LATENCY_S + len(self._pending) * self._request_s
        else:
            self.now_s = max(self.now_s, min(self._asleep.values()))
        self._answer()
        for woken in [woken for woken, until_s in self._asleep.items() if until_s <= self.now_s]:
            del self._asleep[woken]
            woken.set_result(None)

    def _answer(self) -> None:
        pending, self._pending = self._pending, []
        self.requests += len(pending)
        self._random.shuffle(pending)
        answers: list[tuple[Future[Any], Any, BaseException | None]] = []
        for _, request, answer in pending:
            try:
                answers.append((answer, request(), None))
            except BaseException as error:
                answers.append((answer, None, error))
        for answer, result, problem in answers:
            answer.set_exception(problem) if problem else answer.set_result(result)


class Far:
    """A bucket at the other end of the network, as one writer sees it."""

    def __init__(self, storage: Storage, network: Network, writer: int) -> None:
        self._storage, self._network, self._writer = storage, network, writer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if not callable(method):
            return method
        return lambda *args, **options: self._network.ask(
            self._writer, lambda: method(*args, **options)
        )


@pytest.mark.parametrize(
    ("appends", "request_s"),
    [
        (1, 0.0),
        (1, 0.002),
        pytest.param(25, 0.0, marks=pytest.mark.soak),
        pytest.param(4, 0.001, marks=pytest.mark.soak),
    ],
)
def test_nobody_starves_while_thirty_two_append_to_a_log_in_a_bucket(
    appends: int, request_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server that has time for all requests, and on one that has not."""
    storage = open_storage(f"memory://{secrets.token_hex(8)}")
    network = Network(WRITERS, seed, request_s)
    monkeypatch.setattr(log_module, "time", network)
    waits_s: list[float] = []
    failures: list[BaseException] = []

    def write(me: int) -> None:
        # a Backend but for its type
        log = Log(Far(storage, network, me), STORE, 1)  # type: ignore[arg-type]
        try:
            for _ in range(appends):
                began_s = network.now_s
                log.append(fresh_commit())
                waits_s.append(network.now_s - began_s)
        except BaseException as error:
            failures.append(error)
        finally:
            network.leave()

    threads = [threading.Thread(target=write, args=(me,)) for me in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    per_append = network.requests / len(waits_s)
    print(
        f"the longest append waited {max(waits_s):.2f} s, all of them took {network.now_s:.2f} s "
        f"and {per_append:.0f} requests each"
    )
    assert Log(storage, STORE, 1).replay().n == len(waits_s) == WRITERS * appends
    assert max(waits_s) <= LONGEST_S


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    with proxy_to(postgres.address) as proxy:
        yield proxy


@pytest.fixture
def site(postgres: PostgresServer, proxy: Proxy, tmp_path: Path) -> Site:
    """A directory whose log is in PostgreSQL, behind the proxy."""
    index = postgres.new_url().replace(f":{postgres.port}/", f":{proxy.port}/")
    assert f":{proxy.port}/" in index
    return Site(str(tmp_path / "store"), None, {"index": index})


def test_a_turn_in_postgresql_takes_few_round_trips(
    site: Site, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the lock to the answer to COMMIT."""
    site.open(tmp_path / "maker").close()
    turns: list[int] = []
    lock, insert = PostgresLog._lock, PostgresLog._insert

    def locked(self: PostgresLog, connection: Any) -> Any:
        found = lock(self, connection)
        turns.append(-proxy.round_trips)
        return found

    def inserted(self: PostgresLog, *what: Any) -> Any:
        copied = insert(self, *what)
        turns[-1] += proxy.round_trips
        return copied

    monkeypatch.setattr(PostgresLog, "_lock", locked)
    monkeypatch.setattr(PostgresLog, "_insert", inserted)
    commit = {"metrics": (("loss", 1.0),), "tags": ("best",), "parents": ("a" * 64,)}
    with site.opened(tmp_path / "mine") as mine, site.opened(tmp_path / "theirs") as theirs:
        for handle in (mine, theirs):
            handle.log.append(fresh_commit(**commit))  # it makes the row of the schema
        turns.clear()
        proxy.faults.latency_s = 5 * LATENCY_S
        for handle in (mine, theirs, mine):
            handle.log.append(fresh_commit(**commit))
    print(turns)
    assert len(turns) == 3
    assert max(turns) <= TURN_ROUND_TRIPS


@pytest.mark.soak
@pytest.mark.parametrize("appends", [1, 4])
def test_nobody_starves_while_thirty_two_append_to_a_log_in_postgresql(
    appends: int, site: Site, proxy: Proxy, tmp_path: Path
) -> None:
    _append_at_once(site, proxy, tmp_path, appends=appends)


@pytest.mark.soak
@pytest.mark.parametrize("appends", [1, 4])
def test_nobody_starves_while_thirty_two_append_to_a_bucket_by_the_clock(
    appends: int, s3: S3Server, tmp_path: Path
) -> None:
    """The same as above with a server and a network, and so with what it costs to compute, on a
    machine that has to have time for it."""
    with proxy_to(s3.address) as proxy:
        _append_at_once(
            Site(new_url(), s3.behind(proxy.endpoint).options()), proxy, tmp_path, appends=appends
        )


def _append_at_once(site: Site, proxy: Proxy, tmp_path: Path, *, appends: int) -> None:
    """In several processes: in one, thirty-two hosts would have one interpreter."""
    site.open(tmp_path / "maker").close()
    way = json.dumps([site.options, site.more])
    processes = [
        _appender(site.place, way, str(WRITERS // PROCESSES), str(appends), str(tmp_path / f"{me}"))
        for me in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        proxy.faults.latency_s = LATENCY_S
        requests, began_s = -proxy.requests, time.monotonic()
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [
            line.split()
            for process in processes
            for line in process.communicate(timeout=240)[0].splitlines()
        ]
        requests, took_s = requests + proxy.requests, time.monotonic() - began_s
        assert [process.returncode for process in processes] == [0] * PROCESSES
    finally:
        for process in processes:
            process.kill()
            process.wait()
    waits_s = sorted(float(value) for word, value in said if word == "waited")
    computed_s = sum(float(value) for word, value in said if word == "computed")
    print(
        f"the longest of {len(waits_s)} appends waited {waits_s[-1]:.2f} s, the median "
        f"{waits_s[len(waits_s) // 2]:.2f} s; "
        f"all took {took_s:.2f} s, writers computed for {computed_s:.2f} s, "
        f"{requests / len(waits_s):.0f} requests by HTTP each"
    )
    assert len(waits_s) == appends * WRITERS
    assert waits_s[-1] <= LONGEST_S


def _appender(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.shared.appender", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
