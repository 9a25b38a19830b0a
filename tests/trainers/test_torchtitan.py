"""torchtitan trains on a store: asynchronous saves, resumption, retention, metrics."""

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from tests.trainers.torchtitan_parts import Training, Transformer, damage_newest, directories, packs
from tests.trainers.trainings import ended_bit_equal, trained

TRAINING = "tests.trainers.torchtitan_training"

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
"""torchdata 0.11 calls the first, torchtitan the second, torch itself the others."""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.timeout(1_800)
def test_a_training_killed_while_it_saves_ends_as_one_that_was_not(
    tmp_path: Path, kills: int
) -> None:
    steps = str(8 * kills)
    fate = ended_bit_equal(TRAINING, tmp_path, kills, random.Random(kills), ranks=2, steps=steps)
    damage_newest(tmp_path / "whole")
    assert trained(TRAINING, tmp_path / "whole", ranks=2) == fate.result
    for rank in (0, 1):
        said = (tmp_path / "whole" / f"output-{rank}").read_text()
        assert f"(step {steps}): " in said and "skipped commit" in said


def test_parts_of_the_model_move_between_ranks(tmp_path: Path) -> None:
    after: dict[str, str] = {}
    for ranks in (2, 1, 2):
        found = trained("tests.trainers.torchtitan_stages", tmp_path, ranks=ranks)
        assert [each["loaded"] for each in found] == [bool(after)] * ranks
        before = {name: part for each in found for name, part in each["before"].items()}
        assert before == after or not after
        after = {name: part for each in found for name, part in each["after"].items()}
        assert sorted(after) == ["part0", "part1"] and before != after


def test_new_ranks_begin_with_the_first_ranks_count(tmp_path: Path) -> None:
    counts = "tests.trainers.torchtitan_counts"
    first, second = trained(counts, tmp_path, ranks=2)
    assert second["ntokens_seen"] == first["ntokens_seen"] + 1_000
    assert trained(counts, tmp_path, ranks=3) == [first, second, first]


