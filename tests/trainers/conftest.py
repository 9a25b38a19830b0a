"""What tests of trainers share, and what they leave behind is removed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import ckptstore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(autouse=True, scope="module")
def no_process_group_stays() -> Iterator[None]:
    """DeepSpeed makes a process group in the test's process, and keeps it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
