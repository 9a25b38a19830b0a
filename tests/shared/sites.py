"""Where a shared store lies, and the hosts that open it: each has a cache directory of its own."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.engine.opening import Opening
from ckptstore.store import Store

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Site:
    """A store's place, and what is needed to get there."""

    place: str
    options: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def open(self, host: Path, **settings: Any) -> Store:
        """Open it as the host whose cache directory is `host`."""
        with on(host):
            return ckptstore.open(self.place, storage_options=self.options, **{"chunk_bytes": CHUNK_BYTES, **self.more, **settings})

    @contextmanager
    def opened(self, host: Path) -> Iterator[Opening]:
        """Its parts, as that host sees them."""
        with on(host):
            opening = Opening(self.place, storage_options=None if self.options is None else dict(self.options), **self.more)
            try:
                yield opening
            finally:
                opening.close()


@contextmanager
def on(host: Path) -> Iterator[None]:
    """Within, this process keeps its caches where `host` does."""
    before = os.environ.get("CKPTSTORE_CACHE")
    os.environ["CKPTSTORE_CACHE"] = str(host)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CKPTSTORE_CACHE"]
        else:
            os.environ["CKPTSTORE_CACHE"] = before
