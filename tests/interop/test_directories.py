"""Whole directories, such as sharded Hugging Face models, are exported again byte for byte; names
that lead elsewhere are refused.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.interop.formats import Labels, export, import_path
from ckptstore.store import Store


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def model_directory(root: Path, *, shards: int = 2) -> dict[str, torch.Tensor]:
    """A directory like a Hugging Face model's, and its tensors."""
    root.mkdir()
    state = {
        f"model.layers.{i}.{part}.weight": torch.randn(60, 90).bfloat16()
        for i in range(4)
        for part in ("attn", "mlp")
    }
    names = sorted(state)
    weight_map = {}
    for shard in range(shards):
        file = (
            "model.safetensors"
            if shards == 1
            else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        )
        mine = names[shard::shards]
        save_file({name: state[name] for name in mine}, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (root / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=2)
        )
    (root / "config.json").write_text('{"architectures": ["X"],\n  "vocab_size": 7}')
    (root / "tokenizer.json").write_bytes(os.urandom(300_000))
    (root / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (root / "empty.txt").touch()
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text("{}")
    return state


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_directory_comes_out_byte_for_byte(
    shards: int, store: Store, tmp_path: Path
) -> None:
    state = model_directory(tmp_path / "hf", shards=shards)
    made = import_path(store, tmp_path / "hf", Labels(tags=("base",)))
    there = made.state_dict("model")
    assert there.keys() == state.keys() and all(
        torch.equal(there[name], state[name]) for name in state
    )
    done = export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")
    assert len(done.files) == len(contents(tmp_path / "hf"))


def test_a_fine_tuned_model_shares_what_it_did_not_change_and_keeps_its_files(
    store: Store, tmp_path: Path
) -> None:
    model_directory(tmp_path / "hf")
    base = import_path(store, tmp_path / "hf")
    state = base.state_dict()
    state["model"]["model.layers.3.mlp.weight"] += 1
    tuned = store.commit(state, tag="tuned")
    assert tuned.new_bytes < base.new_bytes / 3
    export(tuned, tmp_path / "out")
    before, after = contents(tmp_path / "hf"), contents(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == [
        "model-00002-of-00002.safetensors"
    ]


def test_an_index_brings_its_shards_and_nothing_else(store: Store, tmp_path: Path) -> None:
    state = model_directory(tmp_path / "hf")
    made = import_path(store, tmp_path / "hf" / "model.safetensors.index.json")
    assert made.state_dict("model").keys() == state.keys()
    export(made, tmp_path / "out")
    assert {
        name: data for name, data in contents(tmp_path / "hf").items() if name.startswith("model")
    } == contents(tmp_path / "out")


def test_files_that_do_not_belong_together_have_a_key_each(store: Store, tmp_path: Path) -> None:
    (tmp_path / "pipeline" / "unet").mkdir(parents=True)
    for name in ("unet/weights", "vae", "adapter"):
        save_file({"w": torch.randn(9, 9)}, tmp_path / "pipeline" / f"{name}.safetensors")
    made = import_path(store, tmp_path / "pipeline")
    assert made.keys() == ["adapter", "unet/weights", "vae", "files", "manifest"]
    export(made, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "pipeline")


def test_what_links_to_files_is_read_as_the_cache_of_hugging_face_is_built(
    store: Store, tmp_path: Path
) -> None:
    model_directory(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        if path.is_file():
            (tmp_path / "snapshot" / path.name).symlink_to(path)
    made = import_path(store, tmp_path / "snapshot")
    assert len(made.leaves("model/*")) == 8
    assert (
        len(
            import_path(store, tmp_path / "snapshot" / "model.safetensors.index.json").leaves(
                "model/*"
            )
        )
        == 8
    )


ELSEWHERE = (
    "../secret.safetensors",
    "/etc/passwd",
    "sub/../../secret.safetensors",
    "",
    "..",
    "absent.safetensors",
    7,
    "a\0b",
)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_index_that_names_other_files_is_refused(
    name: Any, store: Store, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "hf").mkdir()
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    for place in (index, tmp_path / "hf"):
        with pytest.raises(InvalidInput):
            import_path(store, place)
    assert store.log() == []


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": 3}', "[" * 50_000, '{"weight_map": {"a": {}}}']
)
def test_an_index_that_is_none_is_refused(text: str, store: Store, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(InvalidInput, match=r"index|not the name"):
        import_path(store, index)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "a//b", ".", "a\0b"])
def test_a_commit_whose_files_lead_elsewhere_is_not_exported(
    name: str, store: Store, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    state = import_path(store, tmp_path / "model.safetensors").state_dict()
    document = json.loads(state["manifest"])
    document["files"][name] = document["files"].pop("model.safetensors")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    made = store.commit({**state, "manifest": text.encode()})
    with pytest.raises(InvalidInput, match="not the name of a file"):
        export(made, tmp_path / "export")
    assert {path.name for path in tmp_path.iterdir()} == {"store", "model.safetensors"}


def test_tensors_that_are_not_what_the_files_say_are_not_exported_as_files(
    store: Store, tmp_path: Path
) -> None:
    model_directory(tmp_path / "hf", shards=1)
    state = import_path(store, tmp_path / "hf").state_dict()
    state["model"]["model.layers.3.mlp.weight"] = torch.zeros(3)
    with pytest.raises(InvalidInput, match="choose a --format"):
        export(store.commit(state), tmp_path / "out")


def test_a_directory_with_something_else_in_it_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    with pytest.raises(InvalidInput, match="no files"):
        import_path(store, tmp_path / "odd")
    os.mkfifo(tmp_path / "odd" / "pipe")
    with pytest.raises(InvalidInput, match="pipe"):
        import_path(store, tmp_path / "odd")
    with pytest.raises(NotFound, match="nothing at"):
        import_path(store, tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput, match=r"notes\.txt is empty"):
        import_path(store, tmp_path / "notes.txt")
