"""How is a local file written so that its name appears only after its bytes are durable?

A new object gets its name by link(2), which never replaces a file and works on every filesystem
with hard links; rename(2) replaces.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import cast

from ckptstore.core.config import MIB
from ckptstore.errors import CkptStoreError
from ckptstore.storage.contract import name_taken
from ckptstore.storage.direct_io_file import GrowingFile
from ckptstore.storage.local_files import Directories, failure, transfer

_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_BYTES = 32 * MIB


class LocalWriter:
    """`Writer` of a local file. The bytes go to `temporary`, open as `fd`, which becomes `key`
    in `directories`.

    Without `durable` nothing is fsynced. With `direct_io` a large file bypasses the page cache.
    """

    def __init__(
        self,
        directories: Directories,
        key: str,
        temporary: str,
        fd: int,
        *,
        durable: bool,
        direct_io: bool,
        replace: bool,
        named: Callable[[], None],
    ) -> None:
        """`named` is called once the object has its name, which may have replaced another
        object. `replace` allows replacing a finished one."""
        self._directories = directories
        self._key = key
        self._path = f"{directories.root}/{key}"
        self._temporary = temporary
        self._fd = fd
        self._durable = durable
        self._replace = replace
        self._named = named
        self._sent = 0
        write_all = partial(transfer, os.pwritev, fd)
        self._file = GrowingFile(fd, write_all, direct=direct_io and durable)

    def append(self, buffers: Sequence[memoryview]) -> None:
        try:
            self._file.append(buffers)
        except OSError as error:
            raise self._failure(error, "write", sum(b.nbytes for b in buffers)) from error
        if self._file.written - self._sent >= _WRITE_BACK_BYTES:
            self._write_back()

    def finish(self) -> bool:
        try:
            self._seal()
            created = self._rename() if self._replace else self._link()
        except OSError as error:
            self.discard()
            raise self._failure(error, "make durable") from error
        self.discard()
        if not created:
            raise name_taken(self._key, self._directories.root)
        self._named()
        return True

    def link(self) -> bool:
        """Like `finish`, but returns False if an object has that name. Call `discard` afterwards
        in either case."""
        try:
            self._seal()
            return self._link()
        except OSError as error:
            raise self._failure(error, "create") from error

    def discard(self) -> None:
        with suppress(OSError):  # nobody will read it
            self._close()
        if self._temporary:
            # What cannot be unlinked now is found by gc under the session's name.
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def _rename(self) -> bool:
        self._directories.having(self._path, partial(os.rename, self._temporary, self._path))
        self._temporary = ""
        return True

    def _link(self) -> bool:
        try:
            self._directories.having(self._path, partial(os.link, self._temporary, self._path))
        except FileExistsError:
            # NFS may repeat a link whose answer was lost and call its own success a failure; the
            # count of names tells.
            return os.stat(self._temporary).st_nlink == 2
        return True

    def _write_back(self) -> None:
        """Advise the disk to start writing the file's cached pages. Promises and raises nothing."""
        written = self._file.written
        if self._durable and not self._file.direct:
            _sync_file_range()(self._fd, self._sent, written - self._sent, _SYNC_FILE_RANGE_WRITE)
        self._sent = written

    def _seal(self) -> None:
        self._file.finish()
        if self._durable:
            os.fsync(self._fd)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _failure(self, error: OSError, verb: str, nbytes: int = 0) -> CkptStoreError:
        return failure(error, verb, self._key, self._directories.root, writing=True, nbytes=nbytes)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    """glibc's function, or a function that does nothing. Its errors are left to the fsync that
    follows."""
    # Imported here because queries never write.
    import ctypes

    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return lambda fd, offset, nbytes, flags: 0
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast(Callable[[int, int, int, int], int], function)
