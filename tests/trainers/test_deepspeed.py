"""DeepSpeed trains on a store: one commit of all ranks' files, resumption, weights in fp32."""

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is built from source: not installed here")

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ckptstore
from ckptstore.interop import deepspeed as integration
from ckptstore.interop.deepspeed import StoreCheckpointEngine, fp32_weights, write_files
from tests.trainers.deepspeed_parts import learn, new_engine, new_moe_engine, state
from tests.trainers.trainings import digest, free_port, killed, trained

# What DeepSpeed calls is deprecated in newer versions of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.* is deprecated:FutureWarning"),
]

TRAINING = "tests.trainers.deepspeed_training"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)


def packs(store: Path) -> set[Path]:
    return {path for path in (store / "packs").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kills", "stage"),
    [(3, 3), *(pytest.param(20, each, marks=pytest.mark.soak) for each in (1, 3))],
)
@pytest.mark.timeout(1_800)
def test_a_training_killed_while_it_saves_ends_as_one_that_was_not(
    tmp_path: Path, kills: int, stage: int
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage").write_text(str(stage))
        (tmp_path / name / "steps").write_text(str(8 * kills))
    wanted = trained(TRAINING, tmp_path / "whole", ranks=2)
    fate = killed(TRAINING, tmp_path / "killed", kills, random.Random(kills), ranks=2)
    assert fate.kills == kills
    assert not fate.lost
    assert fate.result == wanted
    assert wanted[0][1] == 2


@pytest.mark.parametrize(
    "damage", ["flip a bit", "cut the file", "delete the file", "cut pointers"]
)
def test_a_damaged_latest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, store: ckptstore.Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, out = new_engine(), tmp_path / "out"
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(str(out))
    saves.wait()
    wanted, before = digest(*state(engine)), packs(tmp_path / "store")
    learn(engine, 1)
    engine.save_checkpoint(str(out))
    saves.wait()
    assert (out / "latest").read_text() == "global_step2"
    for pointer in (out / "global_step2").iterdir() if damage == "cut pointers" else ():
        pointer.write_text("{")
    for pack in packs(tmp_path / "store") - before if damage != "cut pointers" else ():
        data = bytearray(pack.read_bytes())
        data[len(data) // 3] ^= 16
        pack.write_bytes(data if damage == "flip a bit" else data[: len(data) // 4])
        if damage == "delete the file":
            pack.unlink()
    again = new_engine(seed=4)
    with ckptstore.open(tmp_path / "store") as reopened:
        StoreCheckpointEngine.install(again, reopened)
        with caplog.at_level(logging.WARNING, "ckptstore"):
            path, _ = again.load_checkpoint(str(out))
        assert "global_step1" in path
        assert digest(*state(again)) == wanted
        assert f"skipped checkpoint {out / 'global_step2'}" in caplog.text
        with pytest.raises((ckptstore.Corrupt, ckptstore.NotFound)):
            again.load_checkpoint(str(out), tag="global_step2")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_loaded_is_what_was_saved(
    tmp_path: Path, store: ckptstore.Store, stage: int
) -> None:
    engine = new_engine(stage)
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(str(tmp_path / "out"), client_state={"tokens": 7, "lists": [1, [2.5]]})
    wanted = digest(*state(engine))
    learn(engine, 1)
    saves.wait()
    again = new_engine(stage, seed=4)
    StoreCheckpointEngine.install(again, store)
    _, client = again.load_checkpoint(str(tmp_path / "out"))
    assert client["tokens"] == 7 and client["lists"] == [1, [2.5]]
    assert digest(*state(again)) == wanted
    assert again.global_steps == 1


def test_experts_are_part_of_the_commit(tmp_path: Path, store: ckptstore.Store) -> None:
    engine, out = new_moe_engine(), tmp_path / "out"
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(str(out))
    wanted = digest(engine.module.state_dict())
    saves.wait()
    names = store.checkout().keys()
    assert sum("_expert_" in name for name in names) == 2
    assert set(os.listdir(out / "global_step1")) == {".metadata", *names} - {"deepspeed"}
    again = new_moe_engine(seed=4)
    StoreCheckpointEngine.install(again, store)
    again.load_checkpoint(str(out))
    assert digest(again.module.state_dict()) == wanted
    with pytest.raises(ckptstore.InvalidInput, match="divided among ranks"):
        fp32_weights(store.checkout())


def test_latest_names_only_what_is_durable(
    tmp_path: Path, store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, out = new_engine(), tmp_path / "out"
    saves = StoreCheckpointEngine.install(engine, store)
    engine.save_checkpoint(str(out), tag="first")
    saves.wait()
    (tmp_path / "store" / "packs").rename(tmp_path / "away")
    (tmp_path / "store" / "packs").write_bytes(b"")
    learn(engine, 0)
    engine.save_checkpoint(str(out), tag="second")
    with pytest.raises(ckptstore.CkptStoreError):
        engine.save_checkpoint(str(out), tag="third")
    assert (out / "latest").read_text() == "first"
    (tmp_path / "store" / "packs").unlink()
    (tmp_path / "away").rename(tmp_path / "store" / "packs")
    engine.save_checkpoint(str(out), tag="fourth")
    saves.wait()
    assert (out / "latest").read_text() == "fourth"
    assert not list((out / "second").iterdir())


def test_pointer_files_have_the_names_of_files_and_are_made_again(
    tmp_path: Path, store: ckptstore.Store
) -> None:
    engine, out = new_engine(), tmp_path / "out"
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(str(out), tag="here")
    saves.wait()
    names = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert sorted(os.listdir(out / "here")) == [".metadata", *names]
    assert store.checkout(out / "here").id == store.checkout(out / "here" / names[0]).id
    for name in names:
        (out / "here" / name).unlink()
    again = new_engine(seed=4)
    StoreCheckpointEngine.install(again, store)
    again.load_checkpoint(str(out))
    assert digest(*state(again)) == digest(*state(engine))
    assert sorted(os.listdir(out / "here")) == [".metadata", *names]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_weights_are_those_of_deepspeeds_own_tool(
    tmp_path: Path, store: ckptstore.Store, stage: int
) -> None:
    engine = new_engine(stage, bf16={"enabled": True})
    saves = StoreCheckpointEngine.install(engine, store)
    learn_bf16(engine)
    engine.save_checkpoint(str(tmp_path / "out"), tag="here")
    saves.wait()
    snapshot = store.checkout()
    write_files(snapshot, tmp_path / "files" / "here")
    (tmp_path / "files" / "latest").write_text("here")
    wanted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "files"))
    found = fp32_weights(snapshot)
    assert found.keys() == wanted.keys()
    assert digest(*[found[name] for name in wanted]) == digest(*wanted.values())
    with pytest.raises(ckptstore.Conflict, match="exists"):
        write_files(snapshot, tmp_path / "files" / "here")


def learn_bf16(engine: Any) -> None:
    loss = engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()


def test_files_of_deepspeed_are_loaded_as_before(tmp_path: Path, store: ckptstore.Store) -> None:
    engine = new_engine()
    learn(engine, 0)
    engine.save_checkpoint(str(tmp_path / "out"))
    wanted = digest(*state(engine))
    again = new_engine(seed=4)
    StoreCheckpointEngine.install(again, store)
    again.load_checkpoint(str(tmp_path / "out"))
    assert digest(*state(again)) == wanted
    assert again.load_checkpoint(str(tmp_path / "nothing")) == (None, None)


def test_an_export_is_a_file(tmp_path: Path, store: ckptstore.Store) -> None:
    engine = new_engine()
    StoreCheckpointEngine.install(engine, store)
    engine.save_16bit_model(str(tmp_path / "export"))
    exported = torch.load(tmp_path / "export" / "pytorch_model.bin", weights_only=True)
    assert exported["first.bias"].shape == (64,)
    assert not store.log()


def test_a_value_that_cannot_be_stored_is_named_by_its_path(
    tmp_path: Path, store: ckptstore.Store
) -> None:
    engine = new_engine()
    StoreCheckpointEngine.install(engine, store)
    with pytest.raises(ckptstore.InvalidInput, match=r"model_states\.pt/odd"):
        engine.save_checkpoint(str(tmp_path / "out"), client_state={"odd": object()})
    engine.save_checkpoint(str(tmp_path / "out"), client_state={"odd": 1})


def test_what_is_not_supported_is_refused(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    with monkeypatch.context() as patch:
        patch.setattr(integration.deepspeed, "__version__", "0.16.4")
        with pytest.raises(
            ckptstore.InvalidInput, match=r"0\.16\.4 is not supported: wanted 0\.19"
        ):
            StoreCheckpointEngine.install(engine, store)
    StoreCheckpointEngine.install(engine, store)
    with pytest.raises(ckptstore.InvalidInput, match="saves into a store already"):
        StoreCheckpointEngine.install(engine, store)
    commit = store.commit({"model": 1}, step=1)
    with pytest.raises(ckptstore.InvalidInput, match="was not made by StoreCheckpointEngine"):
        fp32_weights(commit)
