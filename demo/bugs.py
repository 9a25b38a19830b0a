"""Three trainings to search (docs/stories.md): `python -m demo.bugs STORE`. One is as it should be,
in one the learning rate is wrong from a step on, in one a weight becomes NaN.
"""

import math
import sys
from collections.abc import Callable

import torch

from demo.model import CharacterModel
from demo.train import no_change, train

STEPS = 70
COMMIT_EVERY = 5
SLIPS_AT = 38
BREAKS_AT = 60


def slip(step: int, model: CharacterModel, optimizer: torch.optim.Optimizer) -> None:
    """The learning rate of a schedule that counts its steps anew."""
    if step == SLIPS_AT:
        optimizer.param_groups[0]["lr"] *= 1.5


def plant_nan(step: int, model: CharacterModel, optimizer: torch.optim.Optimizer) -> None:
    """As a division by zero in one kernel would."""
    if step == BREAKS_AT:
        model.get_parameter("blocks.2.down.weight").data[17, 100] = math.nan


def main(place: str, say: Callable[[str], object]) -> None:
    for run, change in (("baseline", no_change), ("upgrade", slip), ("broken", plant_nan)):
        train(place, run, say, steps=STEPS, commit_every=COMMIT_EVERY, before_step=change)


if __name__ == "__main__":
    main(sys.argv[1], lambda line: print(line, flush=True))
