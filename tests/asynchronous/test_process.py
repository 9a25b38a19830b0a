"""Commits made by a process of its own: the same commits, without torch, and neither side's death is the other's."""

import copy
import os
import signal
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput, Unavailable
from ckptstore.engine.transfer import ASIDE_NICE
from tests.asynchronous.states import Gate, assert_committed, attack, frozen_copy, training

MIB = 1 << 20


def state(value: float) -> dict[str, torch.Tensor]:
    return {"t": torch.full((100_000,), value)}


def test_its_commits_are_those_of_a_thread(tmp_path: Path) -> None:
    everything = training()
    with ckptstore.open(tmp_path / "store", executor="process", chunk_bytes=65536) as store:
        for step in range(3):
            wanted, same = frozen_copy(everything), copy.deepcopy(everything)
            pending = store.commit_async(everything, step=step, metrics={"loss": 0.1 * step}, tag="t", message="said")
            with attack(everything):
                snapshot = pending.wait()
            assert_committed(snapshot, wanted)
        assert snapshot.metrics == {"loss": 0.2} and snapshot.message == "said" and snapshot.tags == ("t",)
        assert snapshot.stats and snapshot.stats.new_bytes
        assert store.commit(same).content_id == snapshot.content_id
        assert [info.step for info in store.log()] == [None, 2, 1, 0]
        store.checkout("t").verify()


def test_the_worker_is_on_its_own(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", executor="process") as store:
        assert store.worker_pid is None
        store.commit_async(state(1)).wait()
        pid = store.worker_pid
        assert pid
        assert os.getsid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + ASIDE_NICE, 19)
        if (session := Path(f"/proc/{pid}/autogroup")).exists():  # Linux shares processors among sessions first
            assert session.read_text().endswith(f"nice {ASIDE_NICE}\n")
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_trainer_survives_the_workers_death(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", executor="process") as store:
        kept = store.commit_async(state(1)).wait()
        gate = Gate("hashed")
        pending = store.commit_async(state(2), on_progress=gate)
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


def test_a_commit_that_its_trainer_leaves_is_not_made_and_the_next_one_is_its_own(tmp_path: Path) -> None:
    """The worker may still read memory that the next state is copied to, and has said what nobody listened to."""

    def leave(progress: ckptstore.CommitProgress) -> None:
        if progress.milestone == "hashed":
            raise SystemExit(3)

    with ckptstore.open(tmp_path / "store", executor="process") as store:
        assert isinstance(store.commit_async(state(1), on_progress=leave).exception(), SystemExit)
        again = store.commit_async(state(2)).wait()
        assert torch.equal(again.read("t"), state(2)["t"]) and [info.id for info in store.log()] == [again.id]


def test_a_commit_can_be_called_off_before_it_is_published(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", executor="process") as store:
        gate = Gate("hashed")
        pending = store.commit_async(state(1), on_progress=gate)
        gate.there.wait()
        assert pending.cancel()
        gate.opened.set()
        assert isinstance(pending.exception(), ckptstore.Cancelled)
        assert store.log() == []
        assert store.commit_async(state(2)).wait().parents == ()


def test_errors_of_the_worker_are_the_trainers(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", executor="process") as store:
        store.commit_async(state(1)).wait()
        sessions = Path(store.url, "sessions")
        sessions.rmdir()
        sessions.touch()
        assert isinstance(store.commit_async(state(2)).exception(), Unavailable)
        sessions.unlink()
        store.commit_async(state(3)).wait()


def test_frozen_weights_need_not_be_handed_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300).requires_grad_(False)
    with ckptstore.open(tmp_path / "store", executor="process") as store:
        for step in range(3):
            snapshot = store.commit_async({"model": model}, step=step, trust_version=True).wait()
        assert torch.equal(snapshot.read("model/weight"), model.weight)


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", executor="process", staging_bytes=2 * MIB) as store:
        with pytest.raises(InvalidInput, match="staging_bytes"):
            store.commit_async({"t": torch.zeros(3 * MIB, dtype=torch.uint8)})
        store.commit_async(state(1)).wait()
