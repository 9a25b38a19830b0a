"""Hugging Face's Trainer with `attach`: killed trainings end as if nobody had killed them, damaged
checkpoints are passed over, directories stay small."""

import json
import logging
import os
import random
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import ckptstore
from ckptstore.errors import CkptStoreError, Corrupt, InvalidInput, NotFound
from ckptstore.interop.transformers import attach
from ckptstore.objects.pointer_files import HOLLOW_POINTER
from tests.trainers.trainings import Run, ended_bit_equal, trained
from tests.trainers.transformers_training import (
    Numbers,
    arguments,
    outcome,
    trainer_in,
)

PLAIN = "tests.trainers.transformers_training"
PEFT = "tests.trainers.transformers_peft_training"
TRL = "tests.trainers.transformers_trl_training"
SHARDED = "tests.trainers.transformers_sharded_training"

STEPS: dict[str, Any] = {"max_steps": 10, "load_best_model_at_end": False}


def ended_well(training: str, folder: Path, kills: int, ranks: int) -> None:
    """Steps are so many that no kill comes after the last save: resumed at its end, the Trainer
    takes one step more."""
    draw = random.Random(os.environ["CKPTSTORE_TEST_SEED"])
    steps = str(12 * kills + 12)
    ended_bit_equal(training, folder, kills, draw, ranks, saves=(1, 1), steps=steps)


@pytest.mark.parametrize(
    ("training", "ranks"), [(PLAIN, 1), (PLAIN, 2), (PEFT, 1), (TRL, 1)], ids=str
)
def test_a_killed_training_ends_bit_equal(training: str, ranks: int, tmp_path: Path) -> None:
    ended_well(training, tmp_path, 2, ranks)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("training", "ranks"), [(PLAIN, 1), (PLAIN, 2), (PEFT, 1), (TRL, 1)], ids=str
)
def test_twenty_kills(training: str, ranks: int, tmp_path: Path) -> None:
    ended_well(training, tmp_path, 20, ranks)


ZERO = {f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage}}} for stage in (1, 3)}
FSDP = {"fsdp": {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}}


@pytest.mark.parametrize("under", [*ZERO, *FSDP])
def test_what_shards_the_model_is_saved_and_resumed(under: str, tmp_path: Path) -> None:
    if under in ZERO and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is built from source: not installed here")
    (tmp_path / "steps").write_text("4")
    (tmp_path / "options").write_text(json.dumps(ZERO.get(under) or FSDP[under]))
    wanted = trained(SHARDED, tmp_path, ranks=2)
    assert (wanted[0]["weights"] != wanted[1]["weights"]) == (under in FSDP)
    assert (tmp_path / "out" / "checkpoint-2" / HOLLOW_POINTER).exists()
    (tmp_path / "resume from").write_text("2")
    again = Run(SHARDED, tmp_path, ranks=2)
    assert again.result() == wanted
    assert again.told("resumed") == [2]


def test_a_rank_that_cannot_save_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="OSError: the disk is full"):
        trained("tests.trainers.transformers_failing_training", tmp_path, ranks=2)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training that was interrupted after eight of ten steps, all of whose
    checkpoints are still there, and how it would have ended."""
    folder = tmp_path_factory.mktemp("done")
    interrupted = trainer_in(folder, **STEPS, save_total_limit=None)
    interrupted.add_callback(Interrupt())
    with attach(interrupted, folder / "store"):
        interrupted.train()
    plain = trainer_in(tmp_path_factory.mktemp("plain"), **STEPS)
    plain.train()
    (folder / "end").write_text(ended(plain))
    return folder


class Interrupt(TrainerCallback):
    """Ends a training after eight steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 8


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(done, tmp_path / "folder"))


def ended(trainer: Trainer) -> str:
    """How a training ended, bit by bit."""
    return repr(outcome(trainer))


def resumed(folder: Path, wanted: Any = True, **options: Any) -> Trainer:
    trainer = trainer_in(folder, **{**STEPS, "save_total_limit": None, **options})
    with attach(trainer, folder / "store"):
        trainer.train(resume_from_checkpoint=wanted)
    return trainer


def assert_same_end(folder: Path, trainer: Trainer) -> None:
    assert ended(trainer) == (folder / "end").read_text()


def names(folder: Path, step: int) -> set[str]:
    return {path.name for path in (folder / "out" / f"checkpoint-{step}").iterdir()}


