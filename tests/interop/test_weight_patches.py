"""The elements in which two commits differ, as vLLM takes them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.interop.vllm import weight_patches
from ckptstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckptstore.open(tmp_path / "store") as store:
        yield store


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{n}.weight": torch.rand((70, 300), generator=generator).to(dtype)
        for n, dtype in enumerate(DTYPES)
    }


def patched(
    before: dict[str, torch.Tensor], old: ckptstore.Snapshot, new: ckptstore.Snapshot
) -> dict[str, torch.Tensor]:
    """`before` with the patches, and nothing else."""
    result = {name: value.clone() for name, value in before.items()}
    for name, shape, dtype, values, indices in weight_patches(old, new):
        there = result[name]
        assert (shape, dtype) == (tuple(there.shape), there.dtype)
        assert indices.dtype == torch.int32
        bits = torch.uint8 if dtype.itemsize == 1 else dtype  # torch 2.6 indexes no 8-bit floats
        there.view(-1).view(bits)[indices.long()] = values.view(bits)
    return result


def test_patches_make_one_commit_of_the_other(store: Store) -> None:
    before, after = weights(), weights()
    for n, value in enumerate(after.values()):
        value.view(-1)[n :: 97 + n] = 0.25 * n
    after["layers.2.weight"] = before["layers.2.weight"]
    old = store.commit({"model": before, "step": 0}, step=0)
    new = store.commit({"model": after, "step": 1}, step=1)
    got = patched(before, old, new)
    for name, value in after.items():
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name
    changed = {patch.name: len(patch.indices) for patch in weight_patches(old, new)}
    assert "layers.2.weight" not in changed
    assert 0 < changed["layers.0.weight"] <= 1 + 70 * 300 // 97


def test_a_zero_that_changes_its_sign_is_a_change(store: Store) -> None:
    before, after = {"w": torch.zeros(9000)}, {"w": torch.zeros(9000)}
    after["w"][7] = -0.0
    old, new = store.commit({"model": before}), store.commit({"model": after})
    (patch,) = weight_patches(old, new)
    assert patch.indices.tolist() == [7]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"w": torch.ones(9000).half()}, "float32.* and is float16"),
        ({"w": torch.ones(9001)}, "cannot be patched"),
        ({"v": torch.ones(9000)}, "not there"),
        ({"w": torch.full((9000,), torch.nan)}, "NaN"),
        ({"w": torch.ones(9000), "n": torch.tensor([1])}, "not there"),
    ],
    ids=["dtype", "shape", "name", "NaN", "new"],
)
def test_what_vllm_cannot_patch_is_refused(
    other: dict[str, torch.Tensor], why: str, store: Store
) -> None:
    old = store.commit({"model": {"w": torch.ones(9000)}})
    new = store.commit({"model": other})
    with pytest.raises(ckptstore.InvalidInput, match=why):
        list(weight_patches(old, new))


def test_integers_are_refused_and_a_key_must_be_there(store: Store) -> None:
    old = store.commit({"model": {"w": torch.arange(9000)}})
    new = store.commit({"model": {"w": torch.arange(1, 9001)}})
    with pytest.raises(ckptstore.InvalidInput, match="no tensor of floats"):
        list(weight_patches(old, new))
    with pytest.raises(ckptstore.NotFound, match="has no key 'policy'"):
        list(weight_patches(old, new, "policy"))
