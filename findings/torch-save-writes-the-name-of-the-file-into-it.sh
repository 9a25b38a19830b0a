#!/usr/bin/env bash
# torch 2.13.0: the bytes that torch.save writes depend on the name of the file.
#
# Guess before the run: the same state dict, saved twice by one process, gives the same bytes; so a
# checksum, rsync or a deduplicating backup sees `epoch-1.pt` and `epoch-2.pt` of an unchanged model as
# one content.
# Seen: each member of the archive lies in a folder named after the file, so two names give other
# bytes, and names of other lengths other sizes. Into a buffer, or under one name in two folders, the
# bytes are equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import torch

folder = Path(sys.argv[1])
(folder / "other").mkdir()
state = {"weight": torch.ones(4)}
files = [folder / name for name in ("epoch-1.pt", "epoch-2.pt", "epoch-100.pt", "other/epoch-1.pt")]
for file in files:
    torch.save(state, file)
    print(f"{file.relative_to(folder)}: {file.stat().st_size} bytes,", zipfile.ZipFile(file).namelist()[0])
one, two, longer, elsewhere = (file.read_bytes() for file in files)
print("two names, same bytes:", one == two, "- two folders, same bytes:", one == elsewhere)
sys.exit(not (one != two and one == elsewhere and len(longer) != len(one)))
PYTHON
