"""Ways to read a commit of ranks; each yields what is not as the merge says."""

from collections.abc import Iterator
from random import Random
from typing import Any

import ckptstore
from tests.net.ranks import Commit, T, differences, flat, holders, merged, view
from tests.net.training import same


def whole(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    wanted = merged(of)
    yield from differences(wanted, snapshot.state_dict(), f"step {of.step}")
    yield from leaves(snapshot, wanted, f"step {of.step}")


def slices(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    """Some rows and some columns of each tensor, which ranks may have committed in boxes."""
    random = Random(of.step)
    for path, node in flat(merged(of)):
        if not isinstance(node, T) or not node.nbytes:
            continue
        region = list[slice]()
        for length in node.shape[:2]:
            start = random.randrange(length)
            region.append(slice(start, random.randint(start + 1, length)))
        got, wanted = snapshot.read(path, tuple(region)), node.made()[tuple(region)]
        if not same(got, wanted):
            yield f"step {of.step}: {region} of {path} is another"


def of_rank(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    for i in range(len(of.group)):
        seen, where = view(merged(of), i), f"step {of.step}, rank {i}"
        yield from differences(seen, snapshot.of_rank(i).state_dict(), where)
        yield from leaves(snapshot.of_rank(i), seen, where)


def numbered(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    """What has no optimizer is the same."""
    found = snapshot.numbered().state_dict()
    yield from differences(merged(of), found, f"step {of.step}, numbered")


def only(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    for key, wanted in merged(of).items():
        found = snapshot.only([key]).state_dict()
        yield from differences({key: wanted}, found, f"step {of.step}, only {key}")


def layout(snapshot: ckptstore.Snapshot, of: Commit) -> Iterator[str]:
    """Which ranks are said to have had what, of leaves that stand under the path of a slot."""
    found = snapshot.layout
    if found is None or len(of.group) == 1:
        if (found is None) != (len(of.group) == 1):
            yield f"the layout of {len(of.group)} ranks is {found}"
        return
    if found.world != len(of.group):
        yield f"the layout is of {found.world} ranks, and {len(of.group)} committed"
    for path, placed in found.leaves.items():
        if path in of.state:
            ranks = {rank for each in placed.ranks for rank in each}
            held = {of.group.index(rank) for rank in holders(of.state, path, of.group)}
            if not ranks <= held:
                yield f"{path} is said to be of ranks {ranks}, and is of {held}"


def leaves(snapshot: ckptstore.Snapshot, wanted: Any, where: str) -> Iterator[str]:
    """Tensors read one by one; no others are listed."""
    tensors = {path: node for path, node in flat(wanted) if isinstance(node, T)}
    for path, node in tensors.items():
        yield from differences(node, snapshot.read(path), f"{where}: {path}")
    listed = [leaf.path for leaf in snapshot.leaves() if leaf.kind == "tensor"]
    if sorted(listed) != sorted(tensors):
        yield f"{where} lists {sorted(listed)}, wanted {sorted(tensors)}"
