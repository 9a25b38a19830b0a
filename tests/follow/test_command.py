"""`ckptstore follow` hands commits on: as lines, as a file, to a command."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptstore
from tests.cli.running import call


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with ckptstore.open(tmp_path / "store", run="rl") as store:
        for step in range(3):
            weight = torch.full((100,), float(step))
            store.commit({"model": {"w": weight}, "n": step}, step=step, metrics={"loss": 0.5})
    return tmp_path / "store"


def test_the_newest_commit_is_told_at_once(store: Path) -> None:
    done = call("-s", str(store), "follow", "rl", "-n", "1")
    assert (done.code, done.err) == (0, "")
    assert "(step 2) of run rl: " in done.out.splitlines()[0]
    done = call("-s", str(store), "follow", "rl", "--ref", "best:loss", "-n", "1", "--json")
    first = json.loads(done.out.splitlines()[0])
    assert first["run"] == "rl"


def test_a_file_is_replaced_before_the_command_runs(store: Path, tmp_path: Path) -> None:
    file, said = tmp_path / "w.safetensors", tmp_path / "said"
    file.write_bytes(b"old")
    command = f'wc -c < "$CKPTSTORE_FILE" > {said}; echo "$CKPTSTORE_REF" >> {said}'
    words = ("-o", str(file), "--select", "model", "--exec", command, "-n", "1")
    done = call("-s", str(store), "follow", "rl", *words)
    assert (done.code, done.err) == (0, "")
    assert torch.equal(load_file(file)["w"], torch.full((100,), 2.0))
    size, commit = said.read_text().split()
    assert int(size) == os.path.getsize(file)
    with ckptstore.open(store, read_only=True) as opened:
        assert opened.checkout("rl@2").id == commit
    assert {path.name for path in tmp_path.iterdir()} == {"store", "w.safetensors", "said"}


def test_a_command_that_fails_ends_it(store: Path) -> None:
    done = call("-s", str(store), "follow", "rl", "--exec", "exit 3", "-n", "1")
    assert done.code == 1
    assert "--exec ended with 3 for" in done.err
