"""Trainers whose saves fail at random: with `Async(on_error="warn")` none of them ends, and each
outage is said once."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckptstore
from ckptstore import Async
from ckptstore.store import Store
from tests.support.faults import Faults

pytestmark = pytest.mark.filterwarnings("ignore")

WARN = Async(on_error="warn", retry_s=0)


class Saves:
    """The saves of one training: before each, it is drawn whether it fails."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.faults, self.random, self.left = Faults(store, monkeypatch), Random(seed), 0
        self.failed = 0

    def draw(self, share: float = 0.5) -> None:
        self.failed += self.faults.failed > 0
        self.faults.failed = 0
        self.faults.draw(self.random, share)

    def end(self) -> None:
        """From now on nothing fails."""
        self.draw(0.0)


def accelerate(folder: Path, saves: Callable[[Store], Saves], count: int) -> None:
    from ckptstore.interop.accelerate import attach
    from tests.trainers.accelerate_parts import Training, new_accelerator

    accelerator = new_accelerator(folder, limit=3)
    with ckptstore.open(folder / "store", background=WARN) as store:
        own = saves(store)
        attached = attach(accelerator, store, wait=True)
        training = Training(accelerator)
        for _ in range(count):
            own.draw()
            accelerator.save_state()
        own.end()
        accelerator.save_state()
        assert store.health().failures == 0
        attached.close()
        assert training is not None


def torchtitan(folder: Path, saves: Callable[[Store], Saves], count: int) -> None:
    from tests.trainers.torchtitan_parts import Training

    training = Training(folder, on_error="warn", interval=1)
    manager = training.manager
    manager.store._background = WARN  # without its tries, which take a minute
    own = saves(manager.store)
    for step in range(1, count + 1):
        own.draw()
        training.train(step, save=False)
        manager.save(step)
        manager.save_future.result(60)
    own.end()
    manager.save(count + 1)
    manager.save_future.result(60)
    assert manager.store.health().failures == 0
    training.close()


def lightning(folder: Path, saves: Callable[[Store], Saves], count: int, *, kind: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringDataModule

    from ckptstore.interop import lightning as plugins
    from tests.trainers.lightning_cases import Model, saver, trainer

    plugin = getattr(plugins, kind)(folder / "store", background=WARN)
    own = saves(plugin.store)
    number = 0

    class Draws(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, *_: Any) -> None:
            nonlocal number
            number += 1
            settle = getattr(plugin, "_drain", lambda: None)
            settle()  # so that what fails is what was drawn
            if number > count:
                own.end()
            else:
                own.draw()

    callback = saver(folder, every_n_epochs=1, save_last=False)
    run = trainer(folder, plugin, callbacks=[Draws(), callback], max_epochs=count + 1)
    run.fit(Model(), BoringDataModule())
    own.end()


def transformers(folder: Path, saves: Callable[[Store], Saves], count: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptstore.interop.transformers import attach
    from tests.trainers.transformers_training import Numbers, arguments, llama

    with ckptstore.open(folder / "store", background=WARN) as store:
        own = saves(store)

        class Draws(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                if state.global_step >= count:
                    own.end()
                else:
                    own.draw()

        options = arguments(folder) | {
            "max_steps": count + 1,
            "save_steps": 1,
            "eval_strategy": "no",
            "load_best_model_at_end": False,
        }
        trainer = Trainer(
            llama(), TrainingArguments(**options), train_dataset=Numbers(64, 1), callbacks=[Draws()]
        )
        with attach(trainer, store, background=False):
            trainer.train()
        assert store.health().failures == 0


TRAININGS: dict[str, Any] = {
    "accelerate": accelerate,
    "torchtitan": torchtitan,
    "lightning": partial(lightning, kind="StoreCheckpointIO"),
    "lightning-async": partial(lightning, kind="AsyncStoreCheckpointIO"),
    "transformers": transformers,
}


def goes_on(kind: str, folder: Path, count: int, seed: int, monkeypatch: Any, caplog: Any) -> int:
    """How many saves of a training failed, which went on."""
    made: list[Saves] = []

    def saves(store: Store) -> Saves:
        made.append(Saves(store, monkeypatch, seed))
        return made[0]

    caplog.set_level(logging.WARNING, "ckptstore")
    TRAININGS[kind](folder, saves, count)
    texts = [record.message for record in caplog.records if record.name == "ckptstore"]
    began = [text for text in texts if "training goes on" in text]
    ended = [text for text in texts if "is durable, after" in text]
    assert len(began) == len(ended) > 0
    return made[0].failed


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_training_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert goes_on(kind, tmp_path, 8, 1, monkeypatch, caplog) > 1


@pytest.mark.soak
@pytest.mark.parametrize("kind", TRAININGS)
def test_100_faults(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = 0
    for seed in range(100):
        caplog.clear()
        failed += goes_on(kind, tmp_path / str(seed), 20, seed, monkeypatch, caplog)
        if failed >= 100:
            return
    raise AssertionError(f"only {failed} saves failed")
