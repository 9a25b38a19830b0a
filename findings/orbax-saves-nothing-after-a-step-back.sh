#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: a manager that has step 30 saves no step below it, without an error.
#
# Guess before the run: after a restore of step 10, because the loss had diverged, step 15 is saved; or
# it is refused, as a step that exists is.
# Seen: `save` returns False, and logs nothing at the default level. Nothing is saved until the training
# has passed step 30 again. What a crash before that restores are the weights that had diverged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check orbax-checkpoint==0.12.8 \
  tensorstore==0.1.86 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

with ocp.CheckpointManager(sys.argv[1] + "/run") as manager:

    def save(step):
        saved = manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, float(step))}))
        manager.wait_until_finished()
        return saved

    begun = [save(step) for step in (10, 20, 30)]
    like = {"w": jnp.zeros(4)}
    manager.restore(10, args=ocp.args.StandardRestore(like))
    again = [save(step) for step in (15, 25)]
    print("saved at first:", begun, "| after the step back:", again, "| steps:", manager.all_steps())
    sys.exit((begun, again, manager.latest_step()) != ([True] * 3, [False] * 2, 30))
PYTHON
grep -i -E "warn|error" "$folder/log" || echo "no warning"
