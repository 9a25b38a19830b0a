"""A tiny store with all features: two runs, tags, metrics, shared chunks, a forgotten commit;
and ways to damage it."""

import shutil
from pathlib import Path
from typing import Any

import torch

import ckptstore
from ckptstore.maintenance.check import Level, Report, Share
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.maintenance.repair import Repaired, repair
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from ckptstore.store import Store

CHUNK_BYTES = 1 << 16


def state(step: int) -> dict[str, Any]:
    """What is committed at `step`: `frozen` is the same at every step, `big` has several chunks."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "frozen": torch.arange(300, dtype=torch.float32),
            "weight": torch.randn(17, 11, generator=generator),
            "bias": torch.full((3,), float(step)),
        },
        "optimizer": {"lr": 0.1, "step": step, "history": list(range(step + 2))},
    }


def large_state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "big": torch.randn(200, 300, generator=generator),
            "small": torch.full((400,), float(step)),
        }
    }


def make_store(path: Path, *, steps: int = 3, codec: str = "raw", states: Any = state) -> Path:
    """A store of `steps` commits in `main`, the first of them tagged, and one in the run
    `other`."""
    with ckptstore.open(
        path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=codec)
    ) as store:
        for step in range(steps):
            tag = "first" if step == 0 else ()
            store.commit(
                states(step),
                step=step,
                tag=tag,
                metrics={"loss": 1.0 / (step + 1)},
                message=f"step {step}",
            )
    with ckptstore.open(path, run="other") as store:
        store.commit(states(100), step=100, metrics={"loss": 9.0})
        store.tag("moved", f"main@{min(1, steps - 1)}")
    return path


def copy_of(store: Path, to: Path) -> Path:
    shutil.copytree(store, to)
    return to


def assert_restores(store: Store, ref: str | int, step: int, states: Any = state) -> None:
    """The commit at `ref` is that of `step`, bit for bit."""
    got = store.checkout(ref).state_dict()
    assert_equal(got, states(step))


def assert_equal(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(got[key], value)
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    else:
        assert got == wanted


def check(store: Path | str, level: Level = Level.PACKS, share: Share | None = None) -> Report:
    with open_offline_store(store) as offline_store:
        return fsck(offline_store, level=level, share=share)


def heal(store: Path | str, *mirrors: Path, apply: bool = True, data: bool = True) -> Repaired:
    storages: list[Storage] = [open_storage(str(mirror), read_only=True) for mirror in mirrors]
    with open_offline_store(store) as offline_store:
        return repair(offline_store, mirrors=storages, apply=apply, share=Share() if data else None)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def files(store: Path, folder: str, suffix: str = "") -> list[Path]:
    return sorted(
        path
        for path in (store / folder).rglob("*")
        if path.is_file() and path.name.endswith(suffix)
    )
