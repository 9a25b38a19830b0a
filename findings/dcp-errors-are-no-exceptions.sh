#!/usr/bin/env bash
# torch 2.13.0: a failed dcp.save or dcp.load passes `except Exception`.
#
# Guess before the run: a checkpoint that cannot be loaded raises an error that `except Exception`
# catches, so a training loop which tries an older checkpoint then goes on.
# Seen: CheckpointException derives from BaseException, beside KeyboardInterrupt and SystemExit. A
# loop with `except Exception` around its save or load ends by it, and so does a fallback.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
FOLDER="$folder" "$folder/venv/bin/python" - <<'PYTHON'
import logging
import os
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

logging.disable(logging.CRITICAL)  # its logger prints what is raised
warnings.simplefilter("ignore")
place = os.environ["FOLDER"]


def outcome(action):
    try:
        try:
            action()
        except Exception as error:
            return "caught", type(error)
    except BaseException as error:
        return "passed", type(error)
    return "no error", None


def occupied():
    path = os.path.join(place, "occupied")
    open(path, "w").close()
    dcp.save({"a": torch.ones(1)}, checkpoint_id=path, no_dist=True)


dcp.save({"a": torch.ones(1)}, checkpoint_id=f"{place}/saved", no_dist=True)
load = outcome(lambda: dcp.load({"b": torch.ones(1)}, checkpoint_id=f"{place}/saved", no_dist=True))
save = outcome(occupied)
print("torch", torch.__version__.partition("+")[0])
for name, (what, kind) in (("load of a key that is not there", load), ("save onto a file", save)):
    bases = [base.__name__ for base in kind.__mro__] if kind else []
    print(f"{name}: {what} `except Exception`: {' < '.join(bases)}")
sys.exit(not (load[0] == "passed" and load[1].__name__ == "CheckpointException"))
PYTHON
