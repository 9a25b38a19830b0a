"""Frozen weights without a counted write are neither copied nor hashed; all others are."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.state import writes
from ckptstore.state.flatten import flatten
from ckptstore.state.leaf_sources import leaves_of
from ckptstore.state.writes import FrozenWeights
from tests.state.carrying import assert_same

WEIGHT = "model/0.weight"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store", storage=ckptstore.Storage(chunk_bytes=65536)) as store:
        yield store


def frozen() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(200, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 200)
    ).requires_grad_(False)


def known(frozen_weights: FrozenWeights, state: dict[str, Any]) -> set[str]:
    """The paths that would be trusted in the next commit, after one commit of everything that may
    be."""
    flats = flatten(state)
    sources, paths = (
        leaves_of(flats),
        [path for flat in flats.values() for path in flat.schema.paths],
    )
    candidates = frozen_weights.candidates(state, sources, paths)
    found = frozen_weights.known(candidates)
    frozen_weights.remember(candidates, {c.leaf: b"id" for c in candidates})
    return {paths[n] for n, source in found.items() if source.known_ids is not None}


def test_frozen_weights_are_trusted_from_the_second_commit_on() -> None:
    memory, state = FrozenWeights(), {"model": frozen()}
    assert known(memory, state) == set()
    assert known(memory, state) == {
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
        "model/1.bias",
        "model/2.weight",
        "model/2.bias",
    }


def test_a_counted_write_ends_it() -> None:
    memory, state = FrozenWeights(), {"model": frozen()}
    known(memory, state)
    state["model"][0].weight.add_(1)
    assert WEIGHT not in known(memory, state)
    assert WEIGHT in known(memory, state)


def replace_data(model: Any) -> None:
    model[0].weight.data = torch.randn(300, 200)


def replace_parameter(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.randn(300, 200), requires_grad=False)


@pytest.mark.parametrize("change", [replace_data, replace_parameter])
def test_other_memory_ends_it(change: Any) -> None:
    memory, state = FrozenWeights(), {"model": frozen()}
    known(memory, state)
    change(state["model"])
    assert WEIGHT not in known(memory, state)


def test_memory_with_uncounted_writes_is_never_trusted() -> None:
    model: Any = frozen()
    model[0].weight.requires_grad_(True)
    model[2].weight.data = torch.zeros(2, 200, 300)[0]
    tied = model[1].weight
    model.register_buffer("window", model[2].bias.data[:150], persistent=False)
    state = {
        "model": model,
        "optimizer": torch.optim.SGD([model[0].bias]),
        "other": {"tied": tied.detach()[:200], "plain": torch.zeros(999)},
    }
    memory = FrozenWeights()
    known(memory, state)
    assert known(memory, state) == {"model/1.bias"}


def test_weights_of_an_optimizer_outside_the_state_are_not_trusted_once_it_has_stepped() -> None:
    memory, state = FrozenWeights(), {"model": frozen()}
    known(memory, state)
    torch.optim.SGD([state["model"][0].weight]).step()
    assert WEIGHT not in known(memory, state)


def test_commits_that_trust_read_back_as_they_should(store: ckptstore.Store) -> None:
    state: dict[str, Any] = {"model": frozen(), "rest": torch.zeros(50_000)}
    for step in range(4):
        state["rest"].add_(1)
        pending = store.commit_async(
            state, step=step, background=ckptstore.Async(trust_version=True)
        )
        wanted = {
            "model": {k: v.clone() for k, v in state["model"].state_dict().items()},
            "rest": state["rest"].clone(),
        }
        state["model"][0].weight.add_(1) if step == 2 else None
        assert_same(dict(pending.wait().state_dict("model")), wanted["model"])
        assert_same(pending.wait().read("rest"), wanted["rest"])
    assert store.staging.held_bytes


def test_a_trusted_chunk_that_was_collected_is_written_again(store: ckptstore.Store) -> None:
    state: dict[str, Any] = {"model": frozen()}
    first = store.commit_async(state, background=ckptstore.Async(trust_version=True), step=1).wait()
    for step in (2, 3):
        store.commit({"other": step}, step=step)
    store.forget([first.id])
    assert store.gc(max_unused=0.0, force=True, grace_s=0).freed_bytes
    again = store.commit_async(state, background=ckptstore.Async(trust_version=True)).wait()
    again.verify()
    assert_same(again.read(WEIGHT), state["model"][0].weight.detach())


def test_a_full_check_finds_writes_torch_did_not_count(
    store: ckptstore.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writes, "CHECK_EVERY", 3)
    state: dict[str, Any] = {"model": frozen()}
    store.commit_async(state, background=ckptstore.Async(trust_version=True)).wait()
    weight = state["model"][0].weight
    weight.detach().numpy()[0] += 1
    with caplog.at_level(logging.ERROR, "ckptstore"):
        old, new = (
            store.commit_async(state, background=ckptstore.Async(trust_version=True)).wait()
            for _ in range(2)
        )
    assert "no write" in caplog.text and WEIGHT in caplog.text
    assert not torch.equal(old.read(WEIGHT), weight) and torch.equal(new.read(WEIGHT), weight)
    weight.detach().numpy()[0] += 1
    assert torch.equal(
        store.commit_async(state, background=ckptstore.Async(trust_version=True))
        .wait()
        .read(WEIGHT),
        weight,
    )


def test_a_cast_neither_trusts_a_weight_nor_is_trusted(store: ckptstore.Store) -> None:
    """Its chunks are those of other bytes, and its own bytes must be copied within the call."""
    state: dict[str, Any] = {"model": frozen()}
    weight = state["model"][0].weight
    for step, cast in enumerate(({"0.weight": torch.bfloat16}, None, {"0.weight": torch.bfloat16})):
        wanted = weight.to(torch.bfloat16 if cast else torch.float32, copy=True)
        trusting = ckptstore.Async(trust_version=True)
        pending = store.commit_async(state, step=step, cast=cast, background=trusting)
        if step == 2:
            weight.add_(1)
        assert torch.equal(pending.wait().read(WEIGHT), wanted)
