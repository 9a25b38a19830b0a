"""Memory and threads that a store works with."""

import pytest

from ckptstore.errors import Unavailable
from ckptstore.repository.thread_pool import Scratch


def test_an_allocation_that_fails_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"cannot allocate .* and repeat"):
        Scratch().take(1 << 60)
