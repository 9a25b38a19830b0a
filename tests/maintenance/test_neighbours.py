"""Other processes and hosts in one store: stopped ones block nobody, and forked ones share
nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

import ckptstore
from ckptstore import KeepLast
from ckptstore.log.sessions import is_gone, open_session, read_sessions
from ckptstore.repository import store_handle as opening_module
from ckptstore.storage import open_storage
from tests.shared.sites import on
from tests.support.checker import assert_same, assert_sound, view_of
from tests.support.fork_server import Nursery
from tests.support.workloads import CHUNK_BYTES, contents_of, small

MOMENTS = 2
LONGEST_S = 20.0
"""Far below what a lock that waits for a stopped process would take, far above what a busy machine
does."""

CONTAINER = """
import sys
from ckptstore.log.sessions import open_session
from ckptstore.storage import open_storage
session = open_session(open_storage(sys.argv[1]), "commit")
print(session.id, flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_blocks_nobody(scratch: Path, nursery: Nursery, seed: int) -> None:
    place, random = scratch / "store", Random(seed)
    child = nursery.start("change_on", place=str(place), first=1000).go()
    while not child.reports("committed"):
        time.sleep(0.001)
    try:
        for moment in range(MOMENTS):
            time.sleep(random.uniform(0, 0.05))
            os.kill(child.pid, signal.SIGSTOP)
            started = time.monotonic()
            with ckptstore.open(
                place, run="other", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
            ) as store:
                commit = store.commit(small(moment), step=moment, tag="mine")
                assert_same(
                    store.checkout(commit.id).state_dict(),
                    small(moment),
                    "beside a stopped process",
                )
                store.forget(KeepLast(2))
                store.gc(max_unused=0.0, grace_s=0)
                assert store.log()
            assert time.monotonic() - started < LONGEST_S, f"seed {seed}"
            os.kill(child.pid, signal.SIGCONT)
        with ckptstore.open(place) as store:
            assert all(
                info.status != "gone" for info in store.sessions() if info.info.pid == child.pid
            )
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
    assert not child.reports("error")
    assert_sound(place, contents_of(place))


def test_a_forked_child_opens_the_store_for_itself_beside_its_parent(scratch: Path) -> None:
    with ckptstore.open(
        scratch / "store", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    ) as store:
        store.commit(small(0), step=0)
        store.log()
        child = os.fork()
        if not child:
            code = 1
            try:
                assert_same(store.checkout(0).state_dict(), small(0), "in the child")
                with ckptstore.open(scratch / "store", run="child") as own:
                    own.commit(small(1), step=1)
                    own.gc(grace_s=0)
                code = 0
            finally:
                os._exit(code)
        mine = store.commit(small(2), step=2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_same(store.checkout("child@1").state_dict(), small(1), "the child's")
        assert store.log(run=store.run)[0].id == mine.id
    assert_sound(scratch / "store", contents_of(scratch / "store"))


def test_processes_of_two_containers_with_one_pid_are_two_processes(scratch: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no pid namespace can be made here")
    storage = open_storage(scratch / "store", fsync=False)
    mine = open_session(storage, "commit")
    command = [*inside, sys.executable, "-c", CONTAINER, str(scratch / "store")]
    containers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for container in containers:
            assert container.stdout and container.stdout.readline()
        others = [info for info in read_sessions(storage) if info.id != mine.id]
        assert len(others) == 2
        assert {info.pid for info in others} == {1}
        assert len({info.pid_namespace for info in others}) == 2
        assert not any(map(is_gone, others)), "process 1 of this namespace is another one"
    finally:
        for container in containers:
            container.communicate()
        mine.end()


@contextmanager
def host(cache: Path) -> Iterator[None]:
    """Within, stores are opened as from a host with a disk of its own for its indexes."""
    with on(cache):
        yield


def test_hosts_on_a_shared_directory_keep_their_own_indexes_and_meet_in_the_log(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, caches = scratch / "store", [scratch / f"host-{i}" for i in range(3)]
    monkeypatch.setattr(opening_module, "is_network_filesystem", lambda path: path == place)
    stores = []
    for i, cache in enumerate(caches):
        with host(cache):
            stores.append(
                ckptstore.open(
                    place, run=f"host-{i}", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
                )
            )
    commits = {}
    for step in range(4):
        for i, store in enumerate(stores):
            commits[i, step] = store.commit(small(step), step=step)
    assert commits[1, 3].stats and commits[1, 3].stats.new_bytes < commits[0, 3].stats.new_bytes, (
        "what another host stored is not stored again"
    )
    stores[1].forget(KeepLast(2), all_runs=True)
    stores[2].gc(max_unused=0.0, grace_s=0)
    for store in stores:
        for i in range(len(stores)):
            assert_same(
                store.checkout(f"host-{i}@3").state_dict(), small(3), "after another host's gc"
            )
        assert len(store.log()) == 6
        store.close()
    assert not (place / "index").exists()
    assert all(list(cache.glob("*/catalog.sqlite")) for cache in caches)
    assert len(view_of(place).live) == 6
