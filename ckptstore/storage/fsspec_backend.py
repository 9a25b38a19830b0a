"""How do objects get into memory, or into a bucket other than S3, through fsspec?

An object store shows an object whole and durably once its upload is acknowledged, so no fsync
and no temporary names are needed.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from ckptstore.core.ids import SessionId, new_session_id
from ckptstore.core.text import redact, secrets_of, without
from ckptstore.errors import CkptStoreError, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.storage.contract import RemoteStorage, check_key, check_size, largest, put_finished

_EXCLUSIVE = ("memory", "gs", "gcs", "az", "abfs", "abfss")
"""Where fsspec's `mode="create"` is one atomic request; elsewhere two writers could both believe
that they created an object.

Older libraries ignored that mode, and some servers ignore the condition, so a process tries it out
before it relies on it.
"""

_memory_lock = threading.Lock()
"""fsspec's memory filesystem looks and then creates; under this lock the two are one step."""


class FsspecStorage(RemoteStorage):
    """`Storage` through fsspec. A writer keeps its object in memory until `finish`, so packs
    should be small (64 MiB)."""

    def __init__(
        self, url: str, *, read_only: bool = False, storage_options: dict[str, Any] | None = None
    ) -> None:
        # Imported here because a store on a local disk should not pay for it.
        import fsspec

        scheme = url.partition("://")[0]
        if scheme not in _EXCLUSIVE:
            raise InvalidInput(
                f"a store cannot live at {redact(url)}: wanted a local path or one of s3, "
                f"{', '.join(_EXCLUSIVE)}://"
            )
        options = storage_options or {}
        self.url = redact(url.rstrip("/"))
        self._secrets = secrets_of(options)
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            raise InvalidInput(f"cannot open {self.url}: {error}") from error
        self._root = root.rstrip("/")
        self._read_only = read_only
        self._tried_out = scheme == "memory"
        self._exclusion: AbstractContextManager[object] = (
            _memory_lock if scheme == "memory" else nullcontext()
        )

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and start >= stop:
            return b""
        limit = largest(key)
        end = limit + 1 if stop is None and limit is not None else stop
        try:
            with self._errors("read", key):
                data: bytes = self._fs.cat_file(self._path(key), start=start or None, end=end)
        except CkptStoreError:
            # Some answer a range behind the object's end with an error.
            if (start or end) and (size := self.size(key)) is not None and start >= size:
                return b""
            raise
        check_size(key, start + len(data), self.url)
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        self._fill(key, offset, buffers, self.read(key, offset, offset + wanted))

    def read_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        size = self.size(key)
        if size is None:
            raise NotFound(f"there is no {key} in {self.url}")
        return self.read(key, max(size - nbytes, 0), size), size

    def size(self, key: str) -> int | None:
        try:
            with self._errors("look up", key):
                found = self._fs.info(self._path(key))
        except NotFound:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = True) -> None:
        self._check_writable(key)
        with self._errors(f"write {len(data)} bytes of", key):
            # Copied unless it is bytes: not every library behind fsspec takes a memoryview.
            self._fs.pipe_file(self._path(key), bytes(data))

    def put_new(self, key: str, data: bytes | memoryview) -> bool:
        """See `Storage`. A repeated request may find its own object and return False; read the
        object to be sure."""
        self._check_writable(key)
        if not self._tried_out:
            self._try_out()
        try:
            with self._errors(f"create, with {len(data)} bytes,", key):
                self._create(key, bytes(data))
        except CkptStoreError:
            # Servers refuse in different words, and an answer may be lost; what the caller asks is
            # whether there is an object.
            if self.size(key) is not None:
                return False
            raise
        return True

    def create(
        self, key: str, *, session: SessionId, unbuffered: bool = False, aside: bool = False
    ) -> "FsspecWriter":
        self._check_writable(key)
        check_key(key)
        return FsspecWriter(self, key)

    def delete(self, key: str) -> None:
        self._check_writable(key)
        with suppress(NotFound), self._errors("delete", key):
            self._fs.rm_file(self._path(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        directory = prefix.rpartition("/")[0]
        place = self._path(directory) if directory else self._root
        try:
            with self._errors("list", directory):
                found = self._find(place)
        except NotFound:
            return
        for path in sorted(found):
            key = path.removeprefix(f"{self._root}/")
            if key.startswith(prefix):
                yield key, int(found[path]["size"])

    def _find(self, place: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        while True:
            try:
                found: dict[str, Any] = self._fs.find(place, detail=True)
                return found
            except RuntimeError as error:
                # Of memory://, whose dict another thread changed.
                if "changed size during iteration" not in str(error):
                    raise

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _create(self, key: str, data: bytes) -> None:
        with self._exclusion:
            self._fs.pipe_file(self._path(key), data, mode="create")

    def _try_out(self) -> None:
        """Raise `InvalidInput` if an exclusive create overwrites an object: log entries would be
        lost."""
        key = f"tmp/{new_session_id()}-probe"
        self.put(key, b"first")
        try:
            with suppress(Exception):  # in whatever words it is refused
                self._create(key, b"second")
            found = self.read(key)
        finally:
            self.delete(key)
        if found != b"first":
            raise InvalidInput(
                f"what serves {self.url} overwrites objects that it was to create, so writers "
                "could lose each other's commits: either the "
                f"library on this host ({type(self._fs).__module__}), then install a newer one, or "
                "the server, then take another one"
            )
        self._tried_out = True

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Translate errors within the block. Each library behind fsspec has its own; an unknown
        one counts as temporary."""
        try:
            yield
        except CkptStoreError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"there is no {key} in {self.url}") from error
        except Exception as error:
            told = f"cannot {verb} {key} in {self.url}: {without(str(error), self._secrets)}"
            if isinstance(error, PermissionError):
                raise ReadOnly(f"{told}; get the right to do so") from error
            raise Unavailable(f"{told}; see to the storage, then repeat") from error


class FsspecWriter:
    """`Writer` into memory; `finish` uploads."""

    def __init__(self, storage: FsspecStorage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._data = bytearray()

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Copy the bytes; nothing is sent before the object is complete."""
        for buffer in buffers:
            self._data += buffer.cast("B")

    def finish(self) -> bool:
        data, self._data = self._data, bytearray()
        return put_finished(self._storage, self._key, bytes(data))

    def discard(self) -> None:
        self._data = bytearray()
