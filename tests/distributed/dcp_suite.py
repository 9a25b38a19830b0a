"""A pytest plugin that runs DCP's own tests on a store.

torch's source has them in `test/distributed/checkpoint`, and its wheels have what they import:
`python -m pytest -p tests.distributed.dcp_suite -p no:cacheprovider FOLDER`.
Wherever they make a `FileSystemWriter` or `FileSystemReader`, or name a path, they get a store, one
for the whole run: all of them run within a `redirect`, also the ranks that they spawn.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

from torch.testing._internal.common_distributed import MultiProcessTestCase

from ckptstore.interop.dcp import redirect

_STORE = os.environ.setdefault(  # made by the first save; the ranks inherit it
    "CKPTSTORE_TEST_SUITE_STORE",
    os.path.join(tempfile.gettempdir(), f"ckptstore-suite-{uuid4().hex}"),
)
_until_the_end = ExitStack()
_start_processes = MultiProcessTestCase._start_processes


def _within(target: Callable[..., None], *args: Any, **options: Any) -> None:
    """What a rank does, in a process of its own."""
    with redirect(_STORE, allow_pickle=True):
        target(*args, **options)


def _start(case: MultiProcessTestCase, process: Callable[..., Any]) -> None:
    def within(*, target: Callable[..., None], args: tuple[Any, ...], **options: Any) -> Any:
        return process(target=_within, args=(target, *args), **options)

    _start_processes(case, within)


def pytest_configure() -> None:
    """Enter the block until the process ends."""
    MultiProcessTestCase._start_processes = _start  # type: ignore[method-assign]
    _until_the_end.enter_context(redirect(_STORE, allow_pickle=True))
