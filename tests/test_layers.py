"""The rooms of the package: who may import whom, what stays out of a query's start, what ships."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.size import owner

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ckptstore"

ROOMS: dict[str, tuple[str, ...]] = {
    "core": (),
    "storage": (),
    "objects": (),
    "log": (),
    "index": ("sqlalchemy", "alembic", "lmdb"),
    "repository": (),
    "state": ("torch", "pickle"),
    "commit": (),
    "restore": (),
    "distributed": ("torch",),
    "maintenance": (),
    "api": (),
    "plugin": (),
    "plugins": (
        *("torch", "pickle", "fsspec", "s3fs", "obstore", "sqlalchemy", "starlette", "uvicorn"),
    ),
}
"""Each room, from the ground up, and the guarded packages it may import. A file of the core imports
from its own room and from lower ones. `plugin` is the surface, and `plugins` are the files that
`tests.support.size.PLUGINS` names."""

DOORS = {
    "storage": ("plugins.buckets.bucket",),
    "store": (
        *("plugins.adopt.adoption", "plugins.signing.signatures", "plugins.follow.follower"),
        *("plugins.reports.difference", "plugins.schedule.schedule", "plugins.tiers.tiers"),
    ),
    "plugin.stores": ("plugins.adopt.adoption",),
    "snapshot": ("plugins.adopt.materializing",),
    "maintenance_api": (
        *("plugins.adopt.holds", "plugins.analysis.history", "plugins.engine.on"),
        *("plugins.reports.doctor", "plugins.reports.forecast", "plugins.reports.usage"),
    ),
    "internals": ("plugins.analysis.measurements", "plugins.tiers.tiers"),
    "open_store": ("plugins.tiers.tiers",),
    "commit.write": ("plugins.analysis.measure",),
    "index": ("plugins.postgres.database", "plugins.postgres.log"),
    "repository.store_handle": ("plugins.postgres.database",),
    "maintenance.check.offline_store": ("plugins.postgres.log",),
    "maintenance.mirror": ("plugins.signing.signatures",),
    "maintenance.check.fsck": ("plugins.signing.signatures",),
}
"""Who in the core enters a plugin: a method of the store that a plugin carries out, a command, who
chooses where the log lies, and who copies or checks the objects of all."""

BESIDE = {
    "cli": ("engine", "formats", "postgres"),
    "dcp": ("foreign",),
    "parsers": ("foreign",),
    "torchsnapshot": ("foreign",),
    "adopt": ("cli", "foreign", "parsers"),
    "formats": ("foreign", "dcp", "adopt", "parsers", "torchsnapshot"),
    "trainers": ("dcp", "adopt", "formats"),
    "trackers": ("adopt", "formats", "trainers", "reports"),
    "torch_checkpointing": ("foreign", "adopt"),
    "reports": ("cli",),
    "signing": ("cli",),
    "analysis": ("cli", "reports"),
    "ui": ("cli", "adopt", "analysis", "parsers", "reports"),
    "follow": ("cli", "formats"),
    "engine": ("adopt", "formats", "parsers"),
    "hosts": ("torchft",),
}
"""The plugins that a plugin stands on."""

GUARDED = {package for packages in ROOMS.values() for package in packages} | {
    "_pickle",
    "marshal",
    "shelve",
}
"""Packages that only the rooms that name them may import."""

STATE_STANDS_BESIDE = ("storage", "log", "index", "repository")
"""`state` turns an application state into leaves. It does no I/O, and these rooms do not know
it."""

QUICK = (
    "ckptstore",
    "ckptstore.errors",
    "ckptstore.core.config",
    "ckptstore.core.geometry",
    "ckptstore.core.ids",
    "ckptstore.core.model",
    "ckptstore.objects.documents",
    "ckptstore.storage",
    "ckptstore.log.entries",
    "ckptstore.log.state",
    "ckptstore.log.log",
    "ckptstore.index.queries",
    "ckptstore.cli.main",
    "ckptstore.plugins.hosts.agent",
)
SLOW = (
    *("numpy", "torch", "sqlalchemy", "alembic", "fsspec", "s3fs", "pydantic", "lmdb"),
    *("starlette", "uvicorn"),
)


@cache
def modules() -> dict[str, Path]:
    """Every source file of the package by its dotted name below `ckptstore`.

    `migrations/` counts as part of the package, which ships it.
    """
    found = {_dotted(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    for path in (ROOT / "migrations").rglob("*.py"):
        found[_dotted(Path("migrations") / path.relative_to(ROOT / "migrations"))] = path
    return found


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def plugin_of(module: str) -> str:
    return owner(modules()[module].relative_to(PACKAGE).as_posix())


def is_plugin(module: str) -> bool:
    inside = modules()[module].is_relative_to(PACKAGE)  # migrations stand beside it
    return inside and plugin_of(module) != "core"


def room(module: str) -> str:
    """The room of a module: its folder, or the plugins; `errors` is core, migrations are index,
    other single files are the API."""
    if is_plugin(module):
        return "plugins"
    first = module.partition(".")[0]
    if first in ROOMS:
        return first
    rooms = {"errors": "core", "migrations": "index"}
    single = modules()[module].parent == PACKAGE
    assert first in rooms or single, f"ckptstore.{module} is in no room: add it to ROOMS"
    return rooms.get(first, "api")


def imports(path: Path, *, typing: bool = True) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import of a file, wherever it stands in it.

    `from a import b` gives `a.b` if that is a module. Without `typing`, imports under
    `if TYPE_CHECKING:` are left out: they are never executed.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    never = {
        id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not typing and id(node) in never:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write `ckptstore…`"
            assert node.module is not None
            for alias in node.names:
                below = f"{node.module}.{alias.name}".removeprefix("ckptstore.")
                is_module = node.module.startswith("ckptstore") and below in modules()
                yield node.lineno, f"ckptstore.{below}" if is_module else node.module


def _is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


@cache
def own_imports() -> list[tuple[str, str, str]]:
    """Importing module, imported module, and where, for imports inside the package."""
    return [
        (module, name.removeprefix("ckptstore").removeprefix("."), f"{path.name}:{line}")
        for module, path in modules().items()
        for line, name in imports(path)
        if name.partition(".")[0] == "ckptstore"
    ]


def test_a_file_imports_only_from_its_own_or_a_lower_room() -> None:
    order = list(ROOMS)
    upward = [
        f"{place}: {module} ({room(module)}) imports {name} ({room(name)})"
        for module, name, place in own_imports()
        if order.index(room(name)) > order.index(room(module)) and not is_plugin(name)
    ]
    assert not upward, "\n".join(upward)


def test_a_plugin_imports_nothing_of_ours_but_the_public_surface() -> None:
    through = [
        f"{place}: {module} imports {name}"
        for module, name, place in own_imports()
        if is_plugin(module)
        and not (name in {"", "errors"} or room(name) == "plugin")
        and plugin_of(name) not in (plugin_of(module), *BESIDE.get(plugin_of(module), ()))
    ]
    assert not through, "\n".join(through)


def test_the_core_enters_plugins_by_its_doors_alone() -> None:
    found = {
        (module, name)
        for module, name, _ in own_imports()
        if is_plugin(name) and not is_plugin(module)
    }
    assert found == {(module, name) for module, names in DOORS.items() for name in names}


def test_the_surface_offers_what_plugins_use_and_no_more() -> None:
    offered = {
        (module, alias.asname or alias.name)
        for module, path in modules().items()
        if room(module) == "plugin" and module != "plugin.stores"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    used = {
        ((node.module or "").removeprefix("ckptstore."), alias.name)
        for module, path in modules().items()
        if is_plugin(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not offered - used, "nobody uses these: take them out of the surface"


def test_state_and_storage_do_not_know_each_other() -> None:
    astray = [
        f"{place}: {module} imports {name}"
        for module, name, place in own_imports()
        if (room(module) == "state" and room(name) in STATE_STANDS_BESIDE)
        or (room(module) in STATE_STANDS_BESIDE and room(name) == "state")
    ]
    assert not astray, "\n".join(astray)


def test_no_modules_import_each_other_in_a_circle() -> None:
    below: dict[str, set[str]] = {module: set() for module in modules()}
    for module, name, _ in own_imports():
        below[module].add(name)
    # A module that imports none of the rest, or that none of the rest imports, is in no circle.
    left = set(below)
    while free := {module for module in left if not below[module] & (left - {module})} | {
        module for module in left if not any(module in below[other] for other in left - {module})
    }:
        left -= free
    circles = [f"{module} imports {', '.join(sorted(below[module] & left))}" for module in left]
    assert not circles, "\n".join(sorted(circles))


def test_who_stores_or_reads_values_knows_all_types() -> None:
    """By `state.codecs`, unless it is a file that `state.codecs` imports; optimizers take only two
    classes from there, and callers register types of their own."""
    below: dict[str, set[str]] = {module: set() for module in modules()}
    for module, name, _ in own_imports():
        below[module].add(name)
    exempt, new = {"", "state.optimizers"}, {"state.codecs"}
    while new:
        exempt |= new
        new = {name for module in new for name in below[module]} - exempt
    registries = {"state.containers", "state.values"}
    astray = [
        module
        for module, names in below.items()
        if names & registries and "state.codecs" not in names and module not in exempt
    ]
    assert not astray, f"import ckptstore.state.codecs instead: {sorted(astray)}"


def test_a_guarded_package_is_imported_only_where_it_belongs() -> None:
    astray = [
        f"{path.relative_to(ROOT)}:{line} imports {package}"
        for module, path in modules().items()
        for line, name in imports(path, typing=False)
        if (package := name.partition(".")[0]) in GUARDED and package not in ROOMS[room(module)]
    ]
    assert not astray, "\n".join(astray)


@pytest.mark.parametrize("module", QUICK)
def test_a_query_starts_without_the_slow_packages(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} imports {done.stdout.strip()}"


def test_every_package_ships() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = tomllib.loads(text)["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(filter(None, ("ckptstore", *Path(module.replace(".", "/")).parts)))
        if path.name == "__init__.py"
        else ".".join(filter(None, ("ckptstore", *module.split(".")[:-1])))
        for module, path in modules().items()
    }
    assert set(listed) == folders


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
