"""Stores in every kind of place, and hosts that open them, each with its own cache directory."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from ckptstore.store import Store
from tests.support.grouped import grouped
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.s3 import S3Server, new_url

CHUNK_BYTES = 1 << 16
KINDS = ("local", "memory", "bucket", "local and database", "bucket and database")
WITHOUT_SERVER = KINDS[:2]


@dataclass(frozen=True)
class Site:
    """A store's place, and what is needed to get there."""

    place: str
    options: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """The directory that it is, unless it is a bucket."""
        return None if "://" in self.place else Path(self.place)

    def open(self, host: Path | None = None, **settings: Any) -> Store:
        """Open it as the host whose cache directory is `host`, or as this one."""
        with on(host):
            flat = {"chunk_bytes": CHUNK_BYTES, **self.more, **settings}
            return ckptstore.open(self.place, **grouped("storage", options=self.options, **flat))

    def as_storage(self) -> ckptstore.Storage:
        """What `ckptstore` needs to get there."""
        return ckptstore.Storage(options=self.options, **self.more)

    @contextmanager
    def opened(self, host: Path | None = None) -> Iterator[StoreHandle]:
        """Its parts, as that host sees them."""
        with on(host):
            handle = self.handle()
            try:
                yield handle
            finally:
                handle.close()

    def handle(self) -> StoreHandle:
        """Its parts, to be closed by the caller."""
        return StoreHandle(
            self.place,
            storage_options=None if self.options is None else dict(self.options),
            **self.more,
        )

    def storage(self) -> Storage:
        """Its objects, whatever they are."""
        return open_storage(
            self.place, storage_options=None if self.options is None else dict(self.options)
        )


@dataclass(frozen=True)
class Sites:
    """Makes places of one kind for stores, each unused."""

    kind: str
    folder: Path
    s3: S3Server | None
    postgres: PostgresServer | None

    def new(self) -> Site:
        more = {"index": self.postgres.new_url()} if self.postgres else {}
        if self.s3:
            return Site(new_url(), self.s3.options(), more)
        name = secrets.token_hex(8)
        return Site(
            f"memory://{name}" if self.kind == "memory" else str(self.folder / name / "store"),
            None,
            more,
        )

    def copied(self, site: Site) -> Site:
        """A place with the same store as `site`, which nobody has open."""
        copy = self.new()
        if self.postgres:
            copy = replace(copy, more={"index": self.postgres.copied_url(str(site.more["index"]))})
        source, target = site.storage(), copy.storage()
        for key, _ in source.list(""):
            target.put(key, source.read(key), durable=False)
        return copy


def kinds(*at_first: str, long: bool = False) -> list[Any]:
    """Parameters for the fixture `sites`: `make test` has a time limit and takes the kinds
    `at_first`, `make soak` the others, `make test-real` all that need a server, unless it would
    take `long`."""
    if "CKPTSTORE_TEST_S3" in os.environ:
        at_first = () if long else KINDS[len(WITHOUT_SERVER) :]
    return [
        kind if kind in at_first else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS
    ]


def sites_of(request: pytest.FixtureRequest, folder: Path) -> Sites:
    """What a fixture with `kinds` as its parameters returns."""
    kind: str = request.param
    s3 = request.getfixturevalue("s3") if "bucket" in kind else None
    return Sites(
        kind, folder, s3, request.getfixturevalue("postgres") if "database" in kind else None
    )


@contextmanager
def on(host: Path | None) -> Iterator[None]:
    """Within, this process keeps its caches where `host` does."""
    if host is None:
        yield
        return
    before = os.environ.get("CKPTSTORE_CACHE")
    os.environ["CKPTSTORE_CACHE"] = str(host)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CKPTSTORE_CACHE"]
        else:
            os.environ["CKPTSTORE_CACHE"] = before
