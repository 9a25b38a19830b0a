"""Ctrl-C wherever Python looks for one: as a function of ours begins, or as one in C has
returned."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupting(files: frozenset[str], after: Sequence[int]) -> Iterator[None]:
    """Within the block this thread is interrupted in code of `files`, after so many of the places
    where Python looks, and again after so many more."""
    left = list(after)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left[0] -= 1
            if not left[0]:
                left.pop(0)
                if not left:
                    sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    if left:
        sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
