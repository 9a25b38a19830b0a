"""The fine-tune: adapters are trained beside a frozen base, and each commit stores the adapters
only."""

from collections.abc import Callable

import torch

import ckptstore
from demo.model import CharacterModel, add_adapters, loss_of
from demo.text import batch, library
from demo.train import BATCH, app_state, deterministic, validation_loss

COMMITS = 10
STEPS_PER_COMMIT = 3
PACKAGE = "asyncio"


def finetune(place: str, base: str, say: Callable[[str], object]) -> None:
    """Ten commits of a run `lora` from the weights of the commit `base`."""
    deterministic()
    text = library(PACKAGE)
    model = CharacterModel()
    with ckptstore.open(place, run="lora") as store:
        model.load_state_dict(store.checkout(base).state_dict("model"))
        optimizer = torch.optim.AdamW(add_adapters(model), lr=1e-2)
        state = app_state(model, optimizer)
        for step in range(1, COMMITS + 1):
            for _ in range(STEPS_PER_COMMIT):
                optimizer.zero_grad()
                loss_of(model, *batch(text, BATCH)).backward()
                optimizer.step()
            state["progress"]["step"] = step
            loss = validation_loss(model, text)
            snapshot = store.commit(state, step=step, metrics={"val_loss": loss})
            say(
                f"commit {step}/{COMMITS}: loss {loss:.3f}, {snapshot.new_bytes:,} new bytes of "
                f"{snapshot.logical_bytes:,}"
            )
