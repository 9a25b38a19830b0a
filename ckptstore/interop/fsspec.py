"""Read any commit as files, through fsspec: `ckptstore://STORE@REF/FILE` (docs/fsspec.md).

STORE is a directory or the URL of a bucket; `@` and `%` in it are written `%40` and `%25`. REF is
what `checkout` takes, with `/` as `%2F`; without a run it is looked for in all runs. FILE is a file
of an adopted directory, or `KEY.safetensors`. Each call looks the ref up again, an open file stays
at its commit.

Imports no torch.
"""

import atexit
import json
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast
from urllib.parse import quote, unquote

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import stringify_path

from ckptstore.errors import CkptStoreError, InvalidInput, NotFound, ReadOnly
from ckptstore.plugin.handles import StoreHandle, find_commit
from ckptstore.plugin.model import CONFIG_KEY, CommitId, SessionId, default_threads
from ckptstore.plugin.reading import CommitContents, Reader
from ckptstore.plugin.text import near
from ckptstore.plugin.work import ThreadPool, reads_at_once, survives_forks
from ckptstore.plugins.adopt.commit_files import CommitFiles, Found

if TYPE_CHECKING:
    from ckptstore.plugin.snapshots import Snapshot

PROTOCOL = "ckptstore"

COMMITS_KEPT = 8
"""Commits of one store whose lists of files are kept."""

