"""The stand-alone reader of docs/format.md puts together what ranks hold in boxes."""

from pathlib import Path

import torch

import ckptstore
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool
from tests.golden.reader import described, read, reader


def commit_all_layouts(rank: int, path: Path) -> None:
    meet(4)
    ranks = ckptstore.Ranks(process_group=group_of(4))
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        cube = full()[:480].reshape(10, 48, 150)
        state = {"x": {name: layout(name, full(), 4) for name in LAYOUTS}}
        state["y"] = {name: layout(name, cube, 4) for name in ("columns", "mesh")}
        state["z"] = {"small": layout("mesh", full()[:8, :8], 4)}
        store.commit(state, step=1, ranks=ranks)


def test_leaves_that_ranks_hold_in_boxes_are_read_whole(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    pool.run(commit_all_layouts, path)
    store = reader.Store(path)
    leaves = store.leaves(store.find("latest"))
    assert leaves["x/columns"]["boxes"] and leaves["y/mesh"]["boxes"]
    cube = full()[:480].reshape(10, 48, 150)
    tensors: dict[str, torch.Tensor] = {f"x/{name}": full() for name in LAYOUTS}
    tensors |= {f"y/{name}": cube for name in ("columns", "mesh")}
    assert read(path, "latest") == described({**tensors, "z/small": full()[:8, :8]})
