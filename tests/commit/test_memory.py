"""Memory of asynchronous commits: only the staging pool, and nothing is left over."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

import ckptstore
from ckptstore.commit.pending import Pending
from ckptstore.store import internals_of
from tests.support.grouped import grouped

MIB = 1 << 20
SLACK_BYTES = 12 * MIB
"""An allocator's moods. One copy of the state a commit would be 8 MiB times 450, one kilobyte a
chunk 60 MiB."""


def resident_bytes() -> int:
    """Memory that is this process's own; pages of files, such as the chunk index, are the page
    cache's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))


TENSORS, TENSOR_BYTES = 6, 8 * MIB
STATE_BYTES = TENSORS * TENSOR_BYTES


def peak_of(act: Callable[[], object]) -> int:
    """By how much this process's memory grew at most while `act` ran."""
    status = Path("/proc/self/status")

    def kib(field: str) -> int:
        return next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith(field)
        )

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = kib("VmRSS")
    act()
    return (kib("VmHWM") - before) << 10


@pytest.mark.parametrize(
    ("options", "how", "changed", "limit"),
    [
        ({}, {}, TENSORS, STATE_BYTES),
        ({"executor": "process"}, {}, TENSORS, STATE_BYTES),
        ({"staging_bytes": 2 * TENSOR_BYTES}, {}, TENSORS, 2 * TENSOR_BYTES),
        ({}, {"staging": "lazy"}, TENSORS, STATE_BYTES),
        ({}, {"trust_version": True}, 0, 0),
    ],
    ids=str,
)
def test_a_commit_uses_no_more_memory_than_it_must_copy(
    tmp_path: Path, options: dict[str, Any], how: dict[str, Any], changed: int, limit: int
) -> None:
    model = torch.nn.ParameterList(
        torch.rand(TENSOR_BYTES // 4) for _ in range(TENSORS)
    ).requires_grad_(False)
    state = (
        {"model": model}
        if "trust_version" in how
        else {"model": model, "optimizer": torch.optim.SGD(model)}
    )
    with ckptstore.open(tmp_path / "store", **grouped("background", **options)) as store:
        store.commit_async({"small": torch.arange(1000)}).wait()  # what is imported, and the worker
        store.commit_async(
            state, background=ckptstore.Async(trust_version="trust_version" in how)
        ).wait()
        internals_of(
            store
        ).async_commits.pool._free.clear()  # what staging takes is to be seen again
        for parameter in model[:changed]:
            parameter.uniform_()
        grown = peak_of(lambda: store.commit_async(state, background=ckptstore.Async(**how)).wait())
    print(f"{options} {how}: {grown / MIB:.1f} MiB more, at most {limit / MIB:.0f} wanted")
    assert grown <= limit + SLACK_BYTES


def test_nothing_of_a_commit_lives_on_once_two_more_were_made(tmp_path: Path) -> None:
    seen: list[ref[Pending[Any]]] = []
    with ckptstore.open(tmp_path / "store") as store:
        for step in range(6):
            state = {"t": torch.full((100_000,), float(step))}
            tensor = ref(state["t"])
            pending = store.commit_async(state, step=step)
            seen.append(ref(pending))
            pending.wait()
            # who wakes the waiter has a few lines to go
            while internals_of(store).async_commits._background.tell_if_busy():
                time.sleep(0.001)
            del pending, state
            gc.collect()
            assert (
                tensor() is None
            )  # neither the copy nor the background refers to the caller's memory
        assert [each() is None for each in seen[:-1]] == [True] * 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("how", [{}, {"staging": "lazy"}, {"trust_version": True}], ids=str)
def test_memory_is_flat_over_five_hundred_commits(
    tmp_path: Path, executor: Any, how: dict[str, Any]
) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(4)])
    optimizer = torch.optim.AdamW(model[:2].parameters())
    model[2:].requires_grad_(False)
    with ckptstore.open(
        tmp_path / "store",
        storage=ckptstore.Storage(chunk_bytes=64 << 10),
        background=ckptstore.Async(executor=executor),
    ) as store:
        before = 0
        for step in range(500):
            optimizer.zero_grad()
            model(torch.randn(8, 400)).square().mean().backward()
            optimizer.step()
            store.commit_async(
                {"model": model, "optimizer": optimizer},
                step=step,
                background=ckptstore.Async(**how),
            )
            if step % 50 == 49:
                store.forget(ckptstore.KeepLast(3))
                store.gc(grace_s=0)
            if step == 99:
                gc.collect()
                before = resident_bytes()
        gc.collect()
        grown = resident_bytes() - before
    print(
        f"{executor} {how}: {before / MIB:.0f} MiB after 100 commits, {grown / MIB:+.1f} MiB after "
        "500"
    )
    assert grown < SLACK_BYTES
