"""A pytest plugin that runs torch_checkpointing's own tests on a store.

Its source package has them (`pip download --no-binary :all: --no-deps torch_checkpointing==0.1.1`):
`python -m pytest -p tests.trainers.torch_checkpointing_suite -p no:cacheprovider SOURCE/tests`.
Wherever they make a `LocalFileSystemStorageConfig`, they get a store, one for the whole run.
"""

import os
import tempfile
from dataclasses import dataclass
from uuid import uuid4

from torch_checkpointing.storage import filesystem

from ckptstore.plugins.torch_checkpointing import StoreStorageConfig

_STORE = os.environ.setdefault(  # made by the first save; the ranks inherit it
    "CKPTSTORE_TEST_SUITE_STORE",
    os.path.join(tempfile.gettempdir(), f"ckptstore-suite-{uuid4().hex}"),
)


@dataclass
class InStore(StoreStorageConfig):
    """Takes the arguments of the class in whose place it is put; the spawned writer imports it."""

    store: str = _STORE
    use_direct_io: bool = False


def pytest_configure() -> None:
    """Put the store in, before a test module is imported."""
    filesystem.LocalFileSystemStorageConfig = InStore  # type: ignore[misc,unused-ignore]