@pytest.mark.parametrize("damage", ["flip a bit", "cut the file", "delete the file"])
def test_a_damaged_newest_commit_is_passed_over_and_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.train(2)
    training.manager.maybe_wait_for_saving()
    before = packs(tmp_path)
    training.train(4)
    training.manager.maybe_wait_for_saving()
    newest = training.manager.store.checkout(4).id
    training.close()
    for pack in packs(tmp_path) - before:
        data = bytearray(pack.read_bytes())
        data[len(data) // 3] ^= 16
        pack.write_bytes(data if damage == "flip a bit" else data[: len(data) // 4])
        if damage == "delete the file":
            pack.unlink()
    again = Training(tmp_path)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert again.manager.load()
    assert again.progress.step == 2
    assert f"skipped commit {newest[:12]} (step 4)" in caplog.text
    again.close()


def test_a_run_without_an_intact_commit_is_an_error(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(2)
    training.close()
    for pack in packs(tmp_path):
        pack.write_bytes(b"")
    again = Training(tmp_path)
    with pytest.raises(ckptstore.Corrupt, match="none of the commits of run main"):
        again.manager.load()
    again.close()


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = Training(tmp_path / "whole", Transformer(), interval=3)
    whole.train(6)
    whole.close()
    torch.manual_seed(3)
    first = Training(tmp_path / "resumed", Transformer(), interval=3)
    first.train(4)
    first.close()
    torch.manual_seed(4)
    second = Training(tmp_path / "resumed", Transformer(), interval=3)
    assert second.manager.load()
    assert second.progress.step == 3
    second.train(6)
    second.close()
    assert second.digest() == whole.digest()


def test_a_data_loader_with_workers_goes_on_where_it_was(tmp_path: Path) -> None:
    batches = iter(Training(tmp_path / "other").loader)
    wanted = [next(batches) for _ in range(6)]
    first = Training(tmp_path, workers=1)
    first.train(4)
    first.close()
    second = Training(tmp_path, workers=1)
    second.manager.load()
    rest = iter(second.loader)
    assert torch.equal(next(rest), wanted[4]) and torch.equal(next(rest), wanted[5])
    second.close()


def test_the_state_is_that_of_the_call_and_training_goes_on_meanwhile(tmp_path: Path) -> None:
    training = Training(tmp_path, interval=1)
    training.train(1)
    then = training.model.weight.detach().clone()
    with torch.no_grad():
        training.model.weight.zero_()
    training.manager.maybe_wait_for_saving()
    assert torch.equal(training.manager.store.checkout(1).read("model/weight"), then)
    training.close()


def test_a_save_that_is_not_asynchronous_is_durable_when_it_returns(tmp_path: Path) -> None:
    training = Training(tmp_path, async_mode="disabled")
    training.train(2)
    assert training.manager.save_future is None
    with ckptstore.open_pointer(tmp_path / "checkpoint" / "step-2") as snapshot:
        assert torch.equal(snapshot.read("model/weight"), training.model.weight)
    training.close()


def test_the_best_commit_stays(tmp_path: Path) -> None:
    training = Training(tmp_path, keep_latest_k=2, keep_best="accuracy:max")
    for step, accuracy in ((2, 0.5), (4, 0.9), (6, 0.7), (8, 0.8), (10, 0.6)):
        training.train(step - 1)
        training.manager.record(step, accuracy=accuracy)
        training.train(step)
    training.close()
    assert directories(tmp_path) == ["step-10", "step-4", "step-8"]
    with ckptstore.open(tmp_path / "checkpoint" / "store", read_only=True) as store:
        assert store.checkout("best:accuracy:max").step == 4


@pytest.mark.parametrize("knows_loss", [True, False])
def test_metrics_that_the_trainer_logs_are_those_of_the_commit(
    tmp_path: Path, knows_loss: bool
) -> None:
    logged = []

    class Loggers:
        def log(self, metrics: dict[str, Any], step: int) -> None:
            logged.append((metrics, step))

    class Metrics:
        logger: Any = Loggers()

    training = Training(tmp_path)
    training.progress.metrics_processor = metrics = Metrics()  # type: ignore[attr-defined]
    training.progress.pp_has_last_stage = knows_loss  # type: ignore[attr-defined]
    training.manager.load()
    training.train(1)
    found = {"loss_metrics/global_avg_loss": 2.5, "memory/max_active(GiB)": 3.0, "lr": 0.125}
    metrics.logger.log(found, 2)
    training.train(4)
    training.close()
    assert logged == [(found, 2)]
    with ckptstore.open(tmp_path / "checkpoint" / "store", read_only=True) as store:
        wanted = {"loss_metrics/global_avg_loss": 2.5, "lr": 0.125} if knows_loss else {}
        assert store.checkout(2).metrics == wanted
        assert store.checkout(4).metrics == {}


def test_a_failed_save_reaches_the_loop(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(2)
    training.manager.maybe_wait_for_saving()
    shutil.rmtree(tmp_path / "checkpoint" / "store" / "packs")
    (tmp_path / "checkpoint" / "store" / "packs").write_bytes(b"")
    training.train(5)
    with pytest.raises(ckptstore.CkptStoreError):
        training.train(6)
    training.close()


def test_the_last_step_has_weights_alone_and_is_not_gone_on_from(tmp_path: Path) -> None:
    training = Training(tmp_path, export_dtype="bfloat16", keep_latest_k=1)
    training.train(4)
    training.manager.save(5, last_step=True)
    training.close()
    with ckptstore.open_pointer(tmp_path / "checkpoint" / "step-5") as snapshot:
        assert snapshot.keys() == ["model"]
        assert snapshot.read("model/weight").dtype == torch.bfloat16
    again = Training(tmp_path)
    assert again.manager.load()
    assert again.progress.step == 4
    again.close()


def test_weights_alone_are_no_training_to_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.manager.save(5, last_step=True)
    training.close()
    again = Training(tmp_path)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        assert not again.manager.load()
    assert "have weights alone (step 5)" in caplog.text
    again.close()


def test_the_space_of_older_commits_is_freed(tmp_path: Path) -> None:
    training = Training(tmp_path, keep_latest_k=2)
    training.train(4)
    training.manager.maybe_wait_for_saving()
    two = sum(path.stat().st_size for path in packs(tmp_path))
    training.train(12)
    training.close()
    assert sum(path.stat().st_size for path in packs(tmp_path)) < 1.25 * two


def test_a_seed_is_gone_on_from(tmp_path: Path) -> None:
    seed = Training(tmp_path)
    seed.manager.save(0, last_step=True)
    seed.close()
    training = Training(tmp_path)
    assert not torch.equal(training.model.weight, seed.model.weight)
    assert training.manager.load()
    assert torch.equal(training.model.weight, seed.model.weight)
    training.close()


@pytest.mark.parametrize("keep", [1, 3])
def test_retention_counts_durable_commits_and_takes_their_directories(
    tmp_path: Path, keep: int
) -> None:
    training = Training(tmp_path, keep_latest_k=keep)
    training.train(10)
    training.close()
    kept = (2, 4, 6, 8, 10)[-max(keep, 2) :]
    assert directories(tmp_path) == sorted(f"step-{step}" for step in kept)
    with ckptstore.open(tmp_path / "checkpoint" / "store", read_only=True) as store:
        assert len(store.log()) == max(keep, 2), "the store keeps the two newest"
