"""How is a commit read as a tree of files? Its adopted files by their recipes, and new safetensors
files of its tensors; any range of them, without writing one.

A range is read in windows of about a chunk, since a chunk is verified whole. Windows of which a
range takes only a part are kept for the next range, in bounded memory.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.leaves import segment, shown
from ckptstore.plugin.model import Box, nbytes_of
from ckptstore.plugin.reading import Tree
from ckptstore.plugin.work import cached_property, forks
from ckptstore.plugins.adopt.adopting import SUFFIX
from ckptstore.plugins.adopt.manifest import Manifest
from ckptstore.plugins.adopt.materializing import (
    Contents,
    FileBox,
    is_adopted,
    manifest_of,
    parts_of,
    read_pieces,
    split,
)
from ckptstore.plugins.parsers.safetensors_header import encode_header

CACHE_BYTES = 32 << 20
"""Most bytes of windows that are kept for one commit."""

_PLANS = 64
"""Files whose plans are kept."""
_LINKS_MAX = 40
"""Links on the way to one file."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file, or a directory (`is_folder`), of a commit. `link` is the text of the link that leads
    to it."""

    is_folder: bool
    size: int
    mode: int
    mtime_ns: int
    link: str | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A file: `head`, then `parts`, the i-th from byte `starts[i]` on."""

    head: bytes
    parts: Sequence[FileBox]
    starts: Sequence[int]
    size: int


