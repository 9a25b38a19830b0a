import pytest

from ckptstore.errors import Unavailable
from ckptstore.repository.thread_pool import Scratch


def test_memory_that_is_not_to_be_had_is_an_error_of_ours() -> None:
    with pytest.raises(Unavailable, match=r"memory to work in .* and repeat"):
        Scratch().take(1 << 60)
