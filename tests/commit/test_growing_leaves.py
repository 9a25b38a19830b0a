"""A log that grows from commit to commit costs the rest of the state nothing: what is known of the
chunks of the last commit is kept."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.commit import write
from ckptstore.core.ids import digest
from ckptstore.interop.dcp import StoreWriter
from tests.interop.dcp_states import NO_DIST

CHUNK_BYTES = 1 << 16


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that commits hash from now on."""
    hashed = list[int]()

    def counting(data: Any) -> bytes:
        hashed.append(len(data))
        return digest(data)

    monkeypatch.setattr(write, "digest", counting)
    return hashed


def test_what_did_not_change_beside_a_growing_log_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = counted(monkeypatch)
    state: dict[str, Any] = {"model": torch.rand(1 << 19), "log": [i / 7 for i in range(3000)]}
    with ckptstore.open(tmp_path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        store.commit(state, step=0)
        for step in range(1, 6):
            state["log"].append(step / 3)
            hashed.clear()
            store.commit(state, step=step)
            assert sum(hashed) < 2 * CHUNK_BYTES


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")
def test_beside_a_log_that_grows_dcp_hashes_what_changed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the log was so short before that it lay in a page."""
    hashed = counted(monkeypatch)
    weights = torch.rand(1 << 19)
    state: dict[str, Any] = {"log": [0.5], "model": weights}
    storage = ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
    with ckptstore.open(tmp_path, storage=storage) as store:
        for step in range(6):
            hashed.clear()
            dcp.save(state, storage_writer=StoreWriter(store, step=step), **NO_DIST)
            assert (sum(hashed) < 3 * CHUNK_BYTES) == (step > 0)
            state["log"] += [i / 7 for i in range(300 * step)]
            weights[0] += 1
        assert store.checkout(5).read("model/model")[0] == weights[0] - 1


def test_patches_are_made_beside_a_growing_log(tmp_path: Path) -> None:
    weights = torch.rand(1 << 20).to(torch.bfloat16)
    state: dict[str, Any] = {"model": weights, "log": [i / 7 for i in range(3000)]}
    with ckptstore.open(tmp_path) as store:
        store.commit(state, step=0)
        for step in range(1, 4):
            state["log"].append(step / 3)
            weights[torch.randperm(len(weights))[:5000]] += 1
            stored = store.commit(state, step=step).stats.new_bytes
            assert stored < weights.nbytes / 20


@pytest.mark.parametrize("seed", range(4))
def test_states_of_which_leaves_grow_and_shrink_come_back(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    weights = torch.rand(3 * CHUNK_BYTES // 4 + 5)
    logs: list[list[float]] = [[i / 7 for i in range(random.randint(1, 9000))] for _ in range(2)]
    text = ["a"]
    kept: list[dict[str, Any]] = []
    with ckptstore.open(tmp_path, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as store:
        for step in range(8):
            match random.randrange(5):
                case 0:
                    logs[0] += [random.random()] * random.randint(1, 5000)
                case 1:
                    del logs[1][random.randrange(len(logs[1])) :]
                case 2:
                    weights[random.randrange(len(weights))] += 1
                case 3:
                    logs[0], logs[1] = logs[1], logs[0]
                case _:
                    text[0] += "b" * random.randint(1, 3 * CHUNK_BYTES)
            logs[1].append(1.5)
            state = {"model": weights, "logs": logs, "text": text[0]}
            store.commit(state, step=step)
            kept.append({**state, "model": weights.clone(), "logs": [list(log) for log in logs]})
        for step, wanted in enumerate(kept):
            found = store.checkout(step).state_dict()
            assert torch.equal(found["model"], wanted["model"])
            assert found["logs"] == wanted["logs"]
            assert found["text"] == wanted["text"]
        assert not store.fsck(read_data="all").findings
