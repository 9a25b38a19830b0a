"""Commits by a worker process: equal commits without torch, and safe when either side dies."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput, Unavailable
from ckptstore.commit.commit_metadata import CommitMetadata, CommitRequest, Prepared
from ckptstore.distributed import worker_client
from ckptstore.distributed.merge import Described
from ckptstore.distributed.worker_process import state_from, state_to
from ckptstore.objects.schema import LastSchemas
from ckptstore.repository.thread_pool import ASIDE_NICE
from ckptstore.state.flatten import flatten
from tests.commit.states import Gate, assert_committed, attack, frozen_copy, training

MIB = 1 << 20


def state(value: float) -> dict[str, torch.Tensor]:
    return {"t": torch.full((100_000,), value)}


def test_its_commits_are_those_of_a_thread(tmp_path: Path) -> None:
    everything = training()
    with ckptstore.open(
        tmp_path / "store",
        background=ckptstore.Async(executor="process"),
        storage=ckptstore.Storage(chunk_bytes=65536),
    ) as store:
        for step in range(3):
            wanted, same = frozen_copy(everything), copy.deepcopy(everything)
            pending = store.commit_async(
                everything, step=step, metrics={"loss": 0.1 * step}, tag="t", message="said"
            )
            with attack(everything):
                snapshot = pending.wait()
            assert_committed(snapshot, wanted)
        assert (
            snapshot.metrics == {"loss": 0.2}
            and snapshot.message == "said"
            and snapshot.tags == ("t",)
        )
        assert snapshot.stats and snapshot.stats.new_bytes
        assert store.commit(same).content_id == snapshot.content_id
        assert [info.step for info in store.log()] == [None, 2, 1, 0]
        store.checkout("t").verify()


def test_the_worker_is_on_its_own(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        assert store.worker_pid is None
        store.commit_async(state(1)).wait()
        pid = store.worker_pid
        assert pid
        assert os.getsid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(
            os.getpriority(os.PRIO_PROCESS, 0) + ASIDE_NICE, 19
        )
        if (
            session := Path(f"/proc/{pid}/autogroup")
        ).exists():  # Linux shares processors among sessions first
            assert session.read_text().endswith(f"nice {ASIDE_NICE}\n")
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_module_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zstandard", "blake3", "json", "ckptstore"):
        (tmp_path / f"{name}.py").write_text(
            "import os\nopen(os.path.dirname(__file__) + '/was_run', 'w').close()\n"
        )
    monkeypatch.chdir(tmp_path)
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        store.commit_async({"m": {"w": torch.ones(300_000)}}, step=1).wait()
    assert not (tmp_path / "was_run").exists()


def test_the_worker_is_of_the_package_that_the_trainer_imported(tmp_path: Path) -> None:
    """A checkout that a script puts on `sys.path`, while another ckptstore is installed; both are
    found from any directory."""
    (tmp_path / "checkout").mkdir()
    shutil.copytree(
        Path(ckptstore.__file__).parent,
        tmp_path / "checkout" / "ckptstore",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    worker = tmp_path / "checkout" / "ckptstore" / "distributed" / "worker_process.py"
    worker.write_text(worker.read_text() + "\nopen(__file__ + '.was_run', 'w').close()\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ckptstore, torch\n"
        "way = ckptstore.Async(executor='process')\n"
        "with ckptstore.open(sys.argv[2], background=way) as store:\n"
        "    store.commit_async({'m': {'w': torch.ones(300_000)}}, step=1).wait()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "checkout"), str(tmp_path / "store")],
        check=True,
        cwd=tmp_path,
    )
    assert worker.with_name("worker_process.py.was_run").exists()


def test_a_worker_that_cannot_be_started_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
        with pytest.raises(Unavailable, match="no worker process can be started"):
            store.commit_async({"m": {"w": torch.ones(300_000)}}, step=1).wait()
        monkeypatch.undo()
        store.commit_async({"m": {"w": torch.ones(300_000)}}, step=1).wait()


def test_a_worker_that_ends_at_once_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(fd: int) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(["true"], pass_fds=[fd])
        process.wait()
        return process

    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        monkeypatch.setattr(worker_client, "_start", start)
        with pytest.raises(Unavailable, match="worker process"):
            store.commit_async(state(1)).wait()
        monkeypatch.undo()
        store.commit_async(state(2)).wait()


def test_the_worker_ends_though_a_forked_child_of_the_trainer_holds_its_connection(
    tmp_path: Path,
) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        store.commit_async(state(1)).wait()
        child = os.fork()
        if not child:
            signal.pause()
        started = time.monotonic()
    assert time.monotonic() - started < worker_client.ENDS_S / 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_trainer_survives_the_workers_death(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        kept = store.commit_async(state(1)).wait()
        gate = Gate("hashed")
        pending = store.commit_async(state(2), background=ckptstore.Async(on_progress=gate))
        gate.there.wait()
        first = store.worker_pid
        assert first
        os.kill(first, signal.SIGSTOP)  # before its log entry, so that it certainly is not made
        os.kill(first, signal.SIGKILL)
        gate.opened.set()
        error = pending.exception()
        if error:
            assert isinstance(error, Unavailable) and "worker" in str(error)
        again = store.commit_async(state(3)).wait()
        assert store.worker_pid != first
        kept.verify()
        again.verify()


def test_a_commit_that_its_trainer_leaves_is_not_made_and_the_next_one_is_its_own(
    tmp_path: Path,
) -> None:
    """The worker may still read memory that the next state is copied to, and has said what nobody
    listened to."""

    def leave(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "hashed":
            raise SystemExit(3)

    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        assert isinstance(
            store.commit_async(state(1), background=ckptstore.Async(on_progress=leave)).exception(),
            SystemExit,
        )
        again = store.commit_async(state(2)).wait()
        assert torch.equal(again.read("t"), state(2)["t"]) and [
            info.id for info in store.log()
        ] == [again.id]


def test_a_commit_can_be_cancelled_before_it_is_published(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        gate = Gate("hashed")
        pending = store.commit_async(state(1), background=ckptstore.Async(on_progress=gate))
        gate.there.wait()
        assert pending.cancel()
        gate.opened.set()
        assert isinstance(pending.exception(), ckptstore.Cancelled)
        assert store.log() == []
        assert store.commit_async(state(2)).wait().parents == ()


def test_errors_of_the_worker_are_the_trainers(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        store.commit_async(state(1)).wait()
        sessions = Path(store.url, "sessions")
        sessions.rmdir()
        sessions.touch()
        assert isinstance(store.commit_async(state(2)).exception(), Unavailable)
        sessions.unlink()
        store.commit_async(state(3)).wait()


def test_frozen_weights_need_not_be_handed_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300).requires_grad_(False)
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process")
    ) as store:
        for step in range(3):
            snapshot = store.commit_async(
                {"model": model}, step=step, background=ckptstore.Async(trust_version=True)
            ).wait()
        assert torch.equal(snapshot.read("model/weight"), model.weight)


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with ckptstore.open(
        tmp_path / "store", background=ckptstore.Async(executor="process", staging_bytes=2 * MIB)
    ) as store:
        with pytest.raises(InvalidInput, match="staging_bytes"):
            store.commit_async({"t": torch.zeros(3 * MIB, dtype=torch.uint8)})
        store.commit_async(state(1)).wait()


def test_the_worker_keeps_the_schemas_of_one_commit() -> None:
    known = Described()
    for step in range(3):
        flats = flatten({"a": {"n": [step]}, "b": {str(step): 1.0}})
        label = CommitMetadata("main", step)
        request = CommitRequest(Prepared(label, flats), 0.0)
        message = state_to(label, flats, request, LastSchemas())
        got_label, got = state_from(message, memoryview(b""), known)
        assert got_label == label
        assert [got[key].schema for key in flats] == [flat.schema for flat in flats.values()]
        assert set(known.schemas.values()) == {flat.schema for flat in flats.values()}
