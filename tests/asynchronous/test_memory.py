"""What an asynchronous commit takes of memory: its staging pool, and nothing that stays."""

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

import ckptstore
from ckptstore.engine.pending import Pending

MIB = 1 << 20
SLACK_BYTES = 12 * MIB
"""An allocator's moods. One copy of the state a commit would be 8 MiB times 450, one kilobyte a chunk 60 MiB."""


def resident_bytes() -> int:
    """Memory that is this process's own; pages of files, such as the chunk index, are the page cache's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))


def test_nothing_of_a_commit_lives_on_once_two_more_were_made(tmp_path: Path) -> None:
    seen: list[ref[Pending[Any]]] = []
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(6):
            state = {"t": torch.full((100_000,), float(step))}
            tensor = ref(state["t"])
            pending = store.commit_async(state, step=step)
            seen.append(ref(pending))
            pending.wait()
            del pending, state
            gc.collect()
            assert tensor() is None  # neither the copy nor the background refers to the caller's memory
        assert [each() is None for each in seen[:-1]] == [True] * 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("how", [{}, {"staging": "lazy"}, {"dedup_first": True}, {"trust_version": True}], ids=str)
def test_memory_is_flat_over_five_hundred_commits(tmp_path: Path, executor: Any, how: dict[str, Any]) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(4)])
    optimizer = torch.optim.AdamW(model[:2].parameters())
    model[2:].requires_grad_(False)
    with ckptstore.open(tmp_path / "store", chunk_bytes=64 << 10, executor=executor) as store:
        before = 0
        for step in range(500):
            optimizer.zero_grad()
            model(torch.randn(8, 400)).square().mean().backward()
            optimizer.step()
            store.commit_async({"model": model, "optimizer": optimizer}, step=step, **how)
            if step % 50 == 49:
                store.forget(ckptstore.KeepLast(3))
                store.gc()
            if step == 99:
                gc.collect()
                before = resident_bytes()
        gc.collect()
        grown = resident_bytes() - before
    print(f"{executor} {how}: {before / MIB:.0f} MiB after 100 commits, {grown / MIB:+.1f} MiB after 500")
    assert grown < SLACK_BYTES
