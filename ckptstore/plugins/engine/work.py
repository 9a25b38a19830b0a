"""How does a part of a job reach a worker? As plain values: a function's name, where the store is,
and what to do. Credentials never travel; each worker has its own, in its environment.

A worker may reach another store at the same address: another endpoint, another mount. So the work
names the store by its id, and a worker that finds another one refuses.
"""

import os
import platform
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from ckptstore.errors import CkptStoreError, Unavailable
from ckptstore.plugin.handles import StoreHandle, read_config
from ckptstore.plugin.model import StoreId, random_digits
from ckptstore.plugin.storage import Storage, open_storage
from ckptstore.plugin.upkeep import OfflineStore, Spread
from ckptstore.plugin.work import ThreadPool, each_done, reads_at_once

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Place:
    """Where workers find a store, and which one they must find."""

    url: str
    store: StoreId

    @classmethod
    def of(cls, store: StoreHandle | OfflineStore) -> "Place":
        """The place of an open store. Its URL is the one for people, without credentials."""
        url = store.storage.url
        return cls(url if "://" in url else os.path.abspath(url), store.config.store)


@dataclass(frozen=True, slots=True)
class Work:
    """A call of `task`, a function of a module, for `item`. Work of one `job` shares what a worker
    has opened; the next job looks at the store anew, which may have been replaced."""

    job: str
    place: Place
    task: Callable[[Storage, ThreadPool, Any], Any]
    item: Any


def spread_on(executor: Executor, place: Place) -> Spread:
    """Carries tasks out on the workers of `executor`; raises as `each_done`."""

    def spread(
        task: Callable[[Storage, ThreadPool, T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R], None, None]:
        job = random_digits(8)
        works = (Work(job, place, task, item) for item in items)
        with closing(each_done(executor, carry_out, works)) as done:
            for work, result in done:
                yield work.item, result

    return spread


def carry_out(work: Work) -> Any:
    """Do one piece of work, in a worker. Raises `Unavailable` if it does not reach the store."""
    storage = _opened(work.place, work.job, os.getpid())
    with closing(ThreadPool(readers(storage))) as threads:
        return work.task(storage, threads, work.item)


@lru_cache(2)
def _opened(place: Place, job: str, pid: int) -> Storage:
    """The storage of a store, kept for other work of the `job` in the process `pid`."""
    storage = None
    try:
        storage = open_storage(place.url, read_only=True)
        refuse_another(read_config(storage).store, place)
    except CkptStoreError as error:
        if storage is not None:
            storage.close()
        raise not_reached(place.url, error) from error
    return storage


def not_reached(url: str, error: Exception) -> Unavailable:
    """The error of a worker that does not reach what its work is about."""
    return Unavailable(
        f"the worker on {platform.node()} does not reach {url}: {error}; a worker finds it by "
        "its own environment and mounts: give it those, credentials and endpoint included"
    )


def refuse_another(found: StoreId, place: Place) -> None:
    """Raise `Unavailable` unless the store that was found is the one of the work."""
    if found != place.store:
        raise Unavailable(f"wanted the store {place.store}, found {found}")


def readers(storage: Storage) -> int:
    """The threads of one task: it has one processor, and requests to a bucket wait."""
    return reads_at_once(1) if storage.capabilities.slow_requests else 1
