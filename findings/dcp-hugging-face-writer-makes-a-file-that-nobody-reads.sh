#!/usr/bin/env bash
# torch 2.13.0: HuggingFaceStorageWriter writes an unreadable .safetensors if the state has a number in it.
#
# Guess before the run: a value that is no tensor has no place in safetensors, so `dcp.save` of
# {"weight": tensor, "step": 3} with this writer is refused, or leaves the number out.
# Seen: the save succeeds. The file has the name of a safetensors file and the content of torch.save
# for the number, with the tensor's bytes nowhere that a reader finds them; neither safetensors nor
# HuggingFaceStorageReader can open it. Without the number all is well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import logging
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

logging.disable(logging.CRITICAL)
seen = {}
for name, more in (("plain", {}), ("numbered", {"step": 3})):
    folder = Path(sys.argv[1]) / name
    dcp.save({"weight": torch.ones(2), **more}, storage_writer=HuggingFaceStorageWriter(str(folder)))
    (file,) = folder.glob("*.safetensors")
    try:
        with safe_open(file, "pt") as opened:
            seen[name] = list(opened.keys())
    except SafetensorError as error:
        seen[name] = str(error)
    target = {"weight": torch.zeros(2)}
    try:
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(folder)))
    except BaseException as error:
        target["weight"] = type(error).__name__
    print(name, "- begins with", file.read_bytes()[:4], "- safetensors:", seen[name], "- DCP:", target["weight"])
    seen[name, "begins"] = file.read_bytes()[:4]
sys.exit(not (seen["plain"] == ["weight"] and seen["numbered"] != ["weight"] and seen["numbered", "begins"] == b"PK\3\4"))
PYTHON
