"""`fully_shard` with the shapes of real models: one content, stored once, on any number of
ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckptstore
from tests.distributed.layouts import group_of, mesh_of
from tests.distributed.pool import Pool

RANKS = (1, 2, 4, 8)

GPT2 = [(50257, 768), (1024, 768)] + 12 * [
    *((768,), (768,), (2304, 768), (2304,), (768, 768), (768,)),
    *((768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)),
]
GPT2 += [(768,), (768,)]
LLAMA_8B_BLOCK = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
]
SHAPES = {"gpt2": GPT2, "llama": LLAMA_8B_BLOCK}


class Shapes(nn.Module):
    """Parameters of these shapes, the same on every rank."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tensors = nn.ParameterList(
            torch.randn(shape, generator=generator, dtype=torch.bfloat16) for shape in shapes
        )


def commit_shapes(rank: int, path: Path, name: str, n: int) -> tuple[str, int, int] | None:
    meshes = [mesh_of(each, False) for each in RANKS]
    groups = [group_of(each) for each in RANKS]
    if rank >= n:
        return None
    number = RANKS.index(n)
    module = Shapes(SHAPES[name])
    fully_shard(module, mesh=meshes[number])
    with ckptstore.open(path) as store:
        snapshot = store.commit(
            {"model": module}, step=n, ranks=ckptstore.Ranks(process_group=groups[number])
        )
    return snapshot.content_id, snapshot.new_bytes, snapshot.logical_bytes


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHAPES)
def test_a_sharded_model_is_one_content_from_any_number_of_ranks(
    eight: Pool, tmp_path: Path, name: str
) -> None:
    results = [eight.run(commit_shapes, tmp_path / "store", name, n)[0] for n in RANKS]
    assert len({content for content, _, _ in results}) == 1
    assert results[0][1] > 0
    assert all(new_bytes <= 0.01 * logical_bytes for _, new_bytes, logical_bytes in results[1:]), (
        results
    )
