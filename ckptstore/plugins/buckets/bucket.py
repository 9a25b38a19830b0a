"""How do objects lie in a bucket, or in memory?

A bucket shows an object whole and durably once its upload is acknowledged, so no fsync and no
temporary names are needed. An incomplete upload is listed as a temporary file,
`tmp/<session>-…`, and deleting that aborts it: gc treats both alike.

One of two clients sends the requests: obstore, or fsspec, which needs nothing else. This file
has what does not depend on the client: the contract, the deadline until which a request is
repeated, and the errors.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from os import getpid
from typing import Any, TypeAlias, TypeVar

from ckptstore.errors import (
    CkptStoreError,
    Corrupt,
    InvalidInput,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.plugin.model import SessionId, new_session_id
from ckptstore.plugin.storages import (
    PART_BYTES,
    Capabilities,
    OpenFile,
    as_bytes,
    check_key,
    check_size,
    check_writable,
    name_taken,
    put_finished,
)
from ckptstore.plugin.text import redact, secrets_of, without
from ckptstore.plugin.work import Pool, forks, pauses
from ckptstore.plugins.buckets.fsspec_client import FsspecClient
from ckptstore.plugins.buckets.obstore_client import (
    S3_OPTIONS,
    STORES,
    ObstoreClient,
    ObstoreUpload,
    usable,
)
from ckptstore.plugins.buckets.s3_upload import S3Upload

DEADLINE_S = 60.0
SHORT_DEADLINE_S = 5.0
"""After a deadline passed in vain, until a request is answered: cleaning up after a failure must
not wait for each object."""

_AHEAD_AT_ONCE = 32
"""So many objects are read ahead side by side."""

_CLIENTS = ("obstore", "fsspec")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_UPLOADS = "tmp/"
_SESSION_OF = re.compile(r".*/(?P<session>[0-9a-f]{24})-[0-9]+-[0-9]+(?:\.2)?")
_NOBODY = "0" * 24
"""The session of uploads that name none: they go when nobody has moved them for long."""

_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")

_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
"""obstore's errors for answers 403 and 401; fsspec has `PermissionError`."""

_random = secrets.SystemRandom()
"""Of the system: what a trainer that has seeded `random` draws next does not depend on what the
network did."""

T = TypeVar("T")


Client: TypeAlias = FsspecClient | ObstoreClient


