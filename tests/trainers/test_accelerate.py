"""Accelerate trains on a store: saves in the background, resumption, rotation, hooks, refusals."""

import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file

import ckptstore
from ckptstore.interop import accelerate as integration
from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import Training, new_accelerator
from tests.trainers.trainings import digest, ended_bit_equal, trained

TRAINING = "tests.trainers.accelerate_training"


def packs(store: Path) -> set[Path]:
    return {path for path in (store / "packs").rglob("*") if path.is_file()}


def directories(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "project" / "checkpoints").iterdir())


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(new_accelerator(tmp_path))


def another(tmp_path: Path, **options: Any) -> Training:
    """A training that begins anew, as in another process."""
    return Training(new_accelerator(tmp_path, **options), seed=8)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.timeout(1_800)
def test_a_training_killed_while_it_saves_ends_as_one_that_was_not(
    tmp_path: Path, kills: int
) -> None:
    epochs = str(2 * kills)
    draw = random.Random(kills)
    fate = ended_bit_equal(TRAINING, tmp_path, kills, draw, ranks=2, saves=(2, 3), epochs=epochs)
    assert fate.resumed
    assert fate.result[0][1] == 2


@pytest.mark.parametrize(
    "damage", ["flip a bit", "cut the file", "delete the file", "cut the pointer"]
)
@pytest.mark.oldest
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, training: Training, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    training.steps(2)
    training.accelerator.save_state()
    attached.wait()
    wanted, before = digest(*training.state()), packs(tmp_path / "store")
    training.steps(2)
    newest = training.accelerator.save_state()
    attached.close()
    if damage == "cut the pointer":
        (newest / ".metadata").write_text("{")
    else:
        for pack in packs(tmp_path / "store") - before:
            data = bytearray(pack.read_bytes())
            data[len(data) // 3] ^= 16
            pack.write_bytes(data if damage == "flip a bit" else data[: len(data) // 4])
            if damage == "delete the file":
                pack.unlink()
    again = another(tmp_path)
    attached = attach(again.accelerator, tmp_path / "store")
    with caplog.at_level(logging.WARNING, "ckptstore"):
        again.accelerator.load_state()
    assert digest(*again.state()) == wanted
    assert f"skipped checkpoint {newest}" in caplog.text
    assert again.accelerator.save_state().name == "checkpoint_2"
    attached.close()


@pytest.mark.oldest
def test_the_state_is_that_of_the_call_and_training_goes_on_meanwhile(
    tmp_path: Path, training: Training
) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    training.steps(2)
    directory = training.accelerator.save_state()
    wanted = digest(*training.state())
    training.steps(3)
    attached.close()
    again = another(tmp_path)
    with attach(again.accelerator, tmp_path / "store").store:
        again.accelerator.load_state(directory)
    assert digest(*again.state()) == wanted


@pytest.mark.oldest
def test_each_ref_names_a_checkpoint(tmp_path: Path, training: Training) -> None:
    accelerator = training.accelerator
    attached = attach(accelerator, tmp_path / "store")
    seen = {}
    for step, loss in ((10, 0.5), (20, 0.25), (30, 0.75)):
        training.steps(1)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state(tmp_path / f"step_{step}", metrics={"loss": loss}, tag=f"at-{step}")
        seen[step] = digest(*training.state())
    for ref, step in (
        (10, 10),
        ("at-30", 30),
        ("best:loss", 20),
        (tmp_path / "step_30", 30),
        (str(tmp_path / "step_10"), 10),
        (None, 30),
    ):
        accelerator.load_state(ref)
        assert digest(*training.state()) == seen[step], ref
    with pytest.raises(ckptstore.NotFound, match="step_40 is no directory"):
        accelerator.load_state(str(tmp_path / "step_40"))
    with pytest.raises(ckptstore.NotFound):
        accelerator.load_state("at-40")
    attached.close()


def test_nothing_to_load_is_an_error_and_nothing_to_resume_is_not(
    tmp_path: Path, training: Training
) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    with pytest.raises(ckptstore.NotFound, match="nothing to load"):
        training.accelerator.load_state()
    assert not attached.resume()
    attached.close()


def test_a_failed_save_reaches_the_loop_and_removes_nothing(tmp_path: Path) -> None:
    training = Training(new_accelerator(tmp_path, limit=1))
    attached = attach(training.accelerator, tmp_path / "store")
    training.accelerator.save_state()
    attached.wait()
    kept = directories(tmp_path)
    packs_of_store = tmp_path / "store" / "packs"
    packs_of_store.rename(tmp_path / "away")
    packs_of_store.write_bytes(b"")
    training.steps(1)
    training.accelerator.save_state()
    with pytest.raises(ckptstore.CkptStoreError):
        training.accelerator.save_state()
    assert set(kept) <= set(directories(tmp_path))
    packs_of_store.unlink()
    (tmp_path / "away").rename(packs_of_store)
    training.accelerator.save_state()
    attached.wait()
    assert len(directories(tmp_path)) == 1
    assert directories(tmp_path) != kept
    attached.close()


def test_removed_directories_leave_the_store_too(tmp_path: Path) -> None:
    training = Training(new_accelerator(tmp_path, limit=2))
    attached = attach(training.accelerator, tmp_path / "store")
    for _ in range(5):
        training.steps(1)
        training.accelerator.save_state()
    training.accelerator.save_state()
    attached.wait()
    assert directories(tmp_path) == ["checkpoint_4", "checkpoint_5"]
    assert len(attached.store.log()) == 2
    attached.close()


def test_removed_directories_leave_the_store_after_restarts_too(tmp_path: Path) -> None:
    for _ in range(5):
        training = another(tmp_path, limit=1)
        attached = attach(training.accelerator, tmp_path / "store")
        attached.resume()
        training.steps(1)
        training.accelerator.save_state()
        attached.close()
    assert directories(tmp_path) == ["checkpoint_4"]
    with ckptstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [4, 3]


def test_numbers_go_on_behind_what_was_loaded(tmp_path: Path, training: Training) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    for _ in range(3):
        training.accelerator.save_state()
    attached.close()
    again = another(tmp_path)
    attached = attach(again.accelerator, tmp_path / "store")
    with pytest.raises(ckptstore.InvalidInput, match="has a checkpoint already"):
        again.accelerator.save_state()
    assert attached.resume()
    assert again.accelerator.save_state().name == "checkpoint_3"
    attached.close()


def test_a_directory_whose_save_did_not_end_is_used_again(
    tmp_path: Path, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    training.accelerator.save_state()
    attached.close()
    (tmp_path / "project" / "checkpoints" / "checkpoint_1").mkdir()
    again = another(tmp_path)
    attached = attach(again.accelerator, tmp_path / "store")
    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert attached.resume()
    assert "checkpoint_1: its save did not end" in caplog.text
    assert again.accelerator.save_state().name == "checkpoint_1"
    attached.close()


@pytest.mark.oldest
def test_what_accelerate_has_saved_itself_is_loaded_by_it(
    tmp_path: Path, training: Training
) -> None:
    training.steps(2)
    training.accelerator.save_state()
    wanted = digest(*training.state())
    again = another(tmp_path)
    attached = attach(again.accelerator, tmp_path / "store")
    assert attached.resume()
    assert digest(*again.state()) == wanted
    assert again.accelerator.save_state().name == "checkpoint_1"
    attached.close()


def test_a_hook_may_write_files_and_take_weights_away(tmp_path: Path, training: Training) -> None:
    accelerator = training.accelerator
    attached = attach(accelerator, tmp_path / "store")

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        save_file(weights.pop(), Path(directory) / "own.safetensors")
        (Path(directory) / "class.json").write_text(json.dumps(type(models[0]).__name__))

    def load(models: list[Any], directory: str) -> None:
        models.pop().load_state_dict(load_file(Path(directory) / "own.safetensors"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    training.steps(2)
    directory = accelerator.save_state()
    wanted = digest(*training.state())
    attached.wait()
    assert "model" not in set(attached.store.checkout().keys())
    assert json.loads((directory / "class.json").read_text()) == "Net"
    training.steps(2)
    accelerator.load_state(directory)
    assert digest(*training.state()) == wanted
    accelerator.load_state(attached.store.checkout().id)
    attached.close()


@pytest.mark.parametrize("damage", ["flip a bit", "cut the file", "delete the directory"])
def test_what_hooks_write_is_in_the_commit(
    tmp_path: Path, training: Training, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = training.accelerator
    attached = attach(accelerator, tmp_path / "store")

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        (Path(directory) / "lora").mkdir(exist_ok=True)
        (Path(directory) / "empty").touch()
        save_file(weights.pop(), Path(directory) / "lora/own.safetensors")

    def load(models: list[Any], directory: str) -> None:
        assert not (Path(directory) / "empty").read_bytes()
        models.pop().load_state_dict(load_file(Path(directory) / "lora/own.safetensors"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    training.steps(2)
    directory = accelerator.save_state(tag="good")
    wanted = digest(*training.state())
    attached.wait()
    place = directory / "lora/own.safetensors"
    data = place.read_bytes()
    if damage == "flip a bit":
        place.write_bytes(data[:-1] + bytes([data[-1] ^ 16]))
    elif damage == "cut the file":
        place.write_bytes(data[:-9])
    else:
        shutil.rmtree(directory)
    training.steps(2)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        accelerator.load_state("good" if damage == "delete the directory" else directory)
    assert digest(*training.state()) == wanted
    assert directory.exists() == (damage != "delete the directory")
    if directory.exists():
        assert place.read_bytes() == data
        assert "own.safetensors was not as it was saved" in caplog.text
    attached.close()


def test_weights_that_a_hook_changes_are_saved_as_it_left_them(
    tmp_path: Path, training: Training
) -> None:
    accelerator = training.accelerator
    attached = attach(accelerator, tmp_path / "store")
    name = "layers.0.bias"

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        weights[0][name] = torch.full_like(weights[0][name], 3.0)

    accelerator.register_save_state_pre_hook(save)
    directory = accelerator.save_state()
    accelerator.load_state(directory)
    assert accelerator.unwrap_model(training.model).state_dict()[name].eq(3).all()
    attached.close()


def test_a_value_that_cannot_be_stored_is_named_by_its_path(
    tmp_path: Path, training: Training
) -> None:
    training.progress.losses = object()  # type: ignore[assignment]
    training.progress.state_dict = lambda: {"odd": object()}  # type: ignore[method-assign]
    attached = attach(training.accelerator, tmp_path / "store")
    with pytest.raises(ckptstore.InvalidInput, match="custom/odd"):
        training.accelerator.save_state()
    attached.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
def test_a_place_in_the_data_comes_back(tmp_path: Path) -> None:
    options = {"use_stateful_dataloader": True}
    training = Training(new_accelerator(tmp_path, **options))
    attached = attach(training.accelerator, tmp_path / "store")
    batches = []
    for number, (x, _) in enumerate(training.loader):
        if number == 4:
            training.accelerator.save_state()
        if number > 4:
            batches.append(x)
    attached.close()
    again = another(tmp_path, **options)
    attached = attach(again.accelerator, tmp_path / "store")
    assert attached.resume()
    rest = [x for x, _ in again.loader]
    assert digest(*rest) == digest(*batches)
    attached.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("stateful", [True, False])
def test_each_sample_of_a_resumed_epoch_comes_once_or_a_warning_says_why_not(
    tmp_path: Path, seedable: bool, stateful: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"use_stateful_dataloader": stateful, "use_seedable_sampler": seedable}
    training = Training(new_accelerator(tmp_path, **options))
    attached = attach(training.accelerator, tmp_path / "store")
    at, seen = random.Random().randrange(1, 11), []
    print("interrupted at batch", at)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        for number, (x, _) in enumerate(training.loader, 1):
            seen += x.tolist()
            if number == at:
                training.accelerator.save_state()
                training.accelerator.save_state()
                break
    attached.close()
    assert caplog.text.count("some samples come twice") == (not seedable)
    again = another(tmp_path, **options)
    attached = attach(again.accelerator, tmp_path / "store")
    assert attached.resume()
    rest = again.loader if stateful else again.accelerator.skip_first_batches(again.loader, at)
    seen += [row for x, _ in rest for row in x.tolist()]
    assert len(seen) == 96
    if seedable:
        assert len(set(map(tuple, seen))) == 96
    attached.close()


def test_other_objects_than_were_saved_are_refused(tmp_path: Path, training: Training) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    directory = training.accelerator.save_state()
    training.accelerator.register_for_checkpointing(type(training.progress)())
    with pytest.raises(ckptstore.InvalidInput, match="has 1 registered objects, and 2 are"):
        training.accelerator.load_state(directory)
    attached.store.commit({"other": 1}, step=9)
    with pytest.raises(ckptstore.InvalidInput, match="was not made by save_state"):
        training.accelerator.load_state(9)
    attached.close()


def test_detach_gives_the_accelerator_its_own_methods_back(
    tmp_path: Path, training: Training
) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    with pytest.raises(ckptstore.InvalidInput, match="attached to this accelerator already"):
        attach(training.accelerator, tmp_path / "store")
    attached.close()
    training.accelerator.save_state()
    assert "model.safetensors" in os.listdir(tmp_path / "project/checkpoints/checkpoint_0")


@pytest.mark.pickles
def test_a_pickled_accelerator_leaves_its_store_behind(tmp_path: Path, training: Training) -> None:
    attached = attach(training.accelerator, tmp_path / "store")
    assert pickle.loads(pickle.dumps(Holder(training.accelerator))).it.__class__ is Accelerator
    attached.close()
    assert type(training.accelerator) is Accelerator


class Holder:
    """Something with an accelerator, whose state is not looked at."""

    def __init__(self, it: Any) -> None:
        self.it = it


def test_shards_are_committed_as_the_tensors_that_they_are(tmp_path: Path) -> None:
    assert trained("tests.trainers.accelerate_sharded_training", tmp_path, ranks=2) == [True, True]
    with ckptstore.open(tmp_path / "store") as store:
        assert store.checkout(2).read("model/0.weight").shape == (6, 4)


def test_a_hook_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    found = trained("tests.trainers.accelerate_hooks_training", tmp_path, ranks=2)
    assert found == [[True, True]] * 2


def test_ranks_of_which_one_has_the_pointer_and_the_hook_load_the_same(tmp_path: Path) -> None:
    found = trained("tests.trainers.accelerate_nodes_training", tmp_path, ranks=2)
    assert found == [[3.0, 3.0, 3.0]] * 2


def test_the_place_of_one_rank_is_no_place_of_two(tmp_path: Path) -> None:
    training = "tests.trainers.accelerate_stateful_training"
    assert trained(training, tmp_path, ranks=2) == [False, False]
    with pytest.raises(AssertionError, match=r"dataloader/position is a data loader of 2 ranks"):
        trained(training, tmp_path, ranks=1)


def test_the_example_runs_as_it_is() -> None:
    example = Path(__file__).parents[2] / "examples/trainers/train_with_accelerate.py"
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting in epoch 1, at batch 6" in done.stdout


@pytest.mark.oldest
def test_what_is_not_supported_is_refused(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(integration.accelerate, "__version__", "1.5.2")
        with pytest.raises(ckptstore.InvalidInput, match=r"1\.5\.2 is not supported: wanted 1\.6"):
            attach(training.accelerator, tmp_path / "store")
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr(training.accelerator.state, "distributed_type", kind)
        with pytest.raises(ckptstore.InvalidInput, match=kind.name):
            attach(training.accelerator, tmp_path / "store")
    assert not (tmp_path / "store").exists()
