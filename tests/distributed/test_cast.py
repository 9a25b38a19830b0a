"""Ranks commit in lower precision together: the bytes of one process, and its figures."""

from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.errors import Conflict, InvalidInput
from ckptstore.snapshot import contents_of
from tests.distributed.layouts import full, layout, meet
from tests.distributed.pool import Pool

CAST = {"model/**": (torch.float16, "unchecked"), "own/**": torch.bfloat16}
LAYOUTS = ("rows", "columns", "replicate")


def values() -> torch.Tensor:
    tensor = full() / 7
    tensor.view(-1)[:5] = float("nan")
    tensor.view(-1)[-3:] = 1e9
    return tensor


def state(rank: int, n: int) -> dict[str, Any]:
    model = {name: layout(name, values(), n) for name in LAYOUTS}
    own = {"noise": torch.linspace(0, 1 + rank, 3000), "step": 3}
    return {"model": {**model, "whole": values()}, "own": own}


def commit_cast(rank: int, path: Path) -> list[str]:
    n = 4
    meet(n)
    ranks = ckptstore.Ranks(private=["own/*"])
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=64 << 10)) as store:
        first = store.commit(state(rank, n), step=1, cast=CAST, ranks=ranks)
        again = store.commit(state(rank, n), step=2, cast=CAST, ranks=ranks)
        pending = store.commit_async(state(rank, n), step=3, cast=CAST, ranks=ranks)
        last = pending.wait()
        assert last is not None
        return [first.id, again.id, last.id]


def commit_beyond(rank: int, path: Path) -> str:
    n = 4
    meet(n)
    with ckptstore.open(path) as store:
        try:
            store.commit(state(rank, n), step=1, cast={"model/**": torch.float16})
        except InvalidInput as error:
            assert store.log() == []
            return str(error)
    return ""


def commit_disagreeing(rank: int, path: Path) -> str:
    n = 4
    meet(n)
    cast = {"model/**": torch.float16 if rank else torch.bfloat16}
    with ckptstore.open(path) as store:
        try:
            store.commit(state(rank, n), step=1, cast=cast)
        except Conflict as error:
            return str(error)
    return ""


def test_ranks_cast_what_one_process_would(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(commit_cast, tmp_path / "store")
    assert all(other == first for other in others)
    with ckptstore.open(tmp_path / "one") as alone:
        wanted = alone.commit({"model": {"whole": values()}}, cast={"model/**": CAST["model/**"]})
        (figures,) = contents_of(wanted).document.cast.errors  # type: ignore[union-attr]
    assert (figures.nans, figures.overflows) == (5, 3)
    with ckptstore.open(tmp_path / "store") as store:
        for commit in first:
            snap = store.checkout(commit)
            cast = contents_of(snap).document.cast
            assert cast is not None
            found = {error.path: error for error in cast.errors}
            for name in (*LAYOUTS, "whole"):
                after = snap.read(f"model/{name}")
                assert after.dtype == torch.float16
                assert torch.equal(after.view(torch.int16), values().half().view(torch.int16))
                assert found[f"model/{name}"]._replace(path="") == figures._replace(path="")
            noise = torch.linspace(0, 4, 3000).bfloat16()
            assert torch.equal(snap.read("own/noise/3"), noise)
        assert len({store.checkout(commit).content_id for commit in first}) == 1
        assert not store.fsck(read_data="100%").damaged


def test_a_value_beyond_the_dtype_on_any_rank_is_refused_on_all(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(commit_beyond, tmp_path / "store"):
        for name in (*LAYOUTS, "whole"):
            assert f"model/{name}: 3 values lie beyond the range of float16" in said


def test_ranks_that_cast_otherwise_commit_nothing(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(commit_disagreeing, tmp_path / "store")
    assert all("they must agree" in text for text in said), said
    with ckptstore.open(tmp_path / "store") as store:
        assert store.log() == []


def test_one_process_reads_what_ranks_cast(pool: Pool, tmp_path: Path) -> None:
    pool.run(commit_cast, tmp_path / "store")
    target = {"model": {"rows": torch.zeros(full().shape)}}
    with ckptstore.open(tmp_path / "store") as store:
        store.checkout(1).restore(target, select="model/rows", dtype=torch.float32)
    wanted = values().half().float()
    assert torch.equal(target["model"]["rows"].nan_to_num(), wanted.nan_to_num())
