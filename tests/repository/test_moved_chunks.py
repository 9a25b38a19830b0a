"""Chunks that a gc moves between the lookup and the read are read from where they are then."""

from pathlib import Path

import torch

import ckptstore
from ckptstore.snapshot import contents_of
from ckptstore.store import internals_of


def test_chunks_that_all_moved_reach_their_own_memory(tmp_path: Path) -> None:
    """The first chunk asked for lies in the newer pack: packs have them in another order."""
    first, second, forgotten = (torch.rand(1000) for _ in range(3))
    with (
        ckptstore.open(tmp_path / "store") as store,
        ckptstore.open(tmp_path / "store", read_only=True) as reader,
    ):
        store.commit({"m": {"second": second, "spare": forgotten}}, step=1)
        store.commit({"m": {"first": first, "spare": forgotten + 1}}, step=2)
        for step in (3, 4):
            store.commit({"m": {"first": first, "second": second}}, step=step)
        tree = contents_of(reader.checkout(4)).trees["m"]
        objects = internals_of(reader).handle.objects
        ids = b"".join(tree.content(tree.numbers[path]).ids for path in ("m/first", "m/second"))
        where = objects.located(ids)
        assert where["pack"][0] > where["pack"][1]
        store.forget([1, 2])
        assert store.gc(max_unused=0.0, grace_s=0).freed_bytes
        out = [torch.zeros(1000) for _ in range(2)]
        objects.read_into(ids, [memoryview(t.numpy()).cast("B") for t in out], where=where)
    assert torch.equal(out[0], first) and torch.equal(out[1], second)
