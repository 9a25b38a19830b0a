"""Nothing is public without an entry in the net, or a line that says which tests try it; and both
use what they name."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptstore
from ckptstore.cli.commands import COMMANDS
from tests.net import copies, exchanges, registry

ROOT = Path(__file__).parents[2]
ENTRIES = (
    *registry.WRITERS,
    *registry.READERS,
    *registry.RANKED,
    *registry.OPERATIONS,
    *registry.UPKEEP,
    *registry.PLACES,
    *(entry for entry, _ in (*exchanges.ACTIONS, *copies.ACTIONS)),
)


def public() -> set[str]:
    """Every name of the package, every method of `Store` and `Snapshot`, every verb."""
    names = {name for name in ckptstore.__all__ if not name.startswith("_")}
    for kind in (ckptstore.Store, ckptstore.Snapshot):
        names |= {f"{kind.__name__}.{name}" for name in dir(kind) if not name.startswith("_")}
    return names | {f"$ {command.name}" for command in COMMANDS}


def covered() -> set[str]:
    return {name for entry in ENTRIES for name in entry.covers}


def test_every_public_name_is_in_the_net_or_says_where_it_is_tried() -> None:
    apart = {name for names in registry.APART.values() for name in names}
    assert not covered() & apart, "in the net, and said to be apart"
    assert covered() | apart == public()


def test_the_net_uses_what_its_entries_say_they_cover() -> None:
    assert not covered() - used_in("tests/net") - used_in("tests/shared/sites.py")


@pytest.mark.parametrize("place", sorted(registry.APART))
def test_what_is_tried_elsewhere_is_used_there(place: str) -> None:
    """In the test, file or folder that the table names."""
    assert not set(registry.APART[place]) - used_in(place)


@cache
def used_in(place: str) -> set[str]:
    """The public names that the tests at `place` use: `path` or `path::test`.

    A method counts where something other than a module has an attribute of its name, a verb where
    a text in a call or a list is it.
    """
    path, _, test = place.partition("::")
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
    assert files, f"{place} is not there"
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    modules = {name for tree in trees for name in imported(tree)}
    parts: list[ast.AST] = list(trees)
    if test:
        found = (part for tree in trees for part in ast.walk(tree))
        parts = [part for part in found if isinstance(part, ast.FunctionDef) and part.name == test]
        assert parts, f"{place} is not there"
    words = {word for part in parts for word in words_of(part, modules)}
    return {name for name in public() if word_for(name) in words}


def word_for(name: str) -> str:
    if name.startswith("$ "):
        return f'"{name[2:]}"'
    return f".{name.partition('.')[2]}" if "." in name else name


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports by name."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            yield from ((each.asname or each.name).partition(".")[0] for each in part.names)


def words_of(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Names, attributes with their dot, and texts in quotes."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Attribute):
            of_module = isinstance(part.value, ast.Name) and part.value.id in modules
            yield part.attr if of_module else f".{part.attr}"
        elif isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.ImportFrom):
            yield from (each.name for each in part.names)
        elif isinstance(part, ast.Call | ast.List | ast.Tuple):
            items = part.args if isinstance(part, ast.Call) else part.elts
            yield from (
                f'"{item.value.split()[0]}"'
                for item in items
                if isinstance(item, ast.Constant)
                and isinstance(item.value, str)
                and item.value.strip()
            )
