"""Ranks of which the first has hooks that fail once: a save and a load fail on all of them, and
both succeed afterwards. Returns what each rank saw."""

from pathlib import Path
from typing import Any

from ckptstore import Ranks
from ckptstore.interop.accelerate import attach
from tests.trainers.accelerate_parts import Training, new_accelerator
from tests.trainers.trainings import Tell


def train(folder: Path, tell: Tell) -> Any:
    accelerator = Training(new_accelerator(folder)).accelerator
    attach(accelerator, folder / "store", ranks=Ranks(timeout_s=120))
    full = [True]

    def fails(*_: Any) -> None:
        if accelerator.is_main_process and full.pop():
            raise OSError("the disk is full")

    seen = []
    for register, act in (
        (accelerator.register_save_state_pre_hook, accelerator.save_state),
        (accelerator.register_load_state_pre_hook, accelerator.load_state),
    ):
        full[:] = [True]
        hook = register(fails)
        try:
            act()
        except Exception as error:
            seen.append("the disk is full" in str(error))
        hook.remove()
        act()
    accelerator.end_training()
    return seen
