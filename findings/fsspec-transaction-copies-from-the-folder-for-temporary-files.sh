#!/usr/bin/env bash
# fsspec 2026.9.0: a transaction on local files writes to the folder for temporary files, and copies on commit.
#
# Guess before the run: the file is written beside its target, and a rename makes it appear, whole.
# Seen: it is written to $TMPDIR. Where that is another file system, as /tmp is on many clusters, the commit
# copies it into place: somebody who looks meanwhile sees part of a file, and /tmp must hold a whole checkpoint.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check fsspec==2026.9.0
mkdir "$folder/temporary" "$folder/target"
TMPDIR="$folder/temporary" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import shutil
import sys
from pathlib import Path

import fsspec

folder = Path(sys.argv[1])
moves = []
move = shutil.move


def noted(source, target):
    moves.append((source, target))
    return move(source, target)


shutil.move = noted
files = fsspec.filesystem("file")
with files.transaction:
    with files.open(str(folder / "target" / "checkpoint"), "wb") as file:
        file.write(b"1234")
    staged = [path.parent.name for path in folder.glob("t*/*")]
folders = [(Path(source).parent.name, Path(target).parent.name) for source, target in moves]
print("during the transaction in:", staged, "- moved by shutil.move from and to:", folders)
sys.exit(not (staged == ["temporary"] and [Path(target).name for _, target in moves] == ["checkpoint"]))
PYTHON
