#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.13.0: a StatefulDataLoader that shuffles by a generator of its own, and
# has no workers, draws other epochs after it was resumed.
#
# Guess before the run: a generator of the loader makes it independent of all else, so that a loader
# with one is resumed at least as exactly as one without.
# Seen: with `generator=` and `num_workers=0` the epoch that was interrupted ends as it would have,
# but each later epoch has another order than in a training that was not interrupted. With two
# workers, or without a generator where torch's own state is set back, all epochs are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torchdata==0.11.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(workers, own):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if own else None
    return StatefulDataLoader(
        list(range(64)), batch_size=4, shuffle=True, num_workers=workers, generator=generator
    )


def samples(batches):
    return [sample for batch in batches for sample in batch.tolist()]


def resumed(workers, own):
    """Whether the rest of an interrupted second epoch, and the third, are the same."""
    data = loader(workers, own)
    samples(data)
    epoch = iter(data)
    for _ in range(5):
        next(epoch)
    state, torchs = data.state_dict(), torch.get_rng_state()
    rest, third = samples(epoch), samples(data)
    data = loader(workers, own)
    torch.set_rng_state(torchs)
    data.load_state_dict(state)
    return samples(data) == rest, samples(data) == third


seen = {(own, workers): resumed(workers, own) for own in (True, False) for workers in (0, 2)}
for (own, workers), (rest, third) in seen.items():
    print(f"own generator {own}, {workers} workers: the rest {rest}, the next epoch {third}")
sys.exit(
    seen
    != {
        (True, 0): (True, False),
        (True, 2): (True, True),
        (False, 0): (True, True),
        (False, 2): (True, True),
    }
)
PYTHON
