"""Where objects lie: local disks and buckets. Which storage does a URL name?"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptstore.core.paths import check_path
from ckptstore.errors import InvalidInput
from ckptstore.storage.contract import Storage

PLUGINS = {"hosts": "ckptstore.plugins.hosts.storage"}
"""Plugins by the scheme of their URLs. A plugin stands on all of the core, so none is imported
before its storage is opened."""


def open_storage(
    url: str | Path,
    *,
    read_only: bool = False,
    storage_options: dict[str, Any] | None = None,
    fsync: bool = True,
    direct_io: bool | None = None,
) -> Storage:
    """The storage for `url`: a path or `file://` for a local directory, or a bucket of S3, Google
    Cloud Storage or Azure, or a plugin's.

    Creates nothing and looks nothing up; `~` is the user's home. `fsync=False` gives up
    durability on a local disk, for tests and scratch stores. `direct_io` makes large objects
    bypass a local disk's page cache; None does so only for writers with `aside`.
    `storage_options` go to the bucket's client. Raises `InvalidInput` for text that is neither a
    path nor a URL.
    """
    text = str(url)
    check_path(text)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        if storage_options:
            raise InvalidInput(
                f"the options {sorted(storage_options)} of a bucket's client mean nothing for the "
                f"local path {text!r}; leave them out"
            )
        from ckptstore.storage.local import LocalStorage

        return LocalStorage(
            rest if separator else os.path.expanduser(url),
            read_only=read_only,
            fsync=fsync,
            direct_io=direct_io,
        )
    if scheme in PLUGINS:
        opened: Storage = import_module(PLUGINS[scheme]).open_storage_of(text, read_only=read_only)
        return opened
    from ckptstore.plugins.buckets.bucket import BucketStorage

    return BucketStorage(text, read_only=read_only, storage_options=storage_options)