@pytest.mark.oldest
def test_older_directories_are_hollow_and_the_newest_is_whole(folder: Path) -> None:
    for step in (2, 4, 6):
        assert HOLLOW_POINTER in names(folder, step)
        assert not names(folder, step) & {"model.safetensors", "optimizer.pt"}
        assert {"trainer_state.json", "config.json"} <= names(folder, step)
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth"} <= names(folder, 8)
    assert HOLLOW_POINTER not in names(folder, 8)
    with ckptstore.open(folder / "store", run="out") as store:
        assert [info.step for info in store.log()] == [8, 6, 4, 2]
        found = store.checkout(6)
        assert {"loss", "eval_loss", "learning_rate", "epoch"} <= found.metrics.keys()
        assert "eval_runtime" not in found.metrics
        assert store.checkout("best:eval_loss").step is not None


@pytest.mark.parametrize("wanted", ["4", "hollow", 4, "best", "whole"])
@pytest.mark.oldest
def test_training_goes_on_from_any_commit(folder: Path, wanted: Any) -> None:
    with ckptstore.open(folder / "store", run="out") as store:
        store.tag("good", 4)
    refs = {"hollow": str(folder / "out" / "checkpoint-4"), "best": "good"}
    refs["whole"] = str(folder / "out" / "checkpoint-8")
    assert_same_end(folder, resumed(folder, refs.get(wanted, wanted)))


def test_training_goes_on_from_a_hollow_directory_of_another_store(
    folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_in(tmp_path / "other", **STEPS, save_total_limit=None)
    with attach(trainer, tmp_path / "other" / "store"):
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
    assert_same_end(folder, trainer)


def test_another_machine_needs_the_store_alone(folder: Path) -> None:
    shutil.rmtree(folder / "out")
    assert_same_end(folder, resumed(folder))


def test_a_directory_that_was_damaged_by_hand_is_mended(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = folder / "out" / "checkpoint-8"
    os.truncate(newest / "optimizer.pt", 1000)
    (newest / "model.safetensors").unlink()
    (newest / "trainer_state.json").write_text("{")
    assert_same_end(folder, resumed(folder))
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("optimizer.pt was not as it was saved" in text for text in told)
    assert any("trainer_state.json was not as it was saved" in text for text in told)


def damage(folder: Path, step: int) -> None:
    """Turn a bit of a chunk that only the commit of this step has; its directory goes."""
    shutil.rmtree(folder / "out" / f"checkpoint-{step}")
    with ckptstore.open(folder / "store", run="out") as store:
        (session,) = {info.session for info in store.log() if info.step == step}
    packs = [path for path in (folder / "store" / "packs").rglob(f"{session}*") if path.is_file()]
    largest = max(packs, key=lambda path: path.stat().st_size)
    largest.chmod(0o600)
    data = bytearray(largest.read_bytes())
    data[2000] ^= 1
    largest.write_bytes(data)


@pytest.mark.oldest
def test_a_damaged_newest_commit_is_passed_over_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder, 8)
    trainer = trainer_in(folder, **STEPS, save_total_limit=None)
    with attach(trainer, folder / "store") as attached:
        trainer.train(resume_from_checkpoint=True)
        assert [each.step for each in attached.skipped] == [8]
    assert any("skipped commit" in record.message for record in caplog.records)
    assert_same_end(folder, trainer)


def test_a_save_that_did_not_finish_is_passed_over_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn = folder / "out" / "checkpoint-12"
    torn.mkdir()
    (torn / "config.json").write_text("{}")
    assert_same_end(folder, resumed(folder, str(torn)))
    assert any("checkpoint-12 has no commit" in record.message for record in caplog.records)


def test_a_training_begins_anew_only_if_it_is_told_to_or_was_killed_in_its_first_save(
    tmp_path: Path,
) -> None:
    trainer = trainer_in(tmp_path, **STEPS, save_total_limit=None)
    with attach(trainer, tmp_path / "store") as attached:
        assert not attached.can_resume
        with pytest.raises(ValueError, match=r"No valid checkpoint .*attached\.can_resume"):
            trainer.train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "bogus"))
        with pytest.raises(NotFound, match="nowhere"):
            trainer.train(resume_from_checkpoint="nowhere")
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    with attach(trainer, tmp_path / "store") as attached:
        assert attached.can_resume
    assert resumed(tmp_path).state.global_step == 10


def test_checkpoints_from_before_the_store_are_taken_as_they_are(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, **STEPS, save_total_limit=None)
    trainer.train()
    (tmp_path / "end").write_text(ended(trainer))
    shutil.rmtree(tmp_path / "out" / "checkpoint-10")
    assert_same_end(tmp_path, resumed(tmp_path))
    with ckptstore.open(tmp_path / "store", run="out") as store:
        assert [info.step for info in store.log()] == [10]


