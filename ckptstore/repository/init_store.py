"""How is an empty store created, and what does an error say about a place that holds no store?

A store exists when its `ckptstore.json` does. The file is created exclusively: of two processes
that create one store at once, one succeeds and the other opens the result.
"""

import os
import re
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ckptstore.core.config import CHUNK_BYTES, StoreConfig, check_chunk_bytes, check_codec
from ckptstore.core.ids import CONFIG_KEY, ROOT_ENTRIES, new_session_id, new_store_id
from ckptstore.core.paths import check_path, rights, sync_path
from ckptstore.errors import (
    CkptStoreError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    ReadOnly,
    Unavailable,
)
from ckptstore.index import database_log
from ckptstore.log.entries import Moved
from ckptstore.log.log import Log
from ckptstore.objects.documents import decode_config, encode_config
from ckptstore.objects.pointer_files import Pointer, read_pointer
from ckptstore.storage import open_storage
from ckptstore.storage.contract import Storage
from ckptstore.storage.reserve import ensure_reserve

_DEPTH = 3
"""Of so many directories at a path's end the name may be mistyped."""

_ALIKE = 0.7
"""Least similarity of two names of which one may be the other, mistyped (`difflib`)."""

_LOOKED_AT = 1000
"""Entries of a directory among which such names are looked for."""

_OTHER_WRITERS = {
    ".metadata": "torch.distributed.checkpoint",
    ".snapshot_metadata": "TorchSnapshot",
}


def place_text(place: str | os.PathLike[str]) -> str:
    """The text of a path or URL. Raises `InvalidInput` for anything else, and for text that cannot
    be the name of a file."""
    try:
        text = os.fspath(place)
        if isinstance(text, str) and text:
            check_path(text)
            return text
    except TypeError as error:
        raise _no_place(place) from error
    except InvalidInput as error:
        raise InvalidInput(f"{_no_place(place)}; {error}") from error
    raise _no_place(place)


def _no_place(place: object) -> InvalidInput:
    return InvalidInput(f"{place!r:.80} is no place of a store: wanted a path or a URL")


def init_store(
    place: str | os.PathLike[str],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    codec: str = "raw",
    private: bool = False,
    as_private_as: Path | None = None,
    storage_options: dict[str, Any] | None = None,
    index: str | None = None,
) -> StoreConfig:
    """Create an empty store at `place`, with its log in the database at `index` if given.

    A `private` store, and everything later created in it, belongs to its owner alone. With
    `as_private_as`, the store gets no more permissions than that directory.

    Raises `Conflict` if a store exists there, `InvalidInput` for a directory with other content
    or a bucket whose server ignores conditional writes, `ReadOnly` or `Unavailable` if writing
    fails.
    """
    config = StoreConfig(new_store_id(), check_chunk_bytes(chunk_bytes), check_codec(codec))
    storage = open_storage(place_text(place), storage_options=storage_options)
    made = _missing_directories(storage)
    try:
        if not _is_store(storage):
            _refuse_foreign(storage)
            if private:
                _make_private(storage, 0o700)
            elif as_private_as is not None and storage.capabilities.local_root is not None:
                _make_private(storage, *_rights_and_group(as_private_as))
            if _create(storage, config, index):
                return decode_config(storage.read(CONFIG_KEY), storage.url)
        raise Conflict(f"{storage.url} is a store already; open it, or choose another directory")
    except Conflict:
        raise  # the directories are that store's: its processes are about to write there
    except BaseException as error:
        for directory in made:
            # Not empty, if another process makes a store there.
            with suppress(OSError):
                directory.rmdir()
        if not isinstance(error, ReadOnly):
            raise
        why = str(error).partition(";")[0]
        raise ReadOnly(
            f"no store can be made at {storage.url} ({why}); choose another place, or get the "
            "right to write there"
        ) from error
    finally:
        storage.close()


def _missing_directories(storage: Storage) -> list[Path]:
    """The directories that a store makes before its first file, and that are not there yet; the
    deepest first."""
    root = storage.capabilities.local_root
    if root is None:
        return []
    return [path for path in (root / "tmp", root, *root.parents) if not os.path.lexists(path)]


def _create(storage: Storage, config: StoreConfig, index: str | None) -> bool:
    """Whether this call created the store."""
    log = database_log(index, config.store, storage) if index else None
    if log is None:
        check_exclusive_create(storage)
    else:
        config = config.moved(log.make(), config.generation)
    data = encode_config(config)
    try:
        # False may be the answer to a repeated request that met its own object.
        created = storage.put_new(CONFIG_KEY, data) or storage.read(CONFIG_KEY) == data
        if log is not None and not created:
            log.drop()
        elif log is not None:
            # The log says where it is: `ckptstore.json` may be lost.
            body = Moved(config.log_place, config.generation)
            Log(storage, config.store, config.generation, place=log).append(body)
    finally:
        if log is not None:
            log.database.close()
    if created:
        ensure_reserve(storage)
    return created


def _make_private(storage: Storage, most: int, group: int | None = None) -> None:
    """Limit the permissions of the store's directory to `most` before it holds any file. Files
    in it get no more permissions (`rights`). Group permissions apply only to `group`."""
    root = storage.capabilities.local_root
    if root is None:
        raise InvalidInput(
            f"{storage.url} is no directory: who may read it is for the bucket's policy to say; "
            "leave private out"
        )
    new = [directory for directory in (root, *root.parents) if not directory.exists()]
    try:
        root.mkdir(mode=most, parents=True, exist_ok=True)
        status = root.stat()
        if group not in (None, status.st_gid):
            most &= 0o707 | (most & 0o007) << 3
        root.chmod(stat.S_IMODE(status.st_mode) & (~0o777 | most) | 0o700)
        for directory in new:
            sync_path(directory.parent)
    except OSError as error:
        raise ReadOnly(
            f"cannot make {root} private: {error.strerror}; get the right to write there"
        ) from error


