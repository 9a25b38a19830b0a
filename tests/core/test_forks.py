"""One place knows of forks, and what it gives a child is free."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core import forks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
PACKAGE = Path(ckptstore.__file__).parent
HANGS_S = 60


def forked() -> int:
    while True:
        try:
            return os.fork()
        except RuntimeError as error:
            # filelock 4, which torch imports, lets no thread fork while another one does.
            if "filelock" not in str(error):
                raise
            time.sleep(0.001)


def code_of_child(work: Callable[[], object]) -> int:
    child = forked()
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


class Slow:
    """What takes its time to compute a value, the first time."""

    def __init__(self) -> None:
        self.begun, self.over, self.count = threading.Event(), threading.Event(), 0

    @forks.cached_property
    def value(self) -> int:
        self.begun.set()
        self.over.wait(HANGS_S)
        self.count += 1
        return self.count


def test_a_child_computes_what_another_thread_was_computing_at_the_fork() -> None:
    slow = Slow()
    threads = [threading.Thread(target=lambda: slow.value) for _ in range(2)]
    for thread in threads:
        thread.start()
    slow.begun.wait(HANGS_S)

    def compute() -> None:
        slow.over = threading.Event()
        slow.over.set()
        assert slow.value == 1

    code = code_of_child(compute)
    slow.over.set()
    for thread in threads:
        thread.join(HANGS_S)
    assert (code, slow.count) == (0, 1)


def test_no_value_is_computed_under_a_lock_that_forks_leave_held() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    users = [text for text in texts if "@cached_property" in text]
    foreign = re.compile(r"functools import .*\bcached_property\b")
    assert users and not any(map(foreign.search, users))


def test_threads_that_fork_at_once_take_turns(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", threads=1) as store:
        store.commit({"n": 1}, step=1)
        codes: list[int] = []

        def fork() -> None:
            for _ in range(5):
                codes.append(code_of_child(lambda: store.log()))

        threads = [threading.Thread(target=fork, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert codes == [0] * 15
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
            codes = [code_of_child(lambda: store.log()) for _ in range(8)]
        finally:
            over.set()
            for thread in threads:
                thread.join(HANGS_S)
        assert codes == [0] * 8
