#!/usr/bin/env bash
# torch 2.13.0, gloo: the maximum of NaN and a number is NaN or the number, by the element's place.
#
# Guess before the run: NaN, as `torch.maximum` has it. So an all_reduce of losses by MAX shows all
# ranks that one of them has a NaN.
# Seen: of one tensor that is NaN throughout on one of two ranks, half of the elements of the result
# are NaN, and the others are the number. MIN does the same. A tensor of one element shows NaN or not
# by which rank has it. All ranks see the same, so nobody notices.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/ranks.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def reduced(size, owner, op):
    value = float("nan") if dist.get_rank() == owner else 1.0
    tensor = torch.full((size,), value)
    dist.all_reduce(tensor, op=op)
    return tensor.isnan().tolist()


def rank(number, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    seen = {
        (str(op), size, owner): reduced(size, owner, op)
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        for size in (1, 4)
        for owner in (0, 1)
    }
    everywhere = [None, None]
    dist.all_gather_object(everywhere, seen)
    dist.destroy_process_group()
    if number == 0:
        for (op, size, owner), is_nan in seen.items():
            print(f"{op}, {size} elements, NaN on rank {owner}: NaN in the result: {is_nan}")
        fours = [sum(is_nan) for (_, size, _), is_nan in seen.items() if size == 4]
        ones = sorted(is_nan[0] for (_, size, _), is_nan in seen.items() if size == 1)
        ok = everywhere[0] == everywhere[1] and fours == [2] * 4 and ones == [False] * 2 + [True] * 2
        sys.exit(not ok)


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
PYTHON
"$folder/venv/bin/python" "$folder/ranks.py" "$folder/meeting"