def _rights_and_group(directory: Path) -> tuple[int, int | None]:
    try:
        return rights(directory), os.stat(directory).st_gid
    except OSError as error:
        raise Unavailable(
            f"cannot look at {directory}: {error.strerror}; see to the storage, then repeat"
        ) from error


def read_config(storage: Storage) -> StoreConfig:
    """The contents of `ckptstore.json`. Raises `NotFound` if there is no store, `Corrupt`,
    `InvalidInput`."""
    try:
        data = storage.read(CONFIG_KEY)
    except NotFound as error:
        _is_store(storage)
        raise NotFound(f"no store at {storage.url}: {instead_of_store(storage)}") from error
    return decode_config(data, storage.url)


def _is_store(storage: Storage) -> bool:
    """Whether a store exists. Raises `Corrupt` for a store that lost its `ckptstore.json`: a new
    one there would hide its commits."""
    if storage.size(CONFIG_KEY) is not None:
        return True
    if next(storage.list("log/"), None):
        raise Corrupt(
            f"{storage.url} has a log and no {CONFIG_KEY}: it was a store and lost that file; "
            "`ckptstore repair` writes it again"
        )
    return False


def check_exclusive_create(storage: Storage) -> None:
    """Raise `InvalidInput` for a bucket that cannot hold a log.

    Some servers treat a conditional write as a plain one, so two writers would overwrite each
    other's log entries.
    """
    if storage.capabilities.exclusive_create:
        return
    key = f"tmp/{new_session_id()}-probe"
    storage.put_new(key, b"first")
    try:
        if not storage.put_new(key, b"second") and storage.read(key) == b"first":
            return
    finally:
        storage.delete(key)
    raise InvalidInput(
        f"the server of {storage.url} ignores conditional writes (If-None-Match: *), so several "
        "writers could lose each other's commits; "
        'keep the log in PostgreSQL: storage=Storage(index="postgresql+psycopg://…") or --index, '
        "or use another server"
    )


def _refuse_foreign(storage: Storage) -> None:
    root = storage.capabilities.local_root
    if root is None or not root.exists():
        return
    if not root.is_dir():
        raise InvalidInput(f"{root} is a file; wanted a directory, or a path where one can be made")
    # A configuration that is there by now is another process's, and the exclusive create will say
    # so.
    foreign = sorted(entry.name for entry in root.iterdir() if entry.name not in ROOT_ENTRIES)
    if foreign:
        raise InvalidInput(
            f"{root} is no store and holds {len(foreign)} other entries "
            f"({', '.join(foreign[:3])}…); choose an empty or a new directory"
        )


def instead_of_store(storage: Storage) -> str:
    """The text that follows `no store at …:`."""
    root = storage.capabilities.local_root
    if root is not None:
        if found := _pointer(root):
            return (
                f"that is a pointer to commit {found.id[:12]} of the store {found.store}; open "
                "that store, which takes this path "
                "as a ref, or the commit alone by ckptstore.open_pointer"
            )
        for name, library in _OTHER_WRITERS.items():
            if (root / name).is_file():
                return (
                    f"{library} wrote that directory; `ckptstore --store STORE import {root}` "
                    "brings it into a store"
                )
        if root.is_file():
            return (
                "that is a file; `ckptstore --store STORE import` reads the checkpoints of "
                "other libraries"
            )
    return (
        f"there is no {CONFIG_KEY}{near_stores(root)}; make one with `ckptstore init "
        f"{storage.url}`, or check the path"
    )


def near_stores(place: Path | None) -> str:
    """`"; did you mean /runs/checkpoints?"`, or an empty text.

    Names stores with commits whose path differs from `place` by one directory: misspelled, missing
    or extra. Names that differ only in numbers do not count as misspelled.
    """
    if place is None:
        return ""
    from difflib import get_close_matches

    near = [*place.parents, *(above / place.name for above in place.parents[1:])]
    near += [place / name for name in _names_in(place)]
    for depth, folder in enumerate(place.parents[:_DEPTH]):
        name, *below = place.parts[-1 - depth :]
        others = [each for each in _names_in(folder) if not _is_next(each, name)]
        near += [
            folder.joinpath(other, *below)
            for other in get_close_matches(name, others, cutoff=_ALIKE)
        ]
    stores = [each for each in dict.fromkeys(near) if each != place and _has_commits(each)]
    return f"; did you mean {' or '.join(map(str, stores[:3]))}?" if stores else ""


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _LOOKED_AT)]
    return []


def _is_next(a: str, b: str) -> bool:
    """Whether two names are of one series, such as `run-1` and `run-2`."""
    return re.sub(r"[0-9]+", "0", a) == re.sub(r"[0-9]+", "0", b)


def _has_commits(place: Path) -> bool:
    return os.path.isfile(place / CONFIG_KEY) and bool(_names_in(place / "commits"))


def _pointer(place: Path) -> Pointer | None:
    with suppress(CkptStoreError):
        return read_pointer(place)
    return None
