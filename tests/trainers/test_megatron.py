"""Megatron-Core's dist_checkpointing on a store. Releases from 0.17 want Python 3.12, and import
triton."""

from pathlib import Path

import pytest

import ckptstore

pytest.importorskip("megatron.core", reason="Megatron-Core 0.19 needs Python 3.12 and triton")

from ckptstore.interop import megatron as integration
from ckptstore.interop.megatron import StoreSaveStrategy
from tests.trainers.trainings import trained

TRAINING = "tests.trainers.megatron_training"


def test_a_state_comes_back_also_on_another_number_of_ranks(tmp_path: Path) -> None:
    first, second = trained(TRAINING, tmp_path, ranks=2)
    assert first["same"] and second["same"]
    assert (first["rng"], second["rng"]) == ({"rank": 0, "seed": 3}, {"rank": 1, "seed": 3})
    assert first["iteration"] == 300 and first["content"] == {"v": 1}
    assert first["names"] == ["rows", "same"]
    assert first["files"] == [".metadata", "metadata.json"]
    assert first["step"] == 100
    (alone,) = trained(TRAINING, tmp_path, ranks=1)
    assert alone["same"] and alone["rows"] == first["rows"]
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 3] ^= 16
            pack.write_bytes(data)
    with pytest.raises(AssertionError, match="Corrupt: "):
        trained(TRAINING, tmp_path, ranks=1)


def test_what_is_not_supported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ckptstore.InvalidInput, match="leave out async_sharded_save"):
        StoreSaveStrategy(tmp_path / "store").async_save({}, tmp_path)
    monkeypatch.setattr(integration.megatron.core, "__version__", "0.16.1")
    with pytest.raises(ckptstore.InvalidInput, match=r"0\.16\.1 is not supported: wanted 0\.19"):
        StoreSaveStrategy(tmp_path / "store")
