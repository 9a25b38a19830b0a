#!/usr/bin/env bash
# Ray Train 2.60.0: `Checkpoint.to_directory(path)` leaves what another checkpoint put there.
#
# Guess before the run: afterwards the directory is the checkpoint. So a path that is used again (a
# node's cache, one folder per trial) holds the newest checkpoint, and a loader that globs for shards
# finds those of one save.
# Seen: files of the same name are replaced, all others stay. After a save in two shards over one in
# four, the directory has two shards of each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'ray[train]==2.60.0'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from ray.train import Checkpoint

folder = Path(sys.argv[1])
for name, shards in (("before", 4), ("after", 2)):
    (folder / name).mkdir()
    for shard in range(shards):
        (folder / name / f"shard-{shard}.pt").write_text(f"{name} {shard}")
    place = Checkpoint.from_directory(str(folder / name)).to_directory(str(folder / "place"))
found = {each.name: each.read_text() for each in sorted(Path(place).iterdir())}
print(found)
sys.exit(list(found.values()) != ["after 0", "after 1", "before 2", "before 3"])
PYTHON
