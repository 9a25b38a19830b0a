"""Scripts find TorchSnapshot's names in its modules, and its errors for missing keys."""

from datetime import timedelta
from importlib import import_module
from mmap import mmap
from pathlib import Path
from time import sleep

import pytest

import ckptstore
from ckptstore.interop import torchsnapshot
from ckptstore.interop.torchsnapshot import Snapshot, StateDict, rss_profiler

NAMES = {
    "": ["PendingSnapshot", "RNGState", "Snapshot", "StateDict", "Stateful", "__version__"],
    "knobs": [
        "override_is_batching_disabled",
        "override_max_chunk_size_bytes",
        "override_max_shard_size_bytes",
        "override_slab_size_threshold_bytes",
    ],
    "manifest": ["Manifest", "SnapshotMetadata", "is_replicated"],
    "rng_state": ["RNGState"],
    "rss_profiler": ["measure_rss_deltas"],
    "snapshot": ["PendingSnapshot", "Snapshot"],
    "state_dict": ["StateDict"],
    "stateful": ["AppState", "Stateful"],
    "tricks": ["DistributedDataParallelAdapter", "FSDPOptimizerAdapter"],
    "tricks.ddp": ["DistributedDataParallelAdapter"],
    "tricks.fsdp": ["FSDPOptimizerAdapter"],
}


@pytest.mark.parametrize("module", NAMES)
def test_what_scripts_import_is_where_they_look_for_it(module: str) -> None:
    found = import_module(f"ckptstore.interop.torchsnapshot.{module}".rstrip("."))
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    for name in NAMES[module]:
        if hasattr(torchsnapshot, name):
            assert getattr(found, name) is getattr(torchsnapshot, name), (
                "one class, wherever it is imported from"
            )


def test_a_key_that_the_snapshot_lacks_is_an_assertion_that_failed_as_in_torchsnapshot(
    tmp_path: Path,
) -> None:
    snapshot = Snapshot.take(str(tmp_path / "1"), {"s": StateDict(a=1)})
    with pytest.raises(
        AssertionError, match="'other' is absent in both manifest and flattened"
    ) as missing:
        snapshot.get_state_dict_for_key("other")
    assert isinstance(missing.value, ckptstore.NotFound)
    with pytest.raises(AssertionError, match="other: wanted by the target") as unwanted:
        snapshot.restore({"other": StateDict(a=0)})
    assert isinstance(unwanted.value, ckptstore.InvalidInput)
    with pytest.raises(RuntimeError, match="nothing at"):
        snapshot.read_object("0/s/b")


def test_a_state_is_replicated_from_the_first_rank(tmp_path: Path) -> None:
    snapshot = Snapshot.take(str(tmp_path / "1"), {"s": StateDict(a=1)})
    assert snapshot.get_state_dict_for_key("s", replicate_from_rank0=True) == {"a": 1}


def test_the_growth_of_memory_is_measured() -> None:
    deltas: list[int] = []
    with (
        rss_profiler.measure_rss_deltas(deltas, interval=timedelta(milliseconds=5)),
        mmap(-1, 16 << 20) as fresh,  # an allocator might hand out pages that it kept
    ):
        fresh.write(bytes(16 << 20))
        seen = len(deltas)
        while len(deltas) < seen + 3:
            sleep(0.001)
    assert max(deltas) > 8 << 20
