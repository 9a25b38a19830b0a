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
from ckptstore.plugin.checks import OfflineStore
from ckptstore.plugin.handles import StoreHandle, read_config
from ckptstore.plugin.model import StoreId, random_digits
from ckptstore.plugin.storage import Storage, open_storage
from ckptstore.plugin.upkeep import WORKER_THREADS, Spread, Stores
from ckptstore.plugin.work import ThreadPool, each_done, reads_at_once

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Place:
    """Where workers find a store, and which one they must find."""

    url: str
    store: StoreId
    read_only: bool = True

    @classmethod
    def of(cls, store: StoreHandle | OfflineStore, *, read_only: bool = True) -> "Place":
        """The place of an open store. Its URL is the one for people, without credentials."""
        url = store.storage.url
        return cls(url if "://" in url else os.path.abspath(url), store.config.store, read_only)


@dataclass(frozen=True, slots=True)
class Work:
    """A call of `task`, a function of a module, for `item`. Work of one `job` shares what a worker
    has opened; the next job looks at the store anew, which may have been replaced."""

    job: str
    places: Place | tuple[Place, ...]
    task: Callable[[Any, ThreadPool, Any], Any]
    item: Any


def spread_on(executor: Executor, place: Place) -> Spread[Storage]:
    """Carries tasks out that read objects, on the workers of `executor`; raises as `each_done`."""
    return _Spread(executor, place)


def stores_on(executor: Executor, *stores: StoreHandle) -> Spread[Stores]:
    """Carries tasks out that read the first of `stores`, and write to the last."""
    last = len(stores) - 1
    places = (Place.of(store, read_only=i < last) for i, store in enumerate(stores))
    return _Spread(executor, tuple(places))


@dataclass(frozen=True, slots=True)
class _Spread:
    executor: Executor
    places: Place | tuple[Place, ...]

    def __call__(
        self, task: Callable[[Any, ThreadPool, T], R], items: Iterable[T]
    ) -> Generator[tuple[T, R], None, None]:
        job = random_digits(8)
        works = (Work(job, self.places, task, item) for item in items)
        with closing(each_done(self.executor, carry_out, works)) as done:
            for work, result in done:
                yield work.item, result


def carry_out(work: Work) -> Any:
    """Do one piece of work, in a worker. Raises `Unavailable` if it does not reach a store."""
    if isinstance(work.places, Place):
        storage = _storage_at(work.places, work.job, os.getpid())
        with closing(ThreadPool(readers(storage))) as threads:
            return work.task(storage, threads, work.item)
    stores = tuple(_store_at(place, work.job, os.getpid()) for place in work.places)
    with closing(ThreadPool(WORKER_THREADS)) as threads:
        return work.task(stores, threads, work.item)


@lru_cache(2)
def _storage_at(place: Place, job: str, pid: int) -> Storage:
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


@lru_cache(4)
def _store_at(place: Place, job: str, pid: int) -> StoreHandle:
    """A store whose log was read, kept likewise."""
    handle = open_at(place)
    handle.log.replay()
    return handle


def open_at(place: Place) -> StoreHandle:
    """Open the store of a place, in a worker."""
    handle = None
    try:
        handle = StoreHandle(place.url, read_only=place.read_only)
        refuse_another(handle.config.store, place)
    except CkptStoreError as error:
        if handle is not None:
            handle.close()
        raise not_reached(place.url, error) from error
    return handle


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