class _Ahead:
    """An object that was read ahead. Threads may share it."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._taken: list[tuple[int, int]] = []
        self._has_tail = True
        self._lock = forks.lock()

    def take(self, start: int, stop: int | None) -> memoryview | None:
        """The bytes `start:stop`; None if some of them were taken before."""
        stop = len(self.data) if stop is None else stop
        with self._lock:
            if any(start < end and begin < stop for begin, end in self._taken):
                return None
            self._taken.append((start, stop))
        return self.data[start:stop]

    def tail(self, nbytes: int) -> memoryview | None:
        """The last bytes, which do not count as taken; None the second time."""
        with self._lock:
            has_tail, self._has_tail = self._has_tail, False
        return self.data[-nbytes:] if has_tail else None


class BucketStorage:
    """`Storage` in a bucket, or in memory."""

    capabilities = Capabilities()

    def __init__(
        self, url: str, *, read_only: bool = False, storage_options: dict[str, Any] | None = None
    ) -> None:
        url, _, query = url.partition("?")
        self._options = dict(storage_options or {})
        client = _client(query, self._options.pop("client", None))
        self.deadline_s = float(self._options.pop("deadline_s", DEADLINE_S))
        scheme = _check_url(url)
        self.is_s3 = STORES.get(scheme) == "S3Store"
        followed = S3_OPTIONS if self.is_s3 else frozenset[str]()
        self._prefers_obstore = scheme in STORES and bool(
            client == "obstore"
            or (client is None and find_spec("obstore") and self._options.keys() <= followed)
        )
        self.url = redact(url.rstrip("/"))
        self._read_only = read_only
        self._secrets = secrets_of(self._options)
        self._clients: dict[tuple[int, float], Client] = {}
        self._ahead: dict[str, _Ahead] = {}
        self.in_vain = False
        self._tried_out = scheme == "memory" or self.is_s3 or self._prefers_obstore

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._get(key, start, stop)
        check_size(key, start + len(data), self.url)
        return bytes(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        views = [as_bytes(buffer) for buffer in buffers if buffer.nbytes]
        wanted = sum(view.nbytes for view in views)
        data = memoryview(self._get(key, offset, offset + max(wanted, 1)))
        if data.nbytes < wanted:
            raise Corrupt(
                f"{key} in {self.url} is too short: wanted {wanted} bytes from {offset} on, got "
                f"{data.nbytes}; run `ckptstore fsck`"
            )
        for view in views:
            view[:] = data[: view.nbytes]
            data = data[view.nbytes :]

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        check_key(key)
        if (ahead := self._ahead.get(key)) and (found := ahead.tail(nbytes)) is not None:
            return bytes(found), len(ahead.data)

        def tail(client: Client) -> tuple[Any, int]:
            try:
                return client.tail(key, nbytes)
            except Exception as error:  # also of an empty object, or a service without tails
                if _is_final(client, error):
                    raise
                size = client.size(key)
                return client.get(key, max(size - nbytes, 0), size) if size else b"", size

        data, size = self.ask(f"read {key}", tail)
        return bytes(data), size

    def read_ahead(self, sizes: Mapping[str, int]) -> None:
        def read(key: str) -> tuple[str, _Ahead] | None:
            size = sizes[key]  # a byte more shows an object of another size, and bounds the read
            with suppress(CkptStoreError):
                data = self.ask(
                    f"read {key}", lambda client: client.get(key, 0, size + 1), once=True
                )
                if len(data) == size:
                    return key, _Ahead(memoryview(data))
            return None

        self._ahead = {}
        if sizes:
            in_vain = self.in_vain
            with Pool(min(_AHEAD_AT_ONCE, len(sizes))) as pool:
                self._ahead = dict(filter(None, pool.map(read, sizes)))
            self.in_vain = in_vain  # these were tried once: that says nothing about the deadline

    def size(self, key: str) -> int | None:
        check_key(key)
        try:
            return self.ask(f"look up {key}", lambda client: client.size(key))
        except NotFound:
            return None

    def open_file(self, key: str) -> OpenFile:
        raise InvalidInput(
            f"{self.url} is no local directory, so its packs cannot be mapped into memory; use "
            "read instead"
        )

    def is_cached(self, key: str, offset: int) -> bool:
        """False: a request is always needed."""
        return False

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        self._check_writable(key)

        self.ask(f"write {key} ({len(data)} bytes)", lambda client: client.put(key, data), True)

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """See `Storage`. A repeated request may find its own object and return False; read the
        object to be sure."""
        self._check_writable(key)
        if not self._tried_out:
            self._try_out()

        def create(client: Client) -> bool:
            try:
                client.put(key, data, create=True)
            except Exception as error:
                # Servers refuse in different words (412, 409, on Ceph 400), so the name is looked
                # up.
                if client.may_pass(error) or not _exists(client, key):
                    raise
                return False
            return True

        return self.ask(f"create {key} ({len(data)} bytes)", create, True)

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> "BucketWriter":
        self._check_writable(key)
        return BucketWriter(self, key)

    def sync_dirs(self, keys: Iterable[str]) -> None:
        """Does nothing: a bucket has no directories."""

    def delete(self, key: str) -> None:
        self._check_writable(key)
        upload = _upload_of(key)
        with suppress(NotFound):
            self.ask(
                f"delete {key}",
                lambda client: client.abort(*upload) if upload else client.delete(key),
                True,
            )

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        if directory := prefix.rpartition("/")[0]:
            check_key(directory)

        def found(client: Client) -> list[tuple[str, int]]:
            keys = [each for each in client.list(prefix) if each[0].startswith(prefix)]
            if prefix == _UPLOADS:
                keys += [(_name_of(*upload), 0) for upload in client.uploads()]
            return sorted(keys)

        try:
            return iter(self.ask(f"list {prefix or 'everything'}", found))
        except NotFound:
            return iter(())

    def close(self) -> None:
        """Does nothing: the libraries share their connections among all users."""

    def ask(
        self, what: str, request: Callable[[Client], T], writing: bool = False, once: bool = False
    ) -> T:
        """The answer to `request`, which is repeated until the deadline, unless it is to be sent
        `once`. `what` describes it in errors.

        Raises `NotFound`, `ReadOnly`, `InvalidInput` or `Unavailable`.
        """
        client, deadline_s = self.client()
        deadline = time.monotonic() + deadline_s
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                answer = request(client)
            except CkptStoreError:
                raise
            except Exception as error:
                passing = client.may_pass(error)
                wait_s = _random.uniform(pause_s / 2, pause_s)
                if once or not passing or time.monotonic() + wait_s > deadline:
                    self.in_vain = passing
                    raise self._failure(error, what, writing) from error
                time.sleep(wait_s)
            else:
                self.in_vain = False
                return answer
        raise AssertionError("pauses do not end")

    def client(self) -> tuple[Client, float]:
        """The client of this process, and how long requests are repeated."""
        deadline_s = min(SHORT_DEADLINE_S, self.deadline_s) if self.in_vain else self.deadline_s
        which = getpid(), deadline_s
        if which not in self._clients:
            kind = ObstoreClient if self._prefers_obstore and usable() else FsspecClient
            try:
                self._clients[which] = kind(self.url, dict(self._options), deadline_s)
            except CkptStoreError:
                raise
            except Exception as error:
                raise InvalidInput(f"cannot open {self.url}: {self._told(error)}") from error
        return self._clients[which], deadline_s

    def _get(self, key: str, start: int, stop: int | None) -> Any:
        """The bytes `start:stop`, or fewer at the object's end."""
        check_key(key)
        if stop is not None and start >= stop:
            return b""
        if (ahead := self._ahead.get(key)) and (found := ahead.take(start, stop)) is not None:
            return found

        def get(client: Client) -> Any:
            try:
                return client.get(key, start, stop)
            except Exception as error:  # also of a range behind the object's end
                if _is_final(client, error) or client.size(key) > start:
                    raise
                return b""

        return self.ask(f"read {key}", get)

    def _try_out(self) -> None:
        """Raise `InvalidInput` if an exclusive create overwrites an object: log entries would be
        lost. Older libraries ignored that mode, and some servers ignore the condition."""
        key = f"tmp/{new_session_id()}-probe"
        self.put(key, b"first")
        try:
            with suppress(Exception):  # in whatever words it is refused
                self.client()[0].put(key, b"second", create=True)
            found = self.read(key)
        finally:
            self.delete(key)
        if found != b"first":
            raise InvalidInput(
                f"what serves {self.url} overwrites objects that it was to create, so writers "
                "could lose each other's commits: either the library on this host, then install a "
                "newer one, or the server, then take another one"
            )
        self._tried_out = True

    def _failure(self, error: Exception, what: str, writing: bool) -> CkptStoreError:
        """Translate `error` into an error of this package."""
        told = f"cannot {what} in {self.url}: {self._told(error)}"
        if _NO_BUCKET.search(f"{error} {error.__cause__}"):
            if writing:
                return NotFound(f"{told}; make the bucket first")
            return NotFound(f"there is no bucket for {self.url}")
        if isinstance(error, FileNotFoundError):
            return NotFound(f"cannot {what}: not in {self.url}")
        if isinstance(error, PermissionError) or type(error).__name__ in _DENIED:
            if writing:
                return ReadOnly(
                    f"{told}; get the right to write there, or only read (in Python, open it with "
                    "read_only=True)"
                )
            return Unavailable(
                f"{told}; get the right to read there, and look whether key and secret are the "
                "right ones"
            )
        return Unavailable(
            f"{told} (given up after {self.deadline_s:g} s at most); see to the storage, then "
            "repeat"
        )

    def _told(self, error: Exception) -> str:
        return without(str(error).partition("\n")[0] or type(error).__name__, self._secrets)

    def _check_writable(self, key: str) -> None:
        check_key(key)
        check_writable(key, self.url, self._read_only)


