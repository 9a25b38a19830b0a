"""What the commands that list commits and leaves share: finding them, and folding what is alike."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ckptstore.cli.call import Call
from ckptstore.cli.commits import document_of, tell_run
from ckptstore.errors import Corrupt, NotFound
from ckptstore.plugin.handles import StoreHandle, find_id
from ckptstore.plugin.model import CommitId, CommitInfo, Schema, nbytes_of

T = TypeVar("T")

FOLD_ABOVE = 40
"""Terminals fold more lines than this."""
READERS = 16
"""Documents that are read from a bucket at once."""

_NUMBER = re.compile(r"(?<![^./_])[0-9]+(?![^./_])")


def find_info(call: Call, store: StoreHandle, ref: str) -> CommitInfo:
    """The commit that `ref` names, for a listing."""
    queries = store.queries()
    info = queries.commit(find_id(store, queries, ref, call.args.run))
    tell_run(call, queries, ref)
    return info


def links_of(
    call: Call, store: StoreHandle, commits: Sequence[CommitInfo]
) -> dict[CommitId, dict[str, str] | None]:
    """The links of each commit, from its document; None where damage hides them."""
    links: dict[CommitId, dict[str, str] | None] = {}

    def read(info: CommitInfo) -> None:
        try:
            links[info.id] = dict(document_of(store, info).links)
        except (Corrupt, NotFound):
            links[info.id] = None

    call.threads(READERS if store.storage.capabilities.slow_requests else 1).spread(read, commits)
    return links


def tensor_bytes(schema: Schema, leaf: int) -> int | None:
    """Raw bytes of a tensor, 0 if it shares memory with an earlier leaf; None for other leaves,
    whose size the schema does not have."""
    if schema.aliases[leaf] >= 0:
        return 0
    is_tensor = schema.kinds[leaf] == "tensor"
    return nbytes_of(schema.dtypes[leaf], schema.shapes[leaf]) if is_tensor else None


def is_folded(call: Call, rows: int, *, unless: bool = False) -> bool:
    """Whether to fold so many leaves: as asked, else if there are too many for a terminal."""
    if call.args.fold is not None:
        return bool(call.args.fold)
    return call.screen.terminal is not None and rows > FOLD_ABOVE and not unless


def fold(items: Iterable[T], key: Callable[[T], tuple[str, object]]) -> list[tuple[str, list[T]]]:
    """Group items whose paths differ only in numbers, in the order of each group's first. The
    pattern of a group is a glob for `ls`.

    `key` gives an item's path, and a value that must be equal within a group. A group of one keeps
    its path.
    """
    groups: dict[tuple[str, object], list[T]] = {}
    for item in items:
        path, kind = key(item)
        groups.setdefault((_NUMBER.sub("*", path), kind), []).append(item)
    return [
        (pattern if len(group) > 1 else key(group[0])[0], group)
        for (pattern, _), group in groups.items()
    ]
