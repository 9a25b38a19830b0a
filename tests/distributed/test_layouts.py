"""Any layout on any number of ranks is restored onto any other, with the same content."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import ckptstore
from ckptstore.cli.main import main
from tests.distributed.layouts import LAYOUTS, full, group_of, layout, meet
from tests.distributed.pool import Pool

CANONICAL = tuple(name for name in LAYOUTS if name not in ("columns", "mesh"))
"""Layouts that keep rows whole: their chunks do not depend on the number of ranks."""


def commit_layouts(rank: int, path: Path, n: int) -> str | None:
    meet(n)
    if rank >= n:
        return None
    with ckptstore.open(path, storage=ckptstore.Storage(chunk_bytes=1 << 16)) as store:
        state = {"x": {name: layout(name, full(), n) for name in LAYOUTS}}
        canonical = {name: {"w": layout(name, full(), n)} for name in CANONICAL}
        store.commit(
            canonical, tag=f"canonical-{n}", ranks=ckptstore.Ranks(process_group=group_of(n))
        )
        return store.commit(state, step=n, ranks=ckptstore.Ranks(process_group=group_of(n))).id


def restore_layouts(rank: int, path: Path, n: int) -> list[tuple[int, int]]:
    """Restore every commit onto every layout of `n` ranks; returns bytes read and needed."""
    meet(n)
    if rank >= n:
        return []
    costs = []
    with ckptstore.open(path) as store:
        for committed in (1, 2, 3, 4):
            for name in LAYOUTS:
                state = {"x": {each: layout(name, torch.zeros_like(full()), n) for each in LAYOUTS}}
                report = store.checkout(committed).restore(
                    state, ranks=ckptstore.Ranks(process_group=group_of(n))
                )
                wanted = layout(name, full(), n).to_local()
                for each, got in state["x"].items():
                    assert torch.equal(got.to_local(), wanted), (committed, each, n, name)
                costs.append((report.read_bytes, report.needed_bytes))
    return costs


def commit_and_restore_without_dimensions(rank: int, path: Path) -> bool:
    """A mesh without dimensions names one rank; every rank with a tensor on it has all of the
    tensor.
    """
    mesh = DeviceMesh("cpu", 1)
    with ckptstore.open(path) as store:
        store.commit(
            {"x": {"w": distribute_tensor(full(), mesh, [])}},
            step=1,
            ranks=ckptstore.Ranks(process_group=group_of(4)),
        )
        state = {"x": {"w": distribute_tensor(torch.zeros_like(full()), mesh, [])}}
        store.checkout(1).restore(state, ranks=ckptstore.Ranks(process_group=group_of(4)))
        return torch.equal(state["x"]["w"]._local_tensor, full())


def test_a_dtensor_on_a_mesh_without_dimensions_is_committed_and_restored_whole(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(commit_and_restore_without_dimensions, tmp_path / "store") == [True] * 4
    with ckptstore.open(tmp_path / "store") as store:
        assert torch.equal(store.checkout(1).read("x/w"), full())


@pytest.fixture(scope="module")
def committed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "store"
    for n in (1, 2, 3, 4):
        ids = pool.run(commit_layouts, path, n)
        assert len({each for each in ids if each}) == 1, "every rank gets the same snapshot"
    return path


def test_every_layout_is_the_tensor_that_was_committed(committed: Path) -> None:
    with ckptstore.open(committed) as store:
        for n in (1, 2, 3, 4):
            snapshot = store.checkout(n)
            for name in LAYOUTS:
                assert torch.equal(snapshot.read(f"x/{name}"), full()), (n, name)
            snapshot.verify()
        assert not store.fsck(read_data="100%").findings


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_layout_of_every_number_of_ranks_is_restored_onto_every_other(
    pool: Pool, committed: Path, n: int
) -> None:
    pool.run(restore_layouts, committed, n)


def test_show_says_how_ranks_held_a_commit(
    committed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-s", str(committed), "show", "4", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert layout["world"] == 4
    assert {"placements": "S(1)", "mesh": "4", "ranks": 4, "leaves": 1} in layout["groups"]
    assert main(["-s", str(committed), "show", "4"]) == 0
    assert "Layout: 4 ranks" in capsys.readouterr().out


def test_the_content_id_does_not_depend_on_the_number_of_ranks(committed: Path) -> None:
    with ckptstore.open(committed) as store:
        commits = [store.checkout(f"canonical-{n}") for n in (1, 2, 3, 4)]
        assert len({commit.content_id for commit in commits}) == 1
        whole = store.commit(
            {name: {"w": full()} for name in CANONICAL},
            ranks=ckptstore.Ranks(process_group="alone"),
        )
        assert whole.content_id == commits[0].content_id
        assert whole.new_bytes == 0
