#!/usr/bin/env bash
# torch 2.13.0: torch.load cannot read some plain values that torch.save has written.
#
# Guess before the run: strings, numbers and bytes are what `weights_only=True` is sure to take; only
# objects of classes need consent.
# Seen: torch.save pickles by protocol 2, which has no bytes. It writes b"" as a call of `bytes`, and
# b"x" as a call of `_codecs.encode`: the second is on the list of what may be called, the first is
# not. An integer of over 255 bytes is refused as well: its opcode is not known to torch's reader.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import torch


def outcome(value):
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    try:
        return torch.load(file)["value"] == value
    except Exception as error:
        return type(error).__name__


values = {'b"x"': b"x", 'b""': b"", "2 ** 2000": 2**2000, "2 ** 3000": 2**3000}
found = {name: outcome(value) for name, value in values.items()}
print("torch", torch.__version__.partition("+")[0])
for name, result in found.items():
    print(f"{name}: {'comes back' if result is True else result}")
wanted = {'b"x"': True, 'b""': "UnpicklingError", "2 ** 2000": True, "2 ** 3000": "UnpicklingError"}
sys.exit(found != wanted)
PYTHON
