"""Where a log's entries lie: what any such place does, and the usual one, objects in the store's `log/`."""

import logging
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ckptstore.core.ids import log_key
from ckptstore.core.places import is_network_filesystem
from ckptstore.errors import NotFound, ReadOnly
from ckptstore.history.entries import Entry
from ckptstore.objects.backend import Backend

_READ_AHEAD = 32

_logger = logging.getLogger("ckptstore")


class LogPlace(Protocol):
    """Entries by number, each created once and never changed. One thread at a time."""

    @property
    def is_local(self) -> bool:
        """Whether it is a disk of this host, which does not come back by itself as a network does."""

    def read(self, n: int) -> bytes | None:
        """The bytes of entry `n`, None if there is none."""

    def behind(self, n: int) -> Iterator[bytes]:
        """The bytes of the entries behind `n`, up to the first that is not there."""

    def has(self, n: int) -> bool:
        """Whether there is an entry `n`; one look-up."""

    def create(self, entry: Entry, data: bytes) -> bool:
        """Create `entry`, whose bytes are `data`, durably; False if its number is taken.

        After `Unavailable` nobody knows, and after `NoSpace` it is not there.
        """

    def settle(self, n: int) -> None:
        """Make entry `n`, which was found there, as durable as `create` would have."""

    def turn(self) -> AbstractContextManager[None]:
        """Within, others who append wait, where the place can make them. What holds the log together does not depend on it."""

    def refresh(self) -> None:
        """Look anew from here on at what was not there."""


class LogFiles:
    """The log in the store itself."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def is_local(self) -> bool:
        root = self._backend.durable_root
        return root is not None and not is_network_filesystem(root)

    def read(self, n: int) -> bytes | None:
        try:
            return self._backend.read(log_key(n))
        except NotFound:
            return None

    def behind(self, n: int) -> Iterator[bytes]:
        """From a bucket more and more of them at a time."""
        if self._backend.durable_root is not None:
            while (data := self.read(n := n + 1)) is not None:
                yield data
            return
        if (data := self.read(n + 1)) is None:
            return
        yield data
        with ThreadPoolExecutor(_READ_AHEAD) as pool:
            n, batch = n + 1, 2
            while True:
                for data in pool.map(self.read, range(n + 1, n + 1 + batch)):
                    if data is None:
                        return
                    yield data
                n, batch = n + batch, min(2 * batch, _READ_AHEAD)

    def has(self, n: int) -> bool:
        return self._backend.size(log_key(n)) is not None

    def create(self, entry: Entry, data: bytes) -> bool:
        return self._backend.put_new(log_key(entry.n), data)

    def settle(self, n: int) -> None:
        self._backend.sync_dirs((log_key(n),))

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refresh(self) -> None:
        """A change in `log/` by this host makes an NFS client drop what it cached of the directory, names that were absent included."""
        scratch = f"log/scratch-{secrets.token_hex(12)}"
        try:
            self._backend.put(scratch, b"", durable=False)
            self._backend.delete(scratch)
        except ReadOnly:
            _logger.debug("%s is read-only: names cached as absent expire by themselves", self._backend.url)