class CommitFiles:
    """The files of one commit. Threads may share it. Names are relative, `""` is the root.

    The root lists what was adopted. A commit that was not adopted has a file `KEY.safetensors` for
    each key with tensors; where it was, these can be read too, but are not listed.
    """

    def __init__(self, contents: Contents, commit: str, time_ns: int) -> None:
        self.commit = commit
        self._contents, self._time_ns = contents, time_ns
        self._windows: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._lock = forks.lock()
        self._plan = lru_cache(_PLANS)(self._make_plan)
        self._pieces = lru_cache(4)(self._cut)

    @property
    def is_adopted(self) -> bool:
        """Whether the files are those that were adopted."""
        return self._manifest is not None

    def find(self, name: str) -> Found:
        """The file or directory `name`. Raises `NotFound`, and `InvalidInput` for tensors that have
        no place in a safetensors file."""
        link = self._manifest.links.get(name) if self._manifest else None
        real = self._real(name)
        text = link.target if link else None
        if self._manifest and (folder := self._manifest.folders.get(real)):
            return Found(True, 0, folder.mode, folder.mtime_ns, text)
        if self._manifest and (file := self._manifest.files.get(real)):
            return Found(False, file.size, file.mode, file.mtime_ns, text)
        if not real:
            return Found(True, 0, 0o755, self._time_ns)
        return Found(False, self._plan(real).size, 0o644, self._time_ns)

    def names(self, folder: str) -> list[str]:
        """The names in a directory, relative to it. A link to a file is listed as that file; other
        links are not listed, so that no walk is endless. Raises `NotFound` for a file."""
        real = self._real(folder)
        if real not in self._listed:
            raise NotFound(f"{folder or '/'!r} of commit {self.commit[:12]} is no directory")
        return self._listed[real]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes `start:stop` of a file, verified. Raises `NotFound`, `InvalidInput` for a
        directory, and `Corrupt`."""
        real = self._real(name)
        plan = self._plan(real)
        start, stop = max(start, 0), min(stop, plan.size)
        if start >= stop:
            return b""
        head = plan.head[start:stop]
        windows = list(self._windows_of(real, max(start, len(plan.head)), stop))
        if not windows:
            return head
        skipped = max(start, len(plan.head)) - windows[0][0]
        found = self._read_windows(real, windows, start, stop)
        body = found[skipped : skipped + stop - start - len(head)]
        return b"".join((head, body)) if head else body.tobytes()

    def has_tensors(self, name: str) -> bool:
        """Whether bytes of tensors were found in a file. Raises as `read`."""
        parts = self._plan(self._real(name)).parts
        return any(part.tree.schema.kinds[part.number] == "tensor" for part in parts)

    @cached_property
    def _manifest(self) -> Manifest | None:
        return manifest_of(self._contents, self.commit) if is_adopted(self._contents) else None

    @cached_property
    def _listed(self) -> dict[str, list[str]]:
        """The names in each directory, sorted."""
        if self._manifest is None:
            return {"": sorted(self._tensor_files())}
        folders, files = self._manifest.folders, self._manifest.files
        found: dict[str, list[str]] = {folder: [] for folder in folders}
        links = []
        for name in self._manifest.links:
            with suppress(NotFound):
                links += [name] if self._real(name) in files else []
        for name in (*folders, *files, *links):
            if name:
                folder, _, base = name.rpartition("/")
                found[folder].append(base)
        return {folder: sorted(names) for folder, names in found.items()}

    def _tensor_files(self) -> Iterator[str]:
        """The names of the files of keys that have tensors, but for those that cannot be made."""
        for key, tree in self._contents.trees.items():
            if _tensors(tree):
                with suppress(InvalidInput):
                    _tensor_plan(tree)
                    yield segment(key) + SUFFIX

    def _real(self, name: str) -> str:
        """The name behind all links on the way. Raises `NotFound` for links that lead out, or
        around in circles."""
        links = self._manifest.links if self._manifest else {}
        if not links:
            return name
        todo, at, hops = name.split("/")[::-1], list[str](), 0
        while todo:
            part = todo.pop()
            link = links.get("/".join([*at, part]))
            if link:
                hops += 1
                if hops > _LINKS_MAX or link.target.startswith("/"):
                    raise self._missing(name, f": the link {link.target[:80]!r} leads nowhere here")
                todo += link.target.split("/")[::-1]
            elif part == ".." and hops and at:
                at.pop()
            elif part == ".." or (part == "." and not hops):
                raise self._missing(name)
            elif part not in ("", "."):
                at.append(part)
        return "/".join(at)

    def _missing(self, name: str, why: str = "") -> NotFound:
        return NotFound(f"commit {self.commit[:12]} has no file {name[:200]!r}{why}")

    def _make_plan(self, real: str) -> _Plan:
        if self._manifest and real in self._manifest.files:
            parts = parts_of(self._contents, real, self._manifest.files[real])
            return _planned(b"", parts)
        if real in self._listed:
            raise InvalidInput(f"{real or '/'!r} of commit {self.commit[:12]} is a directory")
        for key, tree in self._contents.trees.items():
            if real == segment(key) + SUFFIX and _tensors(tree):
                return _tensor_plan(tree)
        listed = ", ".join(self._listed[""][:8])
        raise self._missing(real, f"; its root has {listed or 'none'}")

    def _cut(self, real: str, i: int) -> tuple[list[int], list[FileBox]]:
        """The windows of the i-th part of a file, with the byte at which each begins."""
        plan = self._plan(real)
        part = plan.parts[i]
        pieces = list(split(part, part.tree.chunk_bytes))
        sizes = accumulate((piece.nbytes for piece in pieces), initial=plan.starts[i])
        return list(sizes)[:-1], pieces

    def _windows_of(self, real: str, start: int, stop: int) -> Iterator[tuple[int, FileBox]]:
        """The windows that hold the bytes `start:stop`, each with its first byte."""
        plan = self._plan(real)
        first = max(bisect_right(plan.starts, start) - 1, 0)
        for i in range(first, len(plan.parts)):
            if plan.starts[i] >= stop:
                return
            starts, pieces = self._pieces(real, i)
            for j in range(max(bisect_right(starts, start) - 1, 0), len(pieces)):
                if starts[j] >= stop:
                    return
                if starts[j] + pieces[j].nbytes > start:
                    yield starts[j], pieces[j]

    def _read_windows(
        self, real: str, windows: list[tuple[int, FileBox]], start: int, stop: int
    ) -> memoryview:
        """The bytes of windows that follow each other. Those at the edges may be at hand."""
        (first, head), (last, tail) = windows[0], windows[-1]
        before = self._kept(real, first)
        after = self._kept(real, last) if len(windows) > 1 else None
        # Not zeroed, unlike a bytearray.
        out = np.empty(last + tail.nbytes - first, np.uint8).data
        wanted = windows[before is not None : len(windows) - (after is not None)]
        if before is not None:
            out[: head.nbytes] = before
        if after is not None:
            out[last - first :] = after
        if wanted:
            read_pieces(self._contents, [piece for _, piece in wanted], out[wanted[0][0] - first :])
        known = {first: before, last: after if last > first else before}
        for begin, piece in {first: head, last: tail}.items():
            if known[begin] is None and (begin < start or begin + piece.nbytes > stop):
                at = begin - first
                self._keep(real, begin, out[at : at + piece.nbytes].tobytes())
        return out

    def _kept(self, real: str, begin: int) -> bytes | None:
        with self._lock:
            if (real, begin) in self._windows:
                self._windows.move_to_end((real, begin))
            return self._windows.get((real, begin))

    def _keep(self, real: str, begin: int, data: bytes) -> None:
        with self._lock:
            self._kept_bytes += len(data) - len(self._windows.pop((real, begin), b""))
            self._windows[real, begin] = data
            while self._kept_bytes > CACHE_BYTES and len(self._windows) > 1:
                self._kept_bytes -= len(self._windows.popitem(last=False)[1])


def _planned(head: bytes, parts: Sequence[FileBox]) -> _Plan:
    filled = [part for part in parts if part.nbytes]
    *starts, size = accumulate((part.nbytes for part in filled), initial=len(head))
    return _Plan(head, filled, starts, size)


def _tensors(tree: Tree) -> list[int]:
    """The tensors of a key that no thinning has taken."""
    kinds = enumerate(tree.schema.kinds)
    return [i for i, kind in kinds if kind == "tensor" and not tree.is_gone(i)]


def _tensor_plan(tree: Tree) -> _Plan:
    """A new safetensors file of all tensors of a key. Raises `InvalidInput` if two would have one
    name, or for a dtype that such files do not have."""
    schema = tree.schema
    tensors = _tensors(tree)
    names = {tensor_name(schema.paths[i]): i for i in tensors}
    if len(names) != len(tensors):
        raise InvalidInput(f"two tensors of {tree.key!r} would have one name in a safetensors file")
    header = encode_header(
        [(name, schema.dtypes[i], schema.shapes[i]) for name, i in names.items()],
        {"format": "pt"},
    )
    parts = []
    for entry in header.entries:
        i = names[entry.name]
        tree.check(i)
        box = Box.whole(schema.shapes[i])
        parts.append(FileBox(tree, i, box, nbytes_of(schema.dtypes[i], schema.shapes[i])))
    return _planned(header.raw, parts)


def tensor_name(path: str) -> str:
    """The name of a tensor in a safetensors file of its key alone: its path below the key, with
    dots."""
    segments = path.split("/")
    return ".".join(map(shown, segments[1:] or segments))
