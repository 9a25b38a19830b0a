"""An epoch that is interrupted after any batch and resumed in a new process sees each sample once,
or the save has warned that some come twice: by every trainer that hands out batches."""

import json
import random
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.samples_training import BATCHES, SAMPLES
from tests.trainers.trainings import TIMEOUT_S, Run

TRAINING = "tests.trainers.samples_training"

EXACT: dict[str, dict[str, Any]] = {
    "torchdata": {"by": "torchdata"},
    "torchdata, shuffle=True": {"by": "torchdata", "shuffle": True},
    "torchdata, workers": {"by": "torchdata", "workers": 2},
    "Accelerate, a loader with state": {"by": "accelerate", "stateful": True},
    "Accelerate, skip_first_batches": {"by": "accelerate", "stateful": False},
    "Lightning, torchdata": {"by": "lightning", "stateful": True},
    "Fabric, torchdata": {"by": "fabric"},
    "Trainer": {"by": "transformers", "epochs": 2},
    "Trainer, a stream": {"by": "transformers", "streams": True},
    "DeepSpeed, batches passed over": {"by": "deepspeed", "skips": True},
    "torchtitan": {"by": "torchtitan"},
}
WARNED: dict[str, dict[str, Any]] = {
    "Accelerate, no seed": {"by": "accelerate", "stateful": True, "seedable": False},
    "Lightning, torch": {"by": "lightning", "stateful": False},
    "Trainer, no seed": {
        "by": "transformers",
        "epochs": 2,
        "accelerator_config": {"use_seedable_sampler": False},
    },
    "Trainer, by length": {
        "by": "transformers",
        "epochs": 2,
        "train_sampling_strategy": "group_by_length",
    },
    "Trainer, no skipping": {"by": "transformers", "ignore_data_skip": True},
    "DeepSpeed": {"by": "deepspeed", "skips": False},
}


def samples(folder: Path, by: str, epochs: int = 1, **options: Any) -> tuple[list[int], bool]:
    """The samples of all epochs, the last of which was interrupted after a random batch, and
    whether the save had warned."""
    if by == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is built from source: not installed here")
    at = random.randrange(1, BATCHES) + (epochs - 1) * BATCHES
    print("interrupted after batch", at)
    more = {"epochs": epochs} if epochs > 1 else {}
    (folder / "how").write_text(json.dumps({"by": by, "at": at, "options": options | more}))
    run, deadline = Run(TRAINING, folder, ranks=1), time.monotonic() + TIMEOUT_S
    while not run.told("saved"):
        assert run.alive() and time.monotonic() < deadline, run.output()
        time.sleep(0.01)
    taken, warned = run.told("sample"), run.told("warned")
    assert run.kill()
    (folder / "resumes").touch()
    run = Run(TRAINING, folder, ranks=1)
    run.result()
    return taken + run.told("sample"), warned == [1]


@pytest.mark.parametrize("how", EXACT)
def test_each_sample_of_an_interrupted_epoch_comes_once(how: str, tmp_path: Path) -> None:
    found, warned = samples(tmp_path, **EXACT[how])
    assert Counter(found) == dict.fromkeys(range(SAMPLES), EXACT[how].get("epochs", 1))
    assert not warned or "DeepSpeed" in how


@pytest.mark.parametrize("how", WARNED)
def test_a_save_warns_where_samples_come_twice(how: str, tmp_path: Path) -> None:
    found, warned = samples(tmp_path, **WARNED[how])
    assert warned
    assert Counter(found) != dict.fromkeys(range(SAMPLES), WARNED[how].get("epochs", 1)), (
        "if it is exact, the warning is wrong"
    )
