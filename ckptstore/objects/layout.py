"""What a commit's layout says (docs/format.md §7): by how many ranks it was made, and how they held
its leaves. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.core.model import Box, Shape
from ckptstore.errors import Corrupt
from ckptstore.objects import canonical


@dataclass(frozen=True, slots=True)
class Placed:
    """How ranks held one leaf: `ranks[i]` are those that had `boxes[i]`. Without boxes, `ranks` has
    one group: those that had the leaf whole, or one of at most 512 bytes in any way."""

    mesh: Shape | None
    placements: tuple[str, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def divided(self) -> bool:
        """Whether no rank had to have all of it."""
        return len(self.boxes) > 1 or any(each != "R" for each in self.placements)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """What `rank` had of it."""
        return tuple(
            box for box, ranks in zip(self.boxes, self.ranks, strict=False) if rank in ranks
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """`leaves` are by their path without a rank; those that one rank held whole, and aliases, are
    not there."""

    world: int
    leaves: Mapping[str, Placed]
    dcp: Mapping[str, Any] | None = None
    """What DCP calls the leaves, where DCP saved them (`interop.dcp.names`)."""


def decode_layout(data: bytes) -> Layout:
    """The layout in a layout chunk. Raises `Corrupt`."""
    try:
        document = canonical.decode(data)
        leaves = {
            path: _placed(leaf)
            for tree in document["trees"].values()
            for path, leaf in tree.items()
        }
        return Layout(canonical.field(document, "world", int), leaves, document.get("dcp"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"a commit's layout is damaged: {error!r}; run `ckptstore fsck`") from error


def _placed(leaf: Mapping[str, Any]) -> Placed:
    return Placed(
        tuple(leaf["mesh"][0]) if leaf["mesh"] else None,
        tuple(leaf["placements"]),
        tuple(Box(tuple(offsets), tuple(lengths)) for offsets, lengths in leaf["boxes"]),
        tuple(tuple(ranks) for ranks in leaf["ranks"]),
    )
