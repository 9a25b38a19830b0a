"""The plugin whose saves go on behind training."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptstore.interop.lightning.checkpoint_io import ALONE_RANKS, StoreCheckpointIO
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.policies import KeepSince, Policy
from ckptstore.plugin.snapshots import PendingCommit
from ckptstore.plugin.stores import background_of

logger = logging.getLogger("ckptstore")


class AsyncStoreCheckpointIO(StoreCheckpointIO):
    """A `StoreCheckpointIO` whose saves return when the state is copied, as `Store.commit_async`
    does: to memory of the host, not on the device.

    The pointer appears when the commit is durable. Removals wait for the saves before them, and are
    left out if one of those failed. A failed save is raised by the next save, removal or load, or
    by `teardown`, which waits for all. Fabric calls no `teardown`: call it after the last save.
    """

    def _begin(self) -> None:
        super()._begin()
        self._threads: ThreadPoolExecutor | None = None
        self._failed: BaseException | None = None
        self._published: CommitId | None = None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._behind(self._remove, path)

    def link(self, path: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        self._behind(super().link, path, link)

    def retain(self, policies: Sequence[Policy], directory: str | os.PathLike[str]) -> None:
        self._behind(self._retain, policies, directory)

    def _retain(self, policies: Sequence[Policy], directory: str | os.PathLike[str]) -> None:
        # Commits that have no pointer yet stay: one that was forgotten first would get one after.
        if self._published is not None:
            super().retain([*policies, KeepSince(self._published)], directory)

    def teardown(self) -> None:
        self._drain()
        super().teardown()
        self._raise_failed()

    def _save(self, state: dict[str, Any], place: str, label: dict[str, Any]) -> None:
        self._raise_failed()
        pending = self.store.commit_async(
            state, **label, allow_pickle=self._allow_pickle, ranks=ALONE_RANKS
        )
        self._behind(self._publish_when_durable, place, pending)
        if os.path.basename(place).startswith("hpc_ckpt"):  # the job is about to be requeued
            self._settle()

    def _publish_when_durable(self, place: str, pending: PendingCommit) -> None:
        if not background_of(self.store).goes_on:
            self._publish(place, pending.wait())
        elif not self._publish_or_go_on(place, pending, bounded=False):
            return
        self._published = pending.wait().id

    def _settle(self) -> None:
        self._drain()
        self._raise_failed()

    def _behind(self, act: Callable[..., object], *args: Any) -> None:
        """Do this after what was handed in before, unless some of that fails."""
        self._raise_failed()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="ckptstore-lightning")
        self._threads.submit(self._do, act, args)

    def _do(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._failed is not None:
            return
        if self._lacking is not None and act != self._publish_when_durable:
            return  # what was to take the place of a removed checkpoint is not there
        try:
            act(*args)
        except BaseException as error:
            logger.error("an asynchronous save or removal failed: %s", error)
            self._failed = error

    def _drain(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)

    def _raise_failed(self) -> None:
        if self._failed is not None:
            self._drain()  # what waits behind the failure is left out before it is forgotten
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
