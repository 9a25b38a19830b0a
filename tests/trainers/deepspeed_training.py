"""A training with DeepSpeed that goes on by its `load_checkpoint`. The folder may have files that
say the stage of ZeRO and how many steps it trains."""

from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.interop.deepspeed import StoreCheckpointEngine
from tests.trainers.deepspeed_parts import learn, new_engine, state
from tests.trainers.trainings import Tell, digest

EVERY = 2


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    engine = new_engine(_number(folder / "stage", 1), width=256)
    with ckptstore.open(folder / "store") as store:
        StoreCheckpointEngine.install(engine, store)
        path, client = engine.load_checkpoint(str(folder / "out"))
        losses = client["losses"] if path else []
        if path:
            tell("resumed", engine.global_steps)
        saved = None
        for step in range(engine.global_steps, _number(folder / "steps", 24)):
            losses.append(learn(engine, step))
            if (step + 1) % EVERY == 0:
                tell("saving", step + 1)
                engine.save_checkpoint(str(folder / "out"), client_state={"losses": losses})
                if saved is not None:
                    tell("saved", saved)  # the next save waits for the one before
                saved = step + 1
        result = digest(state(engine), losses if engine.global_rank == 0 else ())
        engine.destroy()
    return [result, torch.distributed.get_world_size()]


def _number(path: Path, default: int) -> int:
    return int(path.read_text()) if path.exists() else default
