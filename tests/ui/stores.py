"""Stores for the page's tests: a small one with everything, a hostile one, and large ones that are
made of metadata."""

import math
import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

import ckptstore
from ckptstore.core.ids import CommitId, new_session_id
from ckptstore.log.entries import Commit
from ckptstore.log.log import Log
from ckptstore.repository.init_store import init_store
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage import open_storage

WIDTH, LAYERS, WORDS = 32, 4, 200
EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>\"'&{a|b}{b}\x1b[2J\u202e"
HUGE = 10_000_000


def network() -> dict[str, torch.Tensor]:
    """A language model's shape, in small."""
    state = {"embedding.weight": torch.randn(WORDS, WIDTH)}
    for i in range(LAYERS):
        for part in "qkvo":
            state[f"layers.{i}.attention.{part}.weight"] = torch.randn(WIDTH, WIDTH) / 6
        state[f"layers.{i}.mlp.up.weight"] = torch.randn(4 * WIDTH, WIDTH) / 6
        state[f"layers.{i}.mlp.down.weight"] = torch.randn(WIDTH, 4 * WIDTH) / 6
        state[f"layers.{i}.norm.weight"] = torch.ones(WIDTH)
    state["head.weight"] = torch.randn(WORDS, WIDTH).bfloat16()
    return state


def _train(place: Path, run: str, rate: float, steps: range, *, start: str = "") -> None:
    model = network()
    with ckptstore.open(place, run=run) as store:
        if start:
            store.checkout(start).restore({"model": model})
        for step in steps:
            for name, tensor in model.items():
                if run != "frozen-embedding" or name != "embedding.weight":
                    tensor += (torch.randn(tensor.shape) * rate / (1 + step / 500)).to(tensor.dtype)
            loss = 3 * math.exp(-step / 700) + 0.4 + random.random() * 0.1 + (rate > 0.03) * 0.4
            store.commit(
                {"model": model, "optimizer": {"lr": rate, "step": step}},
                step=step,
                metrics={"loss": loss, "accuracy": 1 - loss / 4},
                message=f"{run}, step {step}",
                links={"tracker": "https://example.org/run/1"} if step == steps[-1] else None,
            )


def small_store(place: Path) -> None:
    """Three runs, of which two branch off the first, with tags, metrics and a frozen leaf."""
    _train(place, "baseline", 0.02, range(100, 1301, 100))
    _train(place, "higher-rate", 0.05, range(500, 1101, 100), start="baseline@400")
    _train(place, "frozen-embedding", 0.02, range(900, 1301, 100), start="baseline@800")
    with ckptstore.open(place) as store:
        store.tag("release-1", "baseline@1000")


def hostile_store(place: Path) -> None:
    """Every text says something to a browser, and some are long: a message and a value have ten
    megabytes, names of leaves and metrics half a megabyte. Names of runs and tags cannot say
    anything: the log refuses them."""
    huge = EVIL * (HUGE // len(EVIL))
    long = huge[: HUGE // 20]
    ckptstore.open(place).close()
    with closing(StoreHandle(place)) as handle:
        entry = _entry(CommitId(os.urandom(32).hex()), "", "made-up", 3, math.nan, 0)
        handle.log.append(replace(entry, message=huge, metrics=((EVIL, 1.0), (long, math.inf))))
    state = {EVIL: {f"{EVIL}/{EVIL}": torch.tensor([1.0, math.nan, math.inf]), long: 1}}
    with ckptstore.open(place) as store:
        for step in (1, 2):
            store.commit(
                {**state, "note": huge, "step": step},
                step=step,
                message=long[:10_000],
                metrics={EVIL: math.nan, "x" * 200: math.inf},
                links={EVIL[:40]: f"javascript:window.evil=1//{EVIL}"},
            )


def long_history(place: Path, commits: int, runs: int) -> None:
    """A log of `commits` commits that have entries alone, in `runs` runs that branch, and a real
    one at its end."""
    config = init_store(place)
    draw, heads = random.Random(0), [(CommitId(""), 0)] * runs
    with (
        closing(open_storage(place, fsync=False)) as storage,
        closing(Log(storage, config.store, config.generation)) as log,
    ):
        for n in range(commits):
            run = n * runs // commits if n % 3 else draw.randrange(runs)
            parent, step = heads[run]
            if not parent and n:
                parent, step = heads[draw.randrange(run + 1)]
            commit = CommitId(os.urandom(32).hex())
            heads[run] = (commit, step + 10)
            loss = 4 * math.exp(-step / 9_000) + draw.random() * 0.1
            log.append(_entry(commit, parent, f"run-{run:02}", step + 10, loss, n))
    with ckptstore.open(place, run="run-00") as store:
        store.commit({"model": {"weight": torch.ones(1000)}}, step=1, tag="newest")


def _entry(commit: CommitId, parent: str, run: str, step: int, loss: float, n: int) -> Commit:
    return Commit(
        new_session_id(),
        commit,
        os.urandom(32).hex(),
        run,
        step,
        (CommitId(parent),) if parent else (),
        f"commit {n}",
        (("accuracy", 1 - loss / 4), ("loss", loss)),
        (f"tag-{n}",) if n % 500 == 0 else (),
        (),
        frozenset(),
        (),
        logical_bytes=1_450_000_000,
        new_bytes=120_000_000 + n,
        leaves=300,
        document_bytes=500,
    )


def many_leaves(place: Path, leaves: int) -> None:
    """Two commits of `leaves` small tensors, of which a hundredth differ."""
    state = {
        f"layers.{i // 20}.experts.{i % 20}.weight": torch.full((4, 4), float(i))
        for i in range(leaves)
    }
    with ckptstore.open(place) as store:
        store.commit({"model": state}, step=1)
        for name in list(state)[::100]:
            state[name] += 1
        store.commit({"model": state}, step=2)
