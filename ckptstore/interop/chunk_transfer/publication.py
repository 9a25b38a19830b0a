"""Which state is served now, and who is taking it: posted, waited for, withdrawn.

Memory of a state that was withdrawn is given back by the last reader that leaves, never before.
"""

import threading
from collections.abc import Callable

from ckptstore.errors import Conflict
from ckptstore.interop.chunk_transfer.served_state import ServedState

CUTTING_S = 5.0
"""How long a reader whose connection was cut may take to notice."""


class Reader:
    """A connection that takes a state, until it leaves; `cut` ends it. All that a peer opens for
    one transfer have one `transfer`."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut
        self.transfer = ""


class Publication:
    """One place for one offer. Threads share it."""

    def __init__(self) -> None:
        self._offer: ServedState | None = None
        self._leaving: ServedState | None = None
        self._readers: set[Reader] = set()
        self._changed = threading.Condition()

    def post(self, offer: ServedState) -> None:
        """Serve `offer`; nothing is served before."""
        with self._changed:
            assert self._offer is None and not self._readers
            self._offer = offer
            self._changed.notify_all()

    def join(self, reader: Reader, step: int, wait_s: float) -> ServedState | None:
        """What is served as `step`, of which `reader` is a reader from now on; None if nothing is
        served within `wait_s`.

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
        """`reader` reads no more. Idempotent."""
        with self._changed:
            self._readers.discard(reader)
            self._changed.notify_all()

    def withdraw(self, timeout_s: float) -> int:
        """Serve nothing, wait for those who are taking what was served, and after `timeout_s` cut
        them off; returns how many were.

        Raises TimeoutError if a reader whose connection was cut does not end; then its memory is
        not given back.
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
        """What is being withdrawn, for a transfer that has begun."""
        begun = any(other.transfer == reader.transfer for other in self._readers)
        return self._leaving if begun and self._leaving and self._leaving.step == step else None


class OtherStep(Conflict):
    """Another step is served than the one that was asked for."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is served")
        self.step = step
