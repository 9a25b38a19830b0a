"""One place knows of forks, and what it gives a child is free."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core import forks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
PACKAGE = Path(ckptstore.__file__).parent
HANGS_S = 60


def code_of_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S // 2)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_one_module_registers_what_happens_at_a_fork() -> None:
    found = [path for path in PACKAGE.rglob("*.py") if "register_at_fork" in path.read_text()]
    assert found == [PACKAGE / "core" / "forks.py"]


def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    lock, held, over = forks.lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(HANGS_S)

    def take() -> None:
        assert lock.acquire(timeout=5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(HANGS_S)
    code = code_of_child(take)
    assert lock.locked()
    over.set()
    thread.join()
    assert code == 0


def test_threads_that_fork_at_once_take_turns(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"n": 1}, step=1)
        codes: list[int] = []

        def fork() -> None:
            for _ in range(15):
                codes.append(code_of_child(lambda: store.log()))

        threads = [threading.Thread(target=fork, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert codes == [0] * 45
        assert store.log()[0].step == 1


def test_a_child_queries_the_catalog_though_threads_of_its_parent_did_at_the_fork(
    tmp_path: Path,
) -> None:
    over = threading.Event()
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"n": 1}, step=1)

        def ask() -> None:
            while not over.is_set():
                store.log()

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            codes = [code_of_child(lambda: store.log()) for _ in range(20)]
        finally:
            over.set()
            for thread in threads:
                thread.join(HANGS_S)
        assert codes == [0] * 20