@pytest.mark.oldest
def test_the_best_outlives_the_limit_and_its_directory(tmp_path: Path) -> None:
    options = {"max_steps": 8, "save_total_limit": 1, "learning_rate": 1.0, "seed": 5}
    trainer = trainer_in(tmp_path, **options)
    policy = ckptstore.KeepLast(1)
    with attach(trainer, tmp_path / "store", whole=0, keep=policy, release=True) as attached:
        trainer.train()
        assert attached.store
        best = trainer.state.best_global_step
        assert attached.store.checkout("best:eval_loss").step == best
        expected = attached.store.checkout(best).state_dict("model")
        held = {info.step for info in attached.store.log()}
        assert best in held and len(held) <= 3
    for name, value in trainer.model.state_dict().items():
        if name in expected:
            assert torch.equal(value, expected[name])
    shutil.rmtree(tmp_path / "out")
    again = trainer_in(tmp_path, **options)
    with attach(again, tmp_path / "store"):
        again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step == best
    for name, value in again.model.state_dict().items():
        if name in expected:
            assert torch.equal(value, expected[name])


def test_a_copy_of_a_deleted_directory_gets_its_files_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_in(tmp_path, max_steps=8, save_total_limit=1)
    keep = ckptstore.KeepLast(1)
    with attach(trainer, tmp_path / "store", background=False, whole=0, keep=keep) as attached:
        save, hollow = trainer._save_checkpoint, tmp_path / "out" / "checkpoint-2"

        def copying(*given: Any) -> None:
            if (hollow / HOLLOW_POINTER).exists():
                shutil.copytree(hollow, tmp_path / "mine")
            save(*given)

        trainer._save_checkpoint = copying  # type: ignore[method-assign]
        trainer.train()
        assert attached.store and not hollow.exists()
        attached.store.checkout(tmp_path / "mine").materialize(tmp_path / "mine")
    assert (tmp_path / "mine" / "optimizer.pt").exists()
    told = [record.message for record in caplog.records if "release" in record.message]
    assert len(told) == 1 and "`ckptstore release --except-in" in told[0]


@pytest.mark.oldest
def test_the_error_of_a_failed_save_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, **STEPS)
    with attach(trainer, tmp_path / "store") as attached:
        assert attached.store

        def failing(*given: Any, **named: Any) -> None:
            raise Corrupt("the disk is on fire")

        monkeypatch.setattr(attached.store, "adopt", failing)
        with pytest.raises(CkptStoreError, match="the disk is on fire"):
            trainer.train()
    assert trainer.state.global_step == 4, "the save after the failed one raises"


def test_without_background_a_save_is_durable_when_it_returns(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, **STEPS)
    seen = []
    with attach(trainer, tmp_path / "store", background=False, whole=0) as attached:
        assert attached.store
        store, save = attached.store, trainer._save_checkpoint

        def looking(*given: Any) -> None:
            save(*given)
            seen.append(store.checkout("latest").step)

        trainer._save_checkpoint = looking  # type: ignore[method-assign]
        trainer.train()
    assert seen == [2, 4, 6, 8, 10]


@pytest.mark.oldest
def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path)
    with attach(trainer, tmp_path / "store"), pytest.raises(InvalidInput, match="already"):
        attach(trainer, tmp_path / "store")
    assert "train" not in vars(trainer)
    with (
        ckptstore.open(tmp_path / "store", run="a") as store,
        pytest.raises(InvalidInput, match="open for run a"),
    ):
        attach(trainer, store, run="b")
    each = Trainer(
        model=trainer.model,
        args=TrainingArguments(**arguments(tmp_path, save_on_each_node=True)),
        train_dataset=Numbers(4, 1),
        eval_dataset=Numbers(4, 1),
    )
    with pytest.raises(InvalidInput, match="save_on_each_node"):
        attach(each, tmp_path / "store")
    monkeypatch.setattr("transformers.__version__", "4.40.2")
    with pytest.raises(InvalidInput, match=r"4\.40\.2 is not supported: wanted 5\.3"):
        attach(trainer, tmp_path / "store")


def test_the_example_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trainers" / "hugging_face.py"))
    out = capsys.readouterr().out
    assert "step 20: eval_loss" in out and "the best step:" in out
    assert "checkpoint-15 has ckptstore-pointer.json" in out