class BucketWriter:
    """`Writer` into a bucket. An object of at most one part is put whole, and so is every object
    if the client sends no parts."""

    def __init__(self, storage: BucketStorage, key: str) -> None:
        self._storage, self._key = storage, key
        self._held: list[bytes] = []
        self._end = 0
        self._upload: S3Upload | ObstoreUpload | None = None

    def append(self, buffers: Sequence[memoryview]) -> None:
        data = b"".join(map(as_bytes, buffers))  # a copy, because the caller may reuse the memory
        self._end += len(data)
        self._held.append(data)
        if self._end <= PART_BYTES:
            return
        if self._upload is None:
            self._upload = self._storage.client()[0].upload(self._key, self._repeat)
        if (upload := self._upload) is not None:
            data, self._held = b"".join(self._held), []
            self._storage.ask(self._what(), lambda _: upload.write(data), True, once=True)

    def finish(self) -> bool:
        data, self._held = b"".join(self._held), []
        if (upload := self._upload) is None:
            return put_finished(self._storage, self._key, data)
        try:
            if not self._storage.ask(self._what(), lambda _: upload.complete(), True, once=True):
                raise name_taken(self._key, self._storage.url)
        except BaseException:
            self.discard()
            raise
        self._upload = None
        return True

    def discard(self) -> None:
        upload, self._upload, self._held = self._upload, None, []
        # A server that does not answer is not asked: gc finds the upload by its session's name.
        if upload is not None:
            upload.abort(answers=not self._storage.in_vain)

    def _repeat(self, request: Callable[[], T]) -> T:
        return self._storage.ask(self._what(), lambda _: request(), True)

    def _what(self) -> str:
        return f"upload {self._key} ({self._end} bytes)"