_OPTIONS = ("target_options", "threads", "index")
_FSSPEC_OPTIONS = frozenset(
    {
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
"""What fsspec passes to every filesystem."""

_OF_OPEN = ("block_size", "cache_type", "cache_options")

_START = f"{PROTOCOL}://"
_BUCKET = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_AS_IT_IS = "/:+~!$&'()*,;="


class MissingFile(NotFound, FileNotFoundError):
    """No such store, commit or file."""

    __str__ = Exception.__str__


class IsFolder(InvalidInput, IsADirectoryError):
    """A directory was read as a file."""


class NotWritable(ReadOnly, PermissionError):
    """Commits are made by `commit` and `adopt`; their files never change."""


class CommitUrl(NamedTuple):
    """A parsed URL: the store's path or URL, the ref, and the name of a file, `""` for the root."""

    store: str
    ref: str
    name: str


def parse_url(url: str) -> CommitUrl:
    """The parts of `ckptstore://STORE@REF/FILE`. Raises `InvalidInput` for anything else."""
    place = split_url(url)
    if not place.ref or not place.store:
        raise InvalidInput(
            f"{url[:200]!r} names no commit: wanted {_START}STORE@REF/FILE, such as "
            f"{_START}/data/checkpoints@best:loss/model.safetensors"
        )
    return place


def split_url(url: str) -> CommitUrl:
    """The parts of `url`, `""` for those that it lacks."""
    store, _, rest = _normal(url).partition("@")
    ref, _, name = rest.partition("/")
    return CommitUrl(unquote(store), unquote(ref), name)


def url_of(snapshot: "Snapshot", name: str = "") -> str:
    """The URL of a commit, by its id, or of a file of it: it always means the same bytes.

    Example:
        >>> url_of(store.checkout("best:loss"), "model.safetensors")
        'ckptstore:///data/checkpoints@8f3a1c…/model.safetensors'
    """
    from ckptstore.plugin.snapshots import contents_of

    return _START + _written(contents_of(snapshot).reader.url, snapshot.id, name)


def pinned(url: str, **options: Any) -> str:
    """`url` with the commit's id in the place of its ref. Options are those of the filesystem."""
    place = parse_url(url)
    found = CheckpointFileSystem(**options).files_of(place)
    return _START + _written(place.store, found.commit, place.name)


def open_url(
    url: str, *, target_options: Mapping[str, Any] | None = None, index: str | None = None
) -> "Snapshot":
    """The commit that a URL names, read-only. Use it as a context manager: it closes the store.

    Args:
        url: `ckptstore://STORE@REF`; a file behind it is passed over.
        target_options: As in `CheckpointFileSystem`.
        index: As in `CheckpointFileSystem`.

    Raises:
        InvalidInput: The URL names no commit.
        NotFound: There is no such store or commit.

    Example:
        >>> with open_url("ckptstore://s3://bucket/run@best:loss") as snap:
        ...     weights = snap.state_dict("model")
    """
    from ckptstore import Storage
    from ckptstore import open as open_store
    from ckptstore.plugin.snapshots import contents_of
    from ckptstore.plugin.stores import commit_in_any_run

    place = parse_url(url)
    options = Storage(options=dict(target_options) if target_options else None, index=index)
    store = open_store(place.store, create=False, read_only=True, storage=options)
    try:
        found = commit_in_any_run(store, place.ref)
        snapshot = store.checkout(found.id)
    except BaseException:
        store.close()
        raise
    contents_of(snapshot).on_close = store.close
    return snapshot


class CheckpointFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Commits of stores as trees of files, read-only.

    Args:
        target_options: Options of the bucket's client, as `Storage(options=…)` takes them.
        threads: Threads that read and verify.
        index: The database of a store whose log is in one, as `Storage(index=…)` takes it; else
            `$CKPTSTORE_INDEX`.
        options: Those that fsspec has for every filesystem (`skip_instance_cache`, …).

    Raises:
        InvalidInput: There is no such option.

    Example:
        >>> fs = fsspec.filesystem("ckptstore")
        >>> fs.ls("ckptstore:///data/checkpoints@latest", detail=False)
    """

    protocol = PROTOCOL
    root_marker = ""

    def __init__(
        self,
        target_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        index: str | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            _check_option(name)
        super().__init__(**options)
        self._target_options = dict(target_options or {})
        self._threads, self._index = threads, index

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list | tuple):
            return [cls._strip_protocol(each) for each in path]
        return _normal(stringify_path(path)).rstrip("/") or cls.root_marker

    def files_of(self, place: CommitUrl) -> CommitFiles:
        """The files of a commit. Raises `MissingFile` if there is none."""
        try:
            store = _open(place.store, self._target_options, self._threads, self._index)
            return store.files(place.ref)
        except NotFound as error:
            raise MissingFile(str(error)) from error

    def pinned(self, path: str) -> str:
        """`path` with the commit's id in the place of its ref."""
        place = self._place(path)
        return _written(place.store, self.files_of(place).commit, place.name)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Size, type and times of a file or a directory; `commit` is the id of its commit."""
        path = self._strip_protocol(path)
        place = self._place(path)
        return self._info(path, self.files_of(place), place.name)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is in a directory. Raises `MissingFile`."""
        path = self._strip_protocol(path)
        place = self._place(path)
        files = self.files_of(place)
        found = [self._info(path, files, place.name)]
        if found[0]["type"] == "directory":
            prefix = f"{place.name}/" if place.name else ""
            names = files.names(place.name)
            found = [self._info(f"{path}/{name}", files, prefix + name) for name in names]
        return found if detail else [each["name"] for each in found]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """The bytes of a file, or a range of them; negative numbers count from its end."""
        place = self._place(path)
        files = self.files_of(place)
        size = self._file(files, place.name).size
        begin, stop, _ = slice(start, end).indices(size)
        return files.read(place.name, begin, stop)

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **kwargs: Any) -> Any:
        """Copy files to local ones; all of one ref come from one commit."""
        several = isinstance(rpath, list | tuple)
        paths = [self._pinned_glob(path) for path in (rpath if several else [rpath])]
        return super().get(paths if several else paths[0], lpath, recursive=recursive, **kwargs)

    def modified(self, path: str) -> Any:
        """When an adopted file was written, or else its commit was made, in UTC."""
        from datetime import UTC, datetime

        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    created = modified

    def ukey(self, path: str) -> str:
        """Equal for equal bytes of a path: its commit's id and its name."""
        return self.pinned(path)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> "CommitFile":
        if mode != "rb":
            self._refuse(path)
        kwargs.pop("size", None)  # given where a pickled file is opened again
        place = self._place(path)
        files = self.files_of(place)
        return CommitFile(
            self,
            _written(place.store, files.commit, place.name),
            files,
            self._file(files, place.name),
            block_size=block_size or self.blocksize,
            cache_options=cache_options,
            **kwargs,
        )

    def _place(self, path: str) -> CommitUrl:
        try:
            return parse_url(self._strip_protocol(path))
        except InvalidInput as error:
            raise MissingFile(str(error)) from error

    def _pinned_glob(self, path: Any) -> Any:
        path = stringify_path(path)
        bare = path.rstrip("/")
        return self.pinned(bare) + path[len(bare) :]

    def _file(self, files: CommitFiles, name: str) -> Found:
        found = self._found(files, name)
        if found.is_folder:
            raise IsFolder(f"{name or '/'!r} of commit {files.commit[:12]} is a directory")
        return found

    def _found(self, files: CommitFiles, name: str) -> Found:
        try:
            return files.find(name)
        except NotFound as error:
            raise MissingFile(str(error)) from error

    def _info(self, path: str, files: CommitFiles, name: str) -> dict[str, Any]:
        found = self._found(files, name)
        link = {} if found.link is None else {"islink": True, "destination": found.link}
        return {
            "name": path,
            "size": found.size,
            "type": "directory" if found.is_folder else "file",
            "mode": found.mode,
            "mtime": found.mtime_ns / 1e9,
            "commit": files.commit,
            **link,
        }

    def _refuse(self, path: Any = "", *args: Any, **kwargs: Any) -> NoReturn:
        raise NotWritable(
            f"{str(path)[:200]!r} cannot be written: commits never change; make one with "
            "`store.commit` or `store.adopt`"
        )

    mkdir = makedirs = rmdir = rm = rm_file = _rm = _refuse
    pipe = pipe_file = put = put_file = touch = _refuse
    write_text = write_bytes = cp_file = copy = mv = _refuse
    start_transaction = _refuse


def _check_option(name: str) -> None:
    """Raise `InvalidInput` for an option that no filesystem of fsspec has."""
    if name in _OF_OPEN:
        raise InvalidInput(
            f"{name} is said where a file is opened: fsspec.filesystem({PROTOCOL!r}).open(url, "
            f"{name}=…)"
        )
    if name not in _FSSPEC_OPTIONS:
        raise InvalidInput(
            f"the filesystem of {PROTOCOL} has no option {name!r}{near(name, _OPTIONS)}; it has "
            f"{', '.join(_OPTIONS)}, and options of a bucket's client belong in "
            "target_options={…}"
        )


class CommitFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An open file of a commit. What is read of it is verified."""

    def __init__(
        self,
        fs: CheckpointFileSystem,
        path: str,
        files: CommitFiles,
        found: Found,
        **kwargs: Any,
    ) -> None:
        self._files, self._place, self._pid = files, parse_url(path), os.getpid()
        super().__init__(fs, path, "rb", size=found.size, **kwargs)

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._pid != os.getpid():  # a forked child opens its own store
            self._files, self._pid = self.fs.files_of(self._place), os.getpid()
        return self._files.read(self._place.name, start, end)


class _OpenStore:
    """A store that is open for reading, for the rest of the process."""

    def __init__(
        self, place: str, options: dict[str, Any], threads: int | None, index: str | None
    ) -> None:
        self.handle = StoreHandle(
            place, read_only=True, storage_options=options or None, index=index
        )
        remote = self.handle.storage.capabilities.slow_requests
        count = threads or default_threads()
        self._threads = ThreadPool(reads_at_once(count) if remote else count)
        self._reader = Reader(self.handle.config, self.handle.objects, self._threads)
        self._made = lru_cache(COMMITS_KEPT)(self._make)

    def files(self, ref: str) -> CommitFiles:
        """The files of a commit."""
        found = find_commit(self.handle, ref, None)
        return self._made(found.id, found.session)

    def _make(self, commit: CommitId, session: SessionId) -> CommitFiles:
        document = self._reader.document(session, commit)
        return CommitFiles(CommitContents(self._reader, commit, document), commit, document.time_ns)

    def close(self) -> None:
        self._threads.close()
        self.handle.close()


class _Stores:
    """The open stores of this process."""

    def __init__(self) -> None:
        survives_forks(self)
        atexit.register(self.close)

    def forked(self) -> None:
        """A child opens its own."""
        self.lock = threading.Lock()
        self.open: dict[tuple[object, ...], _OpenStore] = {}

    def close(self) -> None:
        for store in self.open.values():
            with suppress(CkptStoreError):
                store.close()


_stores = _Stores()


def _open(
    place: str, options: dict[str, Any], threads: int | None, index: str | None
) -> _OpenStore:
    """The open store at `place`: one for all threads of this process. A store that was made anew in
    the same place is another one."""
    told = json.dumps(options, sort_keys=True, default=repr)
    key = (place, told, threads, index, _made_at(place))
    stores = _stores.open
    if key not in stores:
        with _stores.lock:  # taken to open a store alone, which may take long
            if key not in stores:
                stores[key] = _OpenStore(place, options, threads, index)
    return stores[key]


def _made_at(place: str) -> tuple[int, ...]:
    with suppress(OSError, ValueError):
        found = os.stat(os.path.join(place, CONFIG_KEY))
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return ()


def _normal(url: str) -> str:
    """`url` without its protocol, with an absolute path or a bucket's URL as the store. Libraries
    that take URLs apart make `ckptstore:/a` of `ckptstore:///a`."""
    path = url.removeprefix(_START).removeprefix(f"{PROTOCOL}:")
    store, at, rest = path.partition("@")
    if bucket := _BUCKET.fullmatch(store):
        scheme, below = cast("tuple[str, str]", bucket.groups())
        store = f"/{below}" if scheme == "file" else f"{scheme}://{below}"
    elif store:
        store = os.path.abspath(os.path.expanduser(store))
    return store + at + rest


def _written(store: str, ref: str, name: str) -> str:
    """The path of a file, without the protocol."""
    parts = [quote(store, safe=_AS_IT_IS), "@", quote(ref, safe=_AS_IT_IS.replace("/", ""))]
    return "".join((*parts, f"/{name}" if name else ""))
