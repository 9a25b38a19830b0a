"""Does one commit have every leaf of another? A resume must end in the bytes of one commit.

Damage shows while a commit is read into the state. The commit before it then replaces every leaf
that both have. Leaves that only the damaged commit has would stay half read, so such a commit is
verified before it replaces anything.
"""

from collections.abc import Callable
from typing import TypeAlias

from ckptstore.errors import CkptStoreError
from ckptstore.snapshot import Snapshot, contents_of

Leaves: TypeAlias = frozenset[tuple[str, str, str, tuple[int, ...]]]
"""Path, kind, dtype and shape of the leaves that a commit has."""


def has_all_of(snapshot: Snapshot, open_other: Callable[[], Snapshot]) -> bool:
    """Whether the commit that `open_other` opens has each leaf of `snapshot`, in the same shape;
    False also if that cannot be found out."""
    try:
        other = open_other()
        return _schemas_of(snapshot) == _schemas_of(other) or _leaves_of(snapshot) <= _leaves_of(
            other
        )
    except CkptStoreError:
        return False


def _schemas_of(snapshot: Snapshot) -> object:
    """A cheap key that is equal for commits with the same leaves."""
    document = contents_of(snapshot).document
    return document.keys, [(name, ref.schema) for name, ref in document.trees], document.thinned


def _leaves_of(snapshot: Snapshot) -> Leaves:
    return frozenset(
        (tree.schema.paths[i], tree.schema.kinds[i], tree.schema.dtypes[i], tree.schema.shapes[i])
        for tree in contents_of(snapshot).trees.values()
        for i in range(len(tree.schema))
        if not tree.is_gone(i)
    )
