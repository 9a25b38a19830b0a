"""An import and an export need memory for some chunks, not for the whole file."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.fixtures import scratch

__all__ = ["scratch"]

FILE_BYTES = 256 << 20
GROWTH_BYTES = 96 << 20

_PROGRAM = """
import os, sys
from pathlib import Path
import ckptstore
from ckptstore.interop.formats import export
from ckptstore.interop.formats import import_path

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10

place = Path(sys.argv[1])
with ckptstore.open(place / "store", threads=2) as store:
    export(import_path(store, place / "small.safetensors"), place / "small-out.safetensors")
    before = peak_bytes()
    made = import_path(store, place / "large.safetensors")
    imported = peak_bytes()
    export(made, place / "out.safetensors")
    print(imported - before, peak_bytes() - before)
"""


def _write(place: Path, nbytes: int) -> None:
    """Two tensors of random bytes, written in pieces."""
    half = nbytes // 2
    header = json.dumps(
        {
            n: {"dtype": "U8", "shape": [half], "data_offsets": [i * half, (i + 1) * half]}
            for i, n in enumerate("ab")
        }
    )
    with place.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        for _ in range(nbytes >> 20):
            file.write(os.urandom(1 << 20))


def test_a_large_file_passes_through_little_memory(scratch: Path) -> None:
    _write(scratch / "small.safetensors", 16 << 20)
    _write(scratch / "large.safetensors", FILE_BYTES)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(scratch)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, exported = map(int, done.stdout.split())
    print(
        f"peak grew by {imported >> 20} MiB while importing {FILE_BYTES >> 20} MiB, by "
        f"{exported >> 20} MiB with the export"
    )
    assert max(imported, exported) < GROWTH_BYTES
    with (
        (scratch / "large.safetensors").open("rb") as a,
        (scratch / "out.safetensors").open("rb") as b,
    ):
        while block := a.read(1 << 20):
            assert block == b.read(1 << 20)
        assert not b.read(1)
