"""Name commits in Trackio: a handler for references to `ckptstore://` (docs/trackers.md).

register()
artifact.add_reference(url_of(snap), name="checkpoint/")
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ckptstore.errors import InvalidInput
from ckptstore.interop.fsspec import PROTOCOL, CheckpointFileSystem

try:
    import trackio
    from trackio.references import ResolvedReference
except ImportError as error:
    raise ImportError(
        f'ckptstore.interop.trackio needs Trackio 0.34 or newer: pip install "ckptstore[trackio]" '
        f"({error})"
    ) from error


class CommitHandler(trackio.ReferenceHandler):  # type: ignore[misc]  # trackio has no types
    """References to commits and to files of commits.

    A commit becomes one entry per file, by the commit's id, so an entry always means the same
    bytes. Nothing is copied until a file is fetched; it is verified then.
    """

    def __init__(self, **options: Any) -> None:
        CheckpointFileSystem(**options)  # which refuses unknown ones, here and not at the first use
        self._options = options

    def matches(self, scheme: str, uri: str) -> bool:
        return bool(scheme == PROTOCOL)

    def resolve(self, uri: str, checksum: bool, max_objects: int) -> list[ResolvedReference]:
        """One entry per file. The digest is the pinned URL, whatever `checksum` says: it names the
        bytes."""
        fs = CheckpointFileSystem(**self._options)
        base = fs.pinned(_plain(uri))
        found = fs.info(base)
        if found["type"] == "file":
            return [_entry(None, base, found["size"])]
        files = fs.find(base, detail=True)
        if len(files) > max_objects:
            raise InvalidInput(
                f"{uri} has {len(files)} files; wanted at most {max_objects}: give max_objects"
            )
        return [
            _entry(path.removeprefix(f"{base}/"), path, info["size"])
            for path, info in files.items()
        ]

    def fetch(self, uri: str, dest: Path) -> None:
        CheckpointFileSystem(**self._options).get_file(_plain(uri), str(dest))

    def hint(self) -> str:
        return "Entries of commits are named by the id of the commit, which is a checksum."


def _entry(key: str | None, path: str, size: int) -> ResolvedReference:
    store, at, rest = path.partition("@")
    url = f"{PROTOCOL}://{store}{at}{quote(rest)}"
    return ResolvedReference(key, url, size=size, digest=url)


def _plain(uri: str) -> str:
    """Names of files are percent-encoded in Trackio's URIs, and not in those of fsspec."""
    store, at, rest = uri.partition("@")
    ref, slash, name = rest.partition("/")
    return f"{store}{at}{ref}{slash}{unquote(name)}"


def register(**options: Any) -> None:
    """Make Trackio understand `ckptstore://` references, once per process. `options` are those of
    `CheckpointFileSystem`."""
    trackio.register_reference_handler(CommitHandler(**options))
