"""DeepSpeed trains on a store: one commit of all ranks' files, resumption, weights in fp32."""

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is built from source: not installed here")

from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ckptstore
from ckptstore.interop import deepspeed as integration
from ckptstore.interop.deepspeed import StoreCheckpointEngine, fp32_weights, write_files
from tests.support.servers.ports import free_port
from tests.trainers.deepspeed_parts import learn, new_engine, new_moe_engine, state, weights
from tests.trainers.trainings import Run, digest, ended_bit_equal, trained

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
    [(2, 3), *(pytest.param(20, each, marks=pytest.mark.soak) for each in (1, 3))],
)
@pytest.mark.timeout(1_800)
def test_a_training_killed_while_it_saves_ends_as_one_that_was_not(
    tmp_path: Path, kills: int, stage: int
) -> None:
    fate = ended_bit_equal(
        TRAINING,
        tmp_path,
        kills,
        random.Random(kills),
        ranks=2,
        saves=(2, 3),
        stage=str(stage),
        steps=str(12 * kills),
    )
    assert fate.resumed
    assert fate.result[0][1] == 2


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
@pytest.mark.oldest
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


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_are_loaded_without_the_optimizers_state(
    tmp_path: Path, store: ckptstore.Store, stage: int
) -> None:
    engine, out = new_engine(stage), tmp_path / "out"
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(str(out))
    wanted = digest(*weights(engine))
    learn(engine, 1)
    engine.save_checkpoint(str(out))
    saves.wait()
    again = new_engine(stage, seed=4)
    StoreCheckpointEngine.install(again, store)
    again.load_checkpoint(str(out), tag="global_step1", load_optimizer_states=False)
    assert digest(*weights(again)) == wanted
    again.load_checkpoint(str(out), load_module_only=True, load_optimizer_states=False)
    assert digest(*weights(again)) == digest(*weights(engine))


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


def test_the_stages_of_a_pipeline_are_one_commit(tmp_path: Path) -> None:
    first, second = trained("tests.trainers.deepspeed_pipeline_training", tmp_path, ranks=2)
    for stage in (first, second):
        assert stage["loaded"] == stage["saved"]
        assert stage["losses"][1] == stage["losses"][0]
    assert first["saved"] != second["saved"], "the ranks have layers of their own"
    assert sum(name.startswith("layer_") for name in first["files"]) == 4
    assert first["files"] == second["files"]


def test_a_checkpoint_that_lacks_the_shard_of_a_rank_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("4")
    wanted = trained(TRAINING, tmp_path, ranks=2)
    with ckptstore.open(tmp_path / "store") as store:
        last = store.checkout()
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert set(shards) < set(last.keys())
    for pack in packs(tmp_path / "store"):
        away = pack.rename(tmp_path / "away")
        with ckptstore.open(tmp_path / "store") as store:
            snapshot = store.checkout(last.id)
            if whole(snapshot.only(shards[:1])) and not whole(snapshot.only(shards[1:])):
                break
        away.rename(pack)
    else:
        raise AssertionError("no pack has only the shard of rank 1")
    again = Run(TRAINING, tmp_path, ranks=2)
    assert again.result() == wanted
    assert again.told("resumed") == [2]
    assert f"skipped checkpoint {tmp_path / 'out' / 'global_step4'}" in again.output()


def whole(snapshot: ckptstore.Snapshot) -> bool:
    try:
        snapshot.verify()
    except (ckptstore.Corrupt, ckptstore.NotFound):
        return False
    return True


@pytest.mark.oldest
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


def test_a_tag_with_deepspeeds_own_files_is_refused_before_the_work(
    tmp_path: Path, store: ckptstore.Store
) -> None:
    engine, out = new_engine(), tmp_path / "out"
    engine.save_checkpoint(str(out), tag="global_step0")
    files = {each.name: each.read_bytes() for each in (out / "global_step0").iterdir()}
    saves = StoreCheckpointEngine.install(engine, store)
    for tag in ({"tag": "global_step0"}, {}):
        with pytest.raises(ckptstore.Conflict, match=r"is a file of DeepSpeed.*choose another tag"):
            engine.save_checkpoint(str(out), **tag)
    saves.wait()
    assert not store.log()
    assert files == {each.name: each.read_bytes() for each in (out / "global_step0").iterdir()}
    engine.save_checkpoint(str(out), tag="other")
    saves.wait()
    assert len(store.log()) == 1


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
@pytest.mark.oldest
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


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_makes_a_universal_checkpoint_of_the_files(
    tmp_path: Path, store: ckptstore.Store, stage: int
) -> None:
    engine, files = new_engine(stage), tmp_path / "files" / "here"
    saves = StoreCheckpointEngine.install(engine, store)
    learn(engine, 0)
    engine.save_checkpoint(
        str(tmp_path / "out"), tag="here", client_state={"universal_checkpoint_info": {}}
    )
    saves.wait()
    write_files(store.checkout(), files)
    convert_to_universal(
        SimpleNamespace(
            input_folder=str(files),
            output_folder=str(tmp_path / "universal" / "there"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    (tmp_path / "universal" / "latest").write_text("there")
    (tmp_path / "universal" / "latest_universal").write_text("there")
    again = new_engine(stage, checkpoint={"load_universal": True})  # it lacks frozen weights
    assert digest(*weights(again)) != digest(*weights(engine))
    StoreCheckpointEngine.install(again, store)
    again.load_checkpoint(str(tmp_path / "universal"))
    assert digest(*weights(again)) == digest(*weights(engine))
    assert again.global_steps == 1


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


def test_the_example_runs_as_it_is() -> None:
    example = Path(__file__).parents[2] / "examples/trainers/train_with_deepspeed.py"
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting at step 6" in done.stdout


@pytest.mark.oldest
def test_what_is_not_supported_is_refused(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    with monkeypatch.context() as patch:
        patch.setattr(integration.deepspeed, "__version__", "0.16.4")
        with pytest.raises(
            ckptstore.InvalidInput, match=r"0\.16\.4 is not supported: wanted 0\.18"
        ):
            StoreCheckpointEngine.install(engine, store)
    StoreCheckpointEngine.install(engine, store)
    with pytest.raises(ckptstore.InvalidInput, match="saves into a store already"):
        StoreCheckpointEngine.install(engine, store)
    commit = store.commit({"model": 1}, step=1)
    with pytest.raises(ckptstore.InvalidInput, match="was not made by StoreCheckpointEngine"):
        fp32_weights(commit)
