"""What fails on one rank while others wait for what it sends: raised when all has been
exchanged."""

from collections.abc import Iterator
from contextlib import contextmanager


class DeferredErrors:
    """Keeps the first error; `settle` raises it."""

    def __init__(self) -> None:
        self.failed: BaseException | None = None

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Whatever is raised within is kept, also an interrupt of this process."""
        try:
            yield
        except BaseException as error:
            self.failed = self.failed or error

    def settle(self) -> None:
        """Raise what was kept."""
        if self.failed:
            raise self.failed
