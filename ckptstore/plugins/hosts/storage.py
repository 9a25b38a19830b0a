"""How do objects that lie on several hosts make one storage?

A pack lies on the host that wrote it and on its takers, and is finished when all of these have it.
Session files lie on their own host. Entries, documents and the configuration lie on every host;
their name is taken on the first host, then on the others in order. So what the last host has, all
have. What is derived lies on the host that made it, and nobody else asks for it.

**An entry is acknowledged when all hosts of the job have it.** Otherwise one lost host could take
it along. So a create whose name was taken brings what is there to all hosts before it says so, and
a reader brings an entry to all hosts before it acts on it. `tests/hosts/model.py` explores this.

An absent object is `NotFound` only if every host has said so, or the first for an entry; if one
does not answer, it is `Unavailable`.
"""

import heapq
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    Unavailable,
)
from ckptstore.plugin.catalogs import decode_entry
from ckptstore.plugin.encoding import decode_config, decode_document
from ckptstore.plugin.model import CONFIG_KEY, MIB, SessionId, log_key, parse_commit_id
from ckptstore.plugin.storage import (
    COPY,
    RESERVE_KEY,
    Capabilities,
    FileRange,
    OpenFile,
    Storage,
    Writer,
    open_storage,
)
from ckptstore.plugins.hosts.agent import ENTRY
from ckptstore.plugins.hosts.members import InUse, Members, in_job, read_members
from ckptstore.plugins.hosts.peer import Peer, Upload

logger = logging.getLogger("ckptstore")

SCHEME = "hosts://"
PACK_BYTES = 64 * MIB

_EVERYWHERE = re.compile(
    rf"{re.escape(CONFIG_KEY)}|{RESERVE_KEY}|log/\d{{12}}|(commits|signatures)/.*"
)
_DERIVED = re.compile(r"log/\D.*|footers/.*|index/.*")
_DOCUMENT = re.compile(r"commits/.*-([0-9a-f]{64})")
_SESSIONS = "sessions/"

T = TypeVar("T")


class _Own:
    """The objects of this host, which only its present job changes."""

    def __init__(self, root: Path, job: str, storage: Storage) -> None:
        self._root, self._job, self._storage = root, job, storage
        self.read, self.read_into, self.read_tail = (
            storage.read,
            storage.read_into,
            storage.read_tail,
        )
        self.size, self.list, self.name = storage.size, storage.list, str(root)

    def put(self, key: str, data: bytes | memoryview) -> None:
        with in_job(self._root, self._job):
            self._storage.put(key, data)

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        with in_job(self._root, self._job):
            return self._storage.put_new(key, data)

    def delete(self, key: str) -> None:
        with in_job(self._root, self._job):
            self._storage.delete(key)


Host: TypeAlias = _Own | Peer


