"""Which state is served now, and which peers are taking it?

The memory of a withdrawn state is freed when its last reader leaves, never before.
"""

import threading
from collections.abc import Callable

from ckptstore.errors import Conflict
from ckptstore.interop.chunk_transfer.served_state import ServedState

CUTTING_S = 5.0
"""How long a disconnected reader may take to notice."""


class Reader:
    """A connection that reads a state; `cut` ends it. All connections of a peer for one transfer
    share `transfer`.
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut
        self.transfer = ""


class Publication:
    """Holds at most one offer. Thread-safe."""

    def __init__(self) -> None:
        self._offer: ServedState | None = None
        self._leaving: ServedState | None = None
        self._readers: set[Reader] = set()
        self._changed = threading.Condition()

    def post(self, offer: ServedState) -> None:
        """Serve `offer`; no other may be served now."""
        with self._changed:
            assert self._offer is None and not self._readers
            self._offer = offer
            self._changed.notify_all()

    def join(self, reader: Reader, step: int, wait_s: float) -> ServedState | None:
        """The offer for `step`, with `reader` registered; None if none is served within `wait_s`.

        Raises `OtherStep` if another step is served.
        """
        with self._changed:
            offer = self._begun(reader, step)
            if offer is None and self._changed.wait_for(lambda: self._offer is not None, wait_s):
                offer = self._offer
            if offer is None:
                return None
            if offer.step != step:
                raise OtherStep(offer.step)
            self._readers.add(reader)
            return offer

    def leave(self, reader: Reader) -> None:
        """Unregister `reader`. Idempotent."""
        with self._changed:
            self._readers.discard(reader)
            self._changed.notify_all()

    def withdraw(self, timeout_s: float) -> int:
        """Stop serving, wait for readers, and disconnect those left after `timeout_s`; returns
        their number.

        Raises TimeoutError if a disconnected reader does not end; then its memory is not freed.
        """
        with self._changed:
            self._leaving, self._offer = self._offer or self._leaving, None
            if self._leaving is None:
                return 0
            self._changed.wait_for(lambda: not self._readers, timeout_s)
            late = len(self._readers)
            for reader in self._readers:
                reader.cut()
            if not self._changed.wait_for(lambda: not self._readers, CUTTING_S):
                raise TimeoutError(
                    f"timed out: {len(self._readers)} peers still take a state {CUTTING_S:.0f} s "
                    "after they were cut off"
                )
            if self._leaving:
                self._leaving.close()
            self._leaving = None
            return late

    def _begun(self, reader: Reader, step: int) -> ServedState | None:
        """The offer being withdrawn, for a transfer that has already begun."""
        begun = any(other.transfer == reader.transfer for other in self._readers)
        return self._leaving if begun and self._leaving and self._leaving.step == step else None


class OtherStep(Conflict):
    """Another step is served than the requested one."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is served")
        self.step = step
