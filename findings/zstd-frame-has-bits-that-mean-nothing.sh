#!/usr/bin/env bash
# python-zstandard 0.25.0 (libzstd 1.5.7): some bits of a compressed frame mean nothing.
#
# Guess before the run: every bit of an entropy-coded frame matters, so a flipped bit without a
# checksum gives other bytes or an error; only the frame's header has spare bits.
# Seen: of all single-bit flips in the body of a frame, some decode to exactly the original bytes:
# the coder reads its tables and streams from their ends, and padding bits are not compared. A test
# that flips each stored bit and wants every flip noticed fails now and then, by no fault of a store.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check zstandard==0.25.0
"$folder/venv/bin/python" - <<'PYTHON'
import random
import sys

import zstandard

draw = random.Random(7)
unnoticed = tried = frames = 0
for _ in range(40):
    alphabet = draw.randint(3, 40)
    data = bytes(min(int(draw.expovariate(0.3)), alphabet) for _ in range(draw.randint(300, 3000)))
    frame = zstandard.ZstdCompressor(level=3, write_checksum=False).compress(data)
    header = zstandard.frame_header_size(frame)
    frames += 1
    for bit in range(8 * header, 8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        tried += 1
        try:
            same = zstandard.ZstdDecompressor().decompress(bytes(changed)) == data
        except zstandard.ZstdError:
            same = False
        unnoticed += same
print("zstandard", zstandard.__version__, "libzstd", ".".join(map(str, zstandard.ZSTD_VERSION)))
print(f"{frames} frames, {tried} flipped bits behind the header, {unnoticed} decode to the same bytes")
sys.exit(not 0 < unnoticed < tried // 20)
PYTHON
