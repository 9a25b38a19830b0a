"""Data of two origins is not paired by position in the core: a row carries its id.

Counted are strict `zip`s and `map`s over values of several names, `next` on a stream, and `id()`.
Values of one name, such as columns of one table, have one origin, and so have constants.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ckptstore"
CORE = (
    *("core", "storage", "objects", "log", "index", "repository", "state", "commit", "restore"),
    *("distributed", "maintenance", "plugins/foreign"),
)

ALLOWED = {
    "core/identity.py": (9, "the map and the set by identity, which keep their keys alive"),
    "core/text.py": (2, "the columns of a table, and the cells of its own rows"),
    "core/model.py": (1, "dimensions of two boxes of one tensor"),
    "plugins/foreign/strides.py": (3, "size and stride of each dimension of one tensor"),
    "index/queries.py": (1, "the columns that a statement names, and those of its own rows"),
    "objects/codecs.py": (1, "frames, and the contents that one call of zstd returns for them"),
    "objects/pages.py": (3, "columns of one page, whose lengths the decoder checks"),
    "objects/schema.py": (1, "columns of one schema, whose lengths the decoder checks"),
    "state/leaf_sources.py": (1, "children, paths and keys of one node: the rows of a tree"),
    "state/optimizer_forms.py": (1, "keys and names of one group, whose lengths are compared"),
    "state/parameter_matching.py": (1, "order, which decides where shapes prove it"),
    "state/values.py": (2, "keys and columns of one block of one leaf, whose lengths are compared"),
    "state/shards.py": (1, "placement, size and coordinate for each dimension of a mesh"),
    "state/stateful.py": (1, "torch's own order, by which `load_state_dict` goes"),
    "repository/pack_writer.py": (1, "a counter that names packs"),
    "maintenance/check/indexes.py": (1, "two lists of equal length are compared, not paired"),
    "maintenance/mirror.py": (1, "parents by the document and the plan, both in its order"),
    "maintenance/repair.py": (1, "two lines are compared byte by byte"),
    "maintenance/rescue.py": (1, "the first name that is free"),
}
"""Sites that are no pairing of data of two origins, by file, with the reason."""


def names_in(value: ast.expr) -> frozenset[str]:
    """The variables that a value is made from; functions that are called, and constants, do not
    count."""
    called = {node.func for node in ast.walk(value) if isinstance(node, ast.Call)}
    return frozenset(
        node.id
        for node in ast.walk(value)
        if isinstance(node, ast.Name) and node not in called and not node.id.lstrip("_").isupper()
    )


def pairings(source: str) -> Iterator[int]:
    """The lines of a file that pair by position."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        match node.func.id:
            case "zip" if len(node.args) > 1:
                values = node.args
            case "map" if len(node.args) > 2:
                values = node.args[1:]
            case "next" if len(node.args) == 1 and isinstance(
                node.args[0], ast.Name | ast.Attribute
            ):
                yield node.lineno
                continue
            case "id":
                yield node.lineno
                continue
            case _:
                continue
        if len(set(map(names_in, values)) - {frozenset()}) > 1:
            yield node.lineno


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("zip(a, b, strict=True)", 1),
        ("map(f, a, b)", 1),
        ("next(stream)", 1),
        ("known[id(value)]", 1),
        ("zip(table['a'].tolist(), table['b'].tolist(), strict=True)", 0),
        ("zip(_COLUMNS, row, strict=True)", 0),
        ("next(iter(found))", 0),
        ("next(x for x in found)", 0),
        ("pairwise(ends)", 0),
        ("zip(*rows, strict=True)", 0),
    ],
)
def test_what_counts_as_a_pairing(code: str, count: int) -> None:
    assert len(list(pairings(code))) == count


def test_the_core_pairs_nothing_by_position() -> None:
    where: list[str] = []
    for room in CORE:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            file = path.relative_to(PACKAGE).as_posix()
            lines = list(pairings(path.read_text(encoding="utf-8")))
            allowed, _ = ALLOWED.get(file, (0, ""))
            assert len(lines) >= allowed, f"{file} has less: take it out of ALLOWED"
            where += [f"ckptstore/{file}:{line}" for line in lines] if len(lines) > allowed else []
    assert not where, f"let rows carry their ids: {where}"
