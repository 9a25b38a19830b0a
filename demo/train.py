"""The training job: `python -m demo.train STORE RUN` trains from wherever the run stands to the
last step, committing on the way.

Nothing in it knows whether it was interrupted: `store.resume` brings back weights, moments, random
state and step.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ckptstore
from demo.model import CharacterModel, loss_of
from demo.text import batch, library

STEPS = 90
COMMIT_EVERY = 15
BATCH = 8
SEED = 1234


def app_state(model: CharacterModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that the next step depends on."""
    return {
        "model": model,
        "optimizer": optimizer,
        "random": ckptstore.RNGState(),
        "progress": {"step": 0},
    }


def validation_loss(model: CharacterModel, text: torch.Tensor) -> float:
    """On the same windows every time; takes nothing from the training's random numbers."""
    with torch.no_grad():
        return loss_of(model, *batch(text, 4 * BATCH, torch.Generator().manual_seed(SEED))).item()


def deterministic() -> None:
    """The same numbers in every process on this machine, from every generator that `RNGState`
    keeps; one thread: the model is small."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


Change = Callable[[int, CharacterModel, torch.optim.Optimizer], object]


def no_change(step: int, model: CharacterModel, optimizer: torch.optim.Optimizer) -> None:
    """Nothing happens before a step."""


def train(
    place: str,
    run: str,
    say: Callable[[str], object],
    *,
    steps: int = STEPS,
    commit_every: int = COMMIT_EVERY,
    before_step: Change = no_change,
) -> None:
    deterministic()
    text = library()
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = app_state(model, optimizer)
    with ckptstore.open(place, run=run) as store:
        resumed = store.resume(state)
        say(
            "starts from nothing"
            if resumed is None
            else f"resumed from step {resumed.step}, commit {resumed.id[:12]}"
        )
        for step in range(state["progress"]["step"] + 1, steps + 1):
            before_step(step, model, optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, *batch(text, BATCH))
            loss.backward()
            optimizer.step()
            if step % commit_every == 0:
                state["progress"]["step"] = step
                metrics = {"val_loss": validation_loss(model, text)}
                say(f"step {step}/{steps}: loss {metrics['val_loss']:.3f}, committing")
                snapshot = store.commit(
                    state, step=step, metrics=metrics, tag=f"{run}-done" if step == steps else ()
                )
                say(
                    f"step {step}/{steps}: committed {snapshot.id[:12]}, {snapshot.new_bytes:,} "
                    f"new bytes of {snapshot.logical_bytes:,}"
                )


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], lambda line: print(line, flush=True))
