"""How does torch_checkpointing write to a store? It writes files below a temporary directory, and
renames that when every rank has written: the rename makes one commit, by the ways of `adopt`.

A checkpoint is a tag, `files/` and its path, which is set by the entry that makes the commit. Paths
that are no checkpoint are plain files, as a consolidated export is, or an older checkpoint.
"""

import errno
import io
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
)

import ckptstore
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.snapshots import contents_of
from ckptstore.plugin.work import forks
from ckptstore.plugins.adopt.commit_files import CommitFiles
from ckptstore.plugins.adopt.materializing import is_adopted
from ckptstore.plugins.foreign.sources import Window
from ckptstore.plugins.torch_checkpointing.names import label_of, name_of, name_of_tag, tag_of
from ckptstore.plugins.torch_checkpointing.staging import Staging

_COMMITS_KEPT = 4
_ROOT = Path("/")


@dataclass
class StoreStorageConfig(StorageConfig):  # type: ignore[misc]  # it has no types
    """A store as the `storage_config` of torch_checkpointing's `CheckpointManager`.

    Args:
        store: The directory or the URL of the store; it is made by the first save.
        run: The run that the commits belong to.
        staging: A directory for the files of checkpoints that are being written, which all ranks
            share. Default: beside the store, named like it with `.staging`; a bucket needs one.
        temp_dir_prefix: That of the manager's `CheckpointWriterConfig`.

    Raises:
        InvalidInput: `store` is a bucket, and `staging` is not given.

    Example:
        >>> CheckpointManager.Config(storage_config=StoreStorageConfig("/data/checkpoints")).build()
    """

    store: str
    run: str = "main"
    staging: str | None = None
    temp_dir_prefix: str = DEFAULT_TEMP_DIR_PREFIX

    def __post_init__(self) -> None:
        if self.staging is None and "://" in str(self.store):
            raise InvalidInput(
                f"{self.store} is no directory: give staging=, a directory that all ranks share"
            )

    def create_storage(self) -> "StoreStorage":
        """A storage of this process."""
        return StoreStorage(self)


