"""The size of a log entry does not depend on the number of commits before it."""

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.core.ids import log_key
from ckptstore.log.entries import Commit, decode_entry

DIGITS = 32
"""What the numbers in an entry may grow by: steps, packs, bytes and the entry's own."""


def sizes_of_commits(place: Path, commits: int, gc_every: int) -> dict[int, int]:
    """The bytes of the log's entry for each of `commits` small commits, whose chunks lie in the
    oldest pack and in many new ones."""
    state = {f"layer{i}": torch.full((300,), float(i)) for i in range(gc_every // 2)}
    state["frozen"] = torch.ones(200_000)
    sizes, n = {}, 0
    with ckptstore.open(place) as store:
        for step in range(1, commits + 1):
            state[f"layer{step % (gc_every // 2)}"] += 1
            store.commit({"model": state}, step=step)
            while (entry := place / log_key(n + 1)).exists():
                n += 1
                data = entry.read_bytes()
                if isinstance(decode_entry(data).body, Commit):
                    sizes[step] = len(data)
            if step % gc_every == 0:
                store.gc(grace_s=0)
    return sizes


def check_flat(sizes: dict[int, int], early: int) -> None:
    """The last `early` entries are not larger than the first ones that relied on as many packs."""
    warm = max(size for step, size in sizes.items() if step <= early)
    late = max(size for step, size in sizes.items() if step > len(sizes) - early)
    assert late <= warm + DIGITS, f"entries took up to {warm} bytes at first and {late} in the end"


def test_entries_do_not_grow_with_the_number_of_commits(tmp_path: Path) -> None:
    check_flat(sizes_of_commits(tmp_path / "store", 160, 20), 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_entries_do_not_grow_in_ten_thousand_commits(tmp_path: Path) -> None:
    sizes = sizes_of_commits(tmp_path / "store", 10_000, 100)
    log_bytes = sum(path.stat().st_size for path in (tmp_path / "store" / "log").glob("0*"))
    print(
        ", ".join(f"commit {step:,}: {sizes[step]} bytes" for step in (100, 1_000, 10_000)),
        f"the log: {log_bytes:,} bytes",
    )
    check_flat(sizes, 200)