class HostsStorage:
    """`Storage` on the disks of the hosts of a job, of which `root` has this one's objects."""

    deadline_s = 30.0

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self._members = members = read_members(root)
        if not members.joined:
            raise Unavailable(f"the hosts of {root} have not joined yet; start the job again")
        self._local = local = open_storage(root, read_only=read_only)
        self._own = _Own(root, members.job, local)
        self.url = f"{SCHEME}{root}"
        self.capabilities = Capabilities(
            exclusive_create=True,
            can_fill_up=local.capabilities.can_fill_up,
            pack_bytes=PACK_BYTES,
            copies=True,
        )
        self._peers = peers_of(members)
        self._hosts: Sequence[Host] = [
            self._own if i == members.me else self._peers[i] for i in range(len(members.names))
        ]
        self._whole = members.head
        self._where: dict[str, Peer] = {}
        self._said: set[str] = set()
        self._in_use = InUse(root)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if not _EVERYWHERE.fullmatch(key) or start or stop is not None:
            return self._find(key, lambda host, key: host.read(key, start, stop))
        try:
            data = self._find(key, _read_intact)
        except Corrupt:
            return self._find(key, lambda host, key: host.read(key))  # the caller finds it, too
        if (entry := ENTRY.fullmatch(key)) and int(entry[1]) > self._whole:
            if self._hosts[-1].size(key) is None:
                self._spread(key, data)
            self._whole = int(entry[1])
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._find(key, lambda host, key: host.read_into(key, offset, buffers))

    def open_file(self, key: str) -> OpenFile:
        raise InvalidInput(
            f"some packs of {self.url} lie on other hosts, so none is mapped into memory: use read "
            "instead"
        )

    def is_cached(self, key: str, offset: int) -> bool:
        return self._local.is_cached(key, offset)

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        return self._find(key, lambda host, key: host.read_tail(key, nbytes))

    def read_ahead(self, sizes: Mapping[str, int]) -> None:
        """Nothing: most of what is read lies here."""

    def size(self, key: str) -> int | None:
        def known(host: Host, key: str) -> int:
            if (found := host.size(key)) is None:
                raise NotFound(key)
            return found

        try:
            return self._find(key, known)
        except NotFound:
            return None

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        if _DERIVED.fullmatch(key) or key.startswith(_SESSIONS):
            self._local.put(key, data, durable=durable)
            return
        for host in self._homes(key):
            host.put(key, data)

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        if _DERIVED.fullmatch(key):
            return self._local.put_new(key, data)
        first, *others = self._homes(key)
        self._fill(first, key)
        created = first.put_new(key, data)
        if others:
            there = bytes(data) if created else first.read(key)
            try:
                self._spread(key, there)
            except NoSpace as error:  # callers take it for "not created", but the first host has it
                raise Unavailable(f"{key} is not on all hosts yet: {error}") from error
        return created

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> Writer:
        own = self._local.create(key, session=session, unbuffered=unbuffered, aside=aside)
        takers = [host for host in self._homes(key) if isinstance(host, Peer)]
        return _CopyingWriter(
            own,
            [taker.upload(key) for taker in takers],
            lambda: file_of(self._local, key),
            lambda: self._withdraw(key),
        )

    def sync_dirs(self, keys: Iterable[str]) -> None:
        self._local.sync_dirs(keys)

    def delete(self, key: str) -> None:
        if _DERIVED.fullmatch(key):
            self._local.delete(key)
        else:
            self._own.delete(key)
            for peer in self._peers.values():
                peer.delete(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        last = None
        own = [*self._own.list(prefix)]
        others = [
            [row for row in peer.list(prefix) if not _DERIVED.fullmatch(row[0])]
            for peer in self._peers.values()
        ]
        for key, size in heapq.merge(own, *others):
            if key != last:
                yield key, size
            last = key

    def __del__(self) -> None:
        if hasattr(self, "_in_use"):
            self._release()

    def close(self) -> None:
        self._local.close()
        self._release()

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._in_use.close()

    def _find(self, key: str, act: Callable[[Host, str], T]) -> T:
        """What `act` does on the first host that has an object, intact. `key` with `COPY` is the
        object on another host than without."""
        plain = key.removesuffix(COPY)
        hosts = self._likely(plain)
        if plain != key:
            is_here = self._own.size(plain) is not None
            read_before = self._own if is_here else self._where.get(plain)
            hosts = [host for host in hosts if host is not read_before]
        failed: CkptStoreError | None = None
        for host in hosts:
            try:
                found = act(host, plain)
            except NotFound:
                continue
            except (Unavailable, Corrupt) as error:
                failed = failed or error
                continue
            if plain != key and plain not in self._said:
                self._said.add(plain)
                logger.warning(
                    "%s is damaged on one host: its copy on %s is read", plain, host.name
                )
            elif plain == key and isinstance(host, Peer):
                self._where[plain] = host
            return found
        if isinstance(failed, Unavailable):
            raise Unavailable(f"{plain} is on no host that answers: {failed}") from failed
        if failed:
            raise failed
        raise NotFound(f"{plain} is on no host of {self.url}")

    def _likely(self, key: str) -> Sequence[Host]:
        """The hosts to ask, the likeliest first: this one; of the others, the first for entries."""
        if _DERIVED.fullmatch(key):
            return [self._own]
        if ENTRY.fullmatch(key):
            return list(dict.fromkeys([self._own, *self._hosts]))
        me, count = self._members.me, len(self._hosts)
        others = [self._hosts[(me + i) % count] for i in range(1, count)]
        first = self._where.get(key)
        likely = [first, *(host for host in others if host is not first)] if first else others
        return [self._own, *likely]

    def _homes(self, key: str) -> Sequence[Host]:
        """The hosts on which an object lies, in the order in which they get it."""
        if _EVERYWHERE.fullmatch(key):
            return self._hosts
        if key.startswith(_SESSIONS):
            return [self._own]
        return [self._own, *(self._peers[i] for i in self._members.takers)]

    def _spread(self, key: str, data: bytes) -> None:
        """Bring an object, and the entries before it, to its hosts in order. Raises `Conflict` if
        one has other bytes under its name."""
        for host in self._homes(key):
            try:
                self._fill(host, key)
                created = host.put_new(key, data)
            except NoSpace:
                if not ENTRY.fullmatch(key):
                    raise
                host.delete(RESERVE_KEY)  # a host before this one has the entry, so it is written
                self._fill(host, key)
                created = host.put_new(key, data)
            if not created and host.read(key) != data:
                raise Conflict(f"{key} has other bytes on host {host.name}; start the job again")

    def _fill(self, host: Host, key: str) -> None:
        """Give a host the entries before `key` that it lacks."""
        entry = ENTRY.fullmatch(key)
        first = last = int(entry[1]) if entry else 1
        while first > 1 and host.size(log_key(first - 1)) is None:
            first -= 1
        for n in range(first, last):
            host.put_new(log_key(n), self._find(log_key(n), _read_intact))

    def _withdraw(self, key: str) -> None:
        """Delete an object that not all of its hosts could take, as far as they answer."""
        for host in self._homes(key):
            with suppress(CkptStoreError):
                host.delete(key)


class _CopyingWriter:
    """A writer whose object goes to its takers as it is written. It is finished when all have it;
    otherwise it is discarded."""

    def __init__(
        self,
        own: Writer,
        uploads: Sequence[Upload],
        whole: Callable[[], FileRange],
        withdraw: Callable[[], None],
    ) -> None:
        """`whole` is the finished object of this host."""
        self._own, self._uploads, self._whole, self._withdraw = own, uploads, whole, withdraw

    def append(self, buffers: Sequence[memoryview]) -> None:
        self._own.append(buffers)
        for upload in self._uploads:
            upload.append(buffers)

    def finish(self) -> bool:
        created = False
        try:
            created = self._own.finish()
            for upload in self._uploads:
                upload.finish(self._whole())
        except BaseException:
            self.discard()
            if created:
                self._withdraw()
            raise
        return created

    def discard(self) -> None:
        self._own.discard()
        for upload in self._uploads:
            upload.discard()


def _read_intact(host: Host, key: str) -> bytes:
    """An object. Raises as `check_intact`."""
    data = host.read(key)
    check_intact(key, data)
    return data


def check_intact(key: str, data: bytes) -> None:
    """Raise `Corrupt` for a damaged entry, document or configuration; its own hash tells."""
    if ENTRY.fullmatch(key):
        decode_entry(data)
    elif key == CONFIG_KEY:
        try:
            decode_config(data, "this host")
        except InvalidInput as error:
            raise Corrupt(str(error)) from error
    elif document := _DOCUMENT.fullmatch(key):
        decode_document(data, parse_commit_id(document[1]))


def file_of(storage: Storage, key: str) -> FileRange:
    """The whole of an object of this host."""
    return FileRange(key, storage.open_file(key), 0, storage.size(key) or 0)


def peers_of(members: Members) -> dict[int, Peer]:
    """The agents of the other hosts, by number."""
    return {
        i: Peer(name, members.agents[i], members.job)
        for i, name in enumerate(members.names)
        if i != members.me
    }


def open_storage_of(url: str, *, read_only: bool = False) -> HostsStorage:
    """The storage that `hosts://DIRECTORY` names. Raises `NotFound` if this host has joined no
    job."""
    return HostsStorage(Path(url.removeprefix(SCHEME)), read_only=read_only)
