"""Draw docs/rooms.svg, the picture of the rooms, from the import table.
`python -m tests.support.rooms` writes it anew.

An arrow runs from a room to a room that its files import, unless a longer way leads there too. The
height of a room is the longest way down to `core`; a room that nothing needs earlier stretches up
to the first one that imports it. Colors are opaque and readable on a light and on a dark page.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from pathlib import Path

from tests.test_layers import ROOMS, own_imports, room

PICTURE = Path(__file__).parents[2] / "docs" / "rooms.svg"

SAYS = {
    "core": "frozen values and arithmetic: ids, geometry, refs, settings; no I/O",
    "storage": "where objects lie: the contract, local disks, the read cache",
    "objects": "the bytes of chunks, packs, pages, schemas and documents",
    "log": "numbered entries, their rules, sessions",
    "index": "catalog in SQL, chunk index in LMDB",
    "repository": "locate, read, verify and write chunks",
    "state": "torch: flatten, match, inflate",
    "commit": "plan, hash, write, publish; async",
    "restore": "plan, read, inflate, mmap",
    "distributed": "one commit and one restore over many ranks",
    "maintenance": "retention, gc, fsck, repair, mirrors, statistics",
    "api": "Store and Snapshot: what a trainer sees",
    "plugin": "the public surface for plugins",
    "plugins": "buckets, DCP, files, trainers, trackers, torchft, TorchSnapshot, analysis, ui",
}

WIDTH, MARGIN, ROW, GAP = 860, 20, 46, 26
HIGH = ("plugin", "api")
COLORS = {"top": "#8250df", "torch": "#bc4c00", "rest": "#0969da"}
ARROW = "#848d97"

Graph = Mapping[str, frozenset[str]]


@cache
def imports_of_rooms() -> Graph:
    """Which other rooms the files of each room import; without the doors into plugins."""
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module, name, _ in own_imports():
        if room(name) != "plugins":
            found[room(module)].add(room(name))
    return {name: frozenset(below - {name}) for name, below in found.items()}


def reduced(graph: Graph) -> Graph:
    """The graph without each arrow that a longer way makes needless."""

    def below(name: str) -> frozenset[str]:
        return graph[name].union(*map(below, graph[name]))

    return {name: direct - frozenset().union(*map(below, direct)) for name, direct in graph.items()}


def rows(graph: Graph) -> dict[str, tuple[int, int]]:
    """The lowest and the highest row of each room, counted from the ground."""

    def depth(name: str) -> int:
        return 1 + max(map(depth, graph[name]), default=-1)

    def highest(name: str) -> int:
        above = [depth(other) for other, below in graph.items() if name in below]
        return min(above) - 1 if above else depth(name)

    spans = {name: (depth(name), highest(name)) for name in graph}
    for name, (low, high) in spans.items():
        beside = [sum(a <= row <= b for a, b in spans.values()) for row in range(low, high)]
        if max(beside, default=0) > 2:  # no row has space for three: it stands at its top alone
            spans[name] = (high, high)
    return spans


def draw() -> str:
    """The whole picture as SVG."""
    graph = reduced(imports_of_rooms())
    placed = _boxes(rows(graph))
    height = 2 * MARGIN + max(y + h for _, y, _, h in placed.values()) - MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" '
            'font-family="system-ui, Helvetica, Arial, sans-serif">',
            "<title>The rooms of ckptstore: an arrow points at a room that is imported</title>",
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{ARROW}"/></marker>'
            "</defs>",
            *(line for name in graph for line in _arrows(placed, name, sorted(graph[name]))),
            *(line for name in graph for line in _box(name, *placed[name])),
            "</svg>",
            "",
        ]
    )


def _boxes(spans: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int, int, int]]:
    """Left, top, width and height of each room: two rooms of one row stand side by side, the one
    that stretches over several rows on the right."""
    top = max(high for _, high in spans.values())
    half = (WIDTH - 2 * MARGIN - GAP) // 2
    placed = {}
    for name, (low, high) in spans.items():
        beside = [other for other, (a, b) in spans.items() if a <= high and low <= b]
        tall = [other for other in beside if spans[other][0] < spans[other][1]]
        on_right = name in (tall or beside[1:])
        placed[name] = (
            MARGIN + on_right * (half + GAP),
            MARGIN + (top - high) * (ROW + GAP),
            WIDTH - 2 * MARGIN if beside == [name] else half,
            (high - low) * (ROW + GAP) + ROW,
        )
    return placed


def _arrows(
    placed: Mapping[str, tuple[int, int, int, int]], name: str, below: Iterable[str]
) -> Iterable[str]:
    left, top, width, height = placed[name]
    for other in below:
        other_left, other_top, other_width, _ = placed[other]
        # A wide room is left or reached above the middle of the narrow one.
        start, end = left + width // 2, other_left + other_width // 2
        if width > other_width:
            start = end
        elif other_width > width:
            end = start
        yield (
            f'<path d="M{start} {top + height}L{end} {other_top}" fill="none" stroke="{ARROW}" '
            'stroke-width="1.6" marker-end="url(#head)"/>'
        )


def _box(name: str, left: int, top: int, width: int, height: int) -> Iterable[str]:
    color = COLORS["top" if name in HIGH else "torch" if "torch" in ROOMS[name] else "rest"]
    middle = top + height // 2
    yield (f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="7" fill="{color}"/>')
    yield (
        f'<text x="{left + 14}" y="{middle + 5}" fill="#ffffff" font-size="15" '
        f'font-weight="600">{escape(name)}</text>'
    )
    yield (
        f'<text x="{left + 134}" y="{middle + 5}" fill="#ffffff" font-size="12.5">'
        f"{escape(SAYS[name])}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE}")