def _client(query: str, otherwise: str | None) -> str | None:
    """The client named in the URL's query, else the other argument."""
    given = dict(each.partition("=")[::2] for each in query.split("&")) if query else {}
    if unknown := sorted(
        given.keys() - {"client"}
    ):  # the names alone: what is unknown may have a secret for its value
        raise InvalidInput(
            f"a bucket's URL knows no {unknown[0]!r} behind the '?'; wanted client=obstore or "
            "client=fsspec"
        )
    client = given.get("client", otherwise)
    if client not in (None, *_CLIENTS):
        raise InvalidInput(
            f"no client for buckets is called {redact(client)!r}; wanted one of "
            f"{', '.join(_CLIENTS)}"
        )
    return client


def _check_url(url: str) -> str:
    """The scheme of a URL that names a bucket."""
    scheme, _, place = url.partition("://")
    if scheme not in ("memory", *STORES):
        raise InvalidInput(
            f"a store cannot live at {redact(url)}: wanted a local path or one of memory, "
            f"{', '.join(STORES)}://"
        )
    bucket = place.partition("/")[0]
    # With a colon, a `/` may be the password's. `abfs://CONTAINER@ACCOUNT` has an account there.
    if not bucket or ":" in bucket or ("@" in bucket and not scheme.startswith("abfs")):
        raise InvalidInput(
            f"{redact(url)} names no bucket: wanted {scheme}://BUCKET/PATH; key and secret belong "
            'in the options of its client: storage=Storage(options={"key": …, "secret": …})'
        )
    return scheme


def _exists(client: Client, key: str) -> bool:
    try:
        client.size(key)
    except FileNotFoundError:
        return False
    return True


def _is_final(client: Client, error: Exception) -> bool:
    """Whether a look-up of the size has nothing to add: the object is absent, or the request is
    repeated."""
    return isinstance(error, FileNotFoundError) or client.may_pass(error)


def _name_of(key: str, upload: str) -> str:
    """The name under `tmp/` that identifies an upload."""
    found = _SESSION_OF.fullmatch(f"/{key}")
    both = f"{key}\0{upload}".encode().hex()
    return f"{_UPLOADS}{found['session'] if found else _NOBODY}-{both}"


def _upload_of(key: str) -> tuple[str, str] | None:
    """Key and id of the upload that `key` names, if any."""
    if not key.startswith(_UPLOADS):
        return None
    try:
        path, _, upload = bytes.fromhex(key.rpartition("-")[2]).decode().partition("\0")
    except ValueError:
        return None
    return (path, upload) if upload else None