class StoreStorage(Storage):  # type: ignore[misc]  # it has no types
    """Checkpoints as commits. Its methods are those of torch_checkpointing's `Storage`."""

    def __init__(self, config: StoreStorageConfig) -> None:
        self._config = config
        root = config.staging or f"{os.fspath(config.store).rstrip('/')}.staging"
        self._staging = Staging(Path(root).absolute())
        self._files = LocalFileSystemStorage(LocalFileSystemStorageConfig(use_direct_io=False))
        self._reading: ckptstore.Store | None = None
        self._commits: dict[str, CommitFiles] = {}
        self._lock = forks.lock()
        weakref.finalize(self, self._staging.close)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> Any:
        """A file of a checkpoint, or another one."""
        name = name_of(path)
        if not (found := self._committed(name)):
            return self._files.stream_read(self._place(name), read_args)
        with _as_os_errors(path):
            window = _opened(*found)
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(window.read_at(0, window.size))
        return window

    def stream_write(self, path: Path) -> io.IOBase:
        """A new file. One that is not written to its end is removed."""
        return _NewFile(self._new(path))

    def write(self, path: Path, data: Any) -> None:
        """Write a file whole."""
        with _NewFile(self._new(path)) as file:
            file.write(data)

    def delete(self, path: Path) -> None:
        """Remove a file; one of a checkpoint stays, and `PermissionError` is raised."""
        name = name_of(path)
        self._check_free(name, path)
        self._files.delete(self._place(name))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory."""
        name = name_of(path)
        if not self._committed(name):
            if not recursive and not self.isdir(Path(name).parent):
                raise FileNotFoundError(f"{path}: there is no directory to make it in")
            self._files.mkdir(self._own(name), recursive or not self._own(name).parent.exists())

    def rmdir(self, path: Path) -> None:
        """Remove a directory with everything in it. Of a checkpoint the tag is removed and the
        commit forgotten; a later `gc` frees its room."""
        name = name_of(path)
        found = [tag for tag in self._checkpoints() if _is_below(tag, name)]
        if found:
            with self._writing() as store:
                for each in found:
                    commit = store.tags()[tag_of(each)]
                    store.untag(tag_of(each))
                    if commit not in store.tags().values():
                        store.forget([commit], all_commits=True)
        self._check_free(name, path)
        if not name:
            raise PermissionError(errno.EPERM, "the root of all files stays", str(path))
        places = self._places(name)
        if not found and not places:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        for place in places:
            self._files.rmdir(place)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Make the checkpoint `dst_path` of a directory, as one commit; or rename another file."""
        source, target = name_of(src_path), name_of(dst_path)
        self._check_free(source, src_path)
        if not (self._is_staged(source) and self.isdir(src_path) and not self._is_staged(target)):
            self._rename_files(source, target, src_path, dst_path)
            return
        self._staging.own()
        with self._staging.exclusive():
            self._staging.sweep()
            self.check_new(dst_path)
            empty = self._places(target)
            place = self._staging.gather(source)
            try:
                with self._writing() as store:
                    store.adopt(place, **label_of(target))
            except BaseException:
                # The ranks write their files anew, each in its own folder.
                shutil.rmtree(place, ignore_errors=True)
                raise
        for done in self._places(source):
            shutil.rmtree(done, ignore_errors=True)
        for done in empty:
            with suppress(OSError):  # somebody has put a file there meanwhile: it stays
                done.rmdir()

    def ls(self, path: Path) -> list[str]:
        """The names in a directory."""
        name = name_of(path)
        if found := self._committed(name):
            with _as_os_errors(path):
                return found[0].names(found[1])
        names = {tag for tag in self._checkpoints() if tag != name and _is_below(tag, name)}
        start = len(PurePosixPath(name).parts)
        listed = {PurePosixPath(tag).parts[start] for tag in names}
        places = self._places(name)
        if not listed and not places:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        for place in places:
            listed.update(self._files.ls(place))
        return sorted(listed)

    def exists(self, path: Path) -> bool:
        """Whether there is a file or a directory."""
        name = name_of(path)
        if found := self._committed(name):
            with suppress(NotFound):
                return bool(found[0].find(found[1]))
            if not found[0].is_adopted:
                raise InvalidInput(
                    f"{path}: the checkpoint is of ckptstore's CheckpointManager, which keeps "
                    "values and no files: load it with that of "
                    "ckptstore.plugins.torch_checkpointing"
                )
            return False
        return bool(self._places(name)) or self._holds_checkpoints(name)

    def getsize(self, path: Path) -> int:
        """The bytes of a file."""
        name = name_of(path)
        if not (found := self._committed(name)):
            return int(self._files.getsize(self._place(name)))
        with _as_os_errors(path):
            return found[0].find(found[1]).size

    def isdir(self, path: Path) -> bool:
        """Whether there is a directory."""
        name = name_of(path)
        if found := self._committed(name):
            with suppress(NotFound):
                return found[0].find(found[1]).is_folder
            return False
        return any(place.is_dir() for place in self._places(name)) or self._holds_checkpoints(name)

    def remap_path(self, path: Path) -> str:
        """The path itself: it is the checkpoint's name in the store."""
        return str(path)

    def check_new(self, path: Path) -> None:
        """Raise `FileExistsError` unless a checkpoint `path` can be made. An empty directory may
        be there."""
        name = name_of(path)
        if (
            self._holds_checkpoints(name)
            or self._committed(name)
            or any(not place.is_dir() or any(place.iterdir()) for place in self._places(name))
        ):
            raise FileExistsError(errno.EEXIST, "something is there, and stays", str(path))

    def saved_state(self, path: Path) -> ckptstore.Snapshot | None:
        """The checkpoint `path` if this plugin's manager saved it; None for files."""
        commit = self._checkpoints().get(name_of(path))
        if commit is None:
            return None
        assert self._reading is not None
        snapshot = self._reading.checkout(commit)
        return None if is_adopted(contents_of(snapshot)) else snapshot

    def _rename_files(self, source: str, target: str, src_path: Path, dst_path: Path) -> None:
        self._check_free(target, dst_path)
        place = self._own(target)
        if self._holds_checkpoints(target):
            raise FileExistsError(errno.ENOTEMPTY, "there are checkpoints in it", str(dst_path))
        place.parent.mkdir(parents=True, exist_ok=True)
        self._files.rename(self._place(source), place)

    def _new(self, path: Path) -> Path:
        name = name_of(path)
        self._check_free(name, path)
        place = self._own(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _check_free(self, name: str, path: Path) -> None:
        if self._committed(name):
            raise PermissionError(errno.EPERM, "a checkpoint never changes", str(path))

    def _own(self, name: str) -> Path:
        return (self._staging.own() if self._is_staged(name) else _ROOT) / name

    def _places(self, name: str) -> list[Path]:
        loose = _ROOT / name
        return self._staging.places(name) + ([loose] if loose.exists() else [])

    def _place(self, name: str) -> Path:
        return next(iter(self._places(name)), _ROOT / name)

    def _is_staged(self, name: str) -> bool:
        return any(
            part.startswith(self._config.temp_dir_prefix) for part in PurePosixPath(name).parts
        )

    def _holds_checkpoints(self, name: str) -> bool:
        return any(_is_below(tag, name) for tag in self._checkpoints())

    def _committed(self, name: str) -> tuple[CommitFiles, str] | None:
        """The commit of the checkpoint at or above `name`, and the rest of the name."""
        checkpoints = self._checkpoints()
        parts = PurePosixPath(name).parts
        for end in range(len(parts), 0, -1):
            commit = checkpoints.get("/".join(parts[:end]))
            if commit is not None:
                return self._files_of(commit), "/".join(parts[end:])
        return None

    def _files_of(self, commit: str) -> CommitFiles:
        with self._lock:
            if commit not in self._commits:
                assert self._reading is not None
                snapshot = self._reading.checkout(commit)
                time_ns = int(snapshot.time.timestamp() * 1e9)
                while len(self._commits) >= _COMMITS_KEPT:
                    self._commits.pop(next(iter(self._commits)))
                self._commits[commit] = CommitFiles(contents_of(snapshot), commit, time_ns)
            return self._commits[commit]

    def _checkpoints(self) -> dict[str, str]:
        """The commits of all checkpoints, by name."""
        with self._lock:
            if self._reading is None:
                try:
                    self._reading = ckptstore.open(self._config.store, create=False, read_only=True)
                except NotFound:
                    return {}
                weakref.finalize(self, self._reading.close)
        return {
            name: commit
            for tag, commit in self._reading.tags().items()
            if (name := name_of_tag(tag)) is not None
        }

    @contextmanager
    def _writing(self) -> Iterator[ckptstore.Store]:
        with ckptstore.open(self._config.store, run=self._config.run) as store:
            yield store


class _NewFile(io.FileIO):
    """A file that is removed if its writer fails."""

    def __init__(self, place: Path) -> None:
        super().__init__(place, "wb")
        self._unlink = partial(place.unlink, missing_ok=True)

    def write(self, data: Any) -> int:
        """Write all of `data`, unlike a raw file of the standard library."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done:]) or 0
        return done

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            self._unlink()


def _opened(files: CommitFiles, name: str) -> Window:
    """A file of a commit. What is read of it is verified."""
    found = files.find(name)
    if found.is_folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)

    def fill(offset: int, out: memoryview) -> None:
        out[:] = files.read(name, offset, offset + len(out))

    return Window(fill, 0, found.size)


@contextmanager
def _as_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise FileNotFoundError(errno.ENOENT, str(error), str(path)) from error
    except InvalidInput as error:
        raise NotADirectoryError(errno.ENOTDIR, str(error), str(path)) from error


def _is_below(name: str, folder: str) -> bool:
    return not folder or name == folder or name.startswith(f"{folder}/")
