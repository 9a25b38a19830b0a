"""The folders say the architecture: who may import whom, what stays out of a query's start, what ships."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ckptstore"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "text"),
    ("core",),
    ("objects", "history"),
    (
        "objects.backend",
        "objects.local",
        "objects.local_directories",
        "objects.local_files",
        "objects.local_writer",
        "objects.pointers",
        "objects.remote",
        "objects.s3",
        "objects.s3_obstore",
        "objects.s3_obstore_upload",
        "objects.s3_reads",
        "objects.s3_requests",
        "objects.s3_upload",
    ),
    (
        "objects.footer_batches",
        "objects.footers",
        "objects.packing",
        "objects.read_cache",
        "objects.store",
        "history.log",
        "history.log_files",
        "history.sessions",
        "index",
        "migrations",
        "state",
    ),
    ("engine",),
    ("upkeep",),
    ("access", "committing", "keeping", "pointing", "store", "snapshot", ""),
    ("cli", "web", "interop", "__main__"),
)
"""From the ground up. A module belongs to the longest prefix that names it; `""` is `ckptstore/__init__.py`."""

STATE_MAY_IMPORT = ("errors", "core", "objects", "state")
"""`state` turns what the user hands in into leaves; where these are stored is not its business."""

ONLY_IN = {
    "torch": ("state", "interop"),
    "sqlalchemy": ("index", "history.log", "migrations"),
    "alembic": ("index", "migrations"),
    "lmdb": ("index.chunks",),
    "fsspec": ("objects.backend", "objects.remote"),
    "s3fs": ("objects.backend", "objects.s3_requests"),
    "obstore": ("objects.s3_obstore", "objects.s3_obstore_upload"),
    "pickle": ("state.pickles", "interop.pickles"),
    "_pickle": (),
    "marshal": (),
    "shelve": (),
}

QUICK = (
    "ckptstore",
    "ckptstore.errors",
    "ckptstore.core.config",
    "ckptstore.core.geometry",
    "ckptstore.core.ids",
    "ckptstore.core.model",
    "ckptstore.core.refs",
    "ckptstore.objects.documents",
    "ckptstore.storage.contract",
    "ckptstore.log.entries",
    "ckptstore.log.fold",
    "ckptstore.log.log",
    "ckptstore.index.queries",
    "ckptstore.cli.main",
)
SLOW = ("numpy", "torch", "sqlalchemy", "alembic", "fsspec", "s3fs", "pydantic", "lmdb")


def modules() -> dict[str, Path]:
    """Every source file of the package by its dotted name below `ckptstore`; `migrations/` counts as part of it."""
    found = {_dotted(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found |= {_dotted(Path("migrations") / path.relative_to(ROOT / "migrations")): path for path in (ROOT / "migrations").rglob("*.py")}
    return found


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, known: dict[str, Path], *, typing: bool = True) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, wherever in the file; `from a import b` gives `a.b` if that is a module.

    Without `typing`, what stands under `if TYPE_CHECKING:` is left out: it is never executed.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    guarded = set() if typing else {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write `from ckptstore…`"
            assert node.module is not None
            for alias in node.names:
                below = f"{node.module}.{alias.name}".removeprefix("ckptstore.")
                yield node.lineno, f"ckptstore.{below}" if below in known else node.module


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def layer(module: str) -> int:
    matches = [(len(prefix), number) for number, prefixes in enumerate(LAYERS) for prefix in prefixes if within(module, prefix)]
    assert matches, f"ckptstore.{module} is in no layer: add it to LAYERS and to docs/architecture.md"
    return max(matches)[1]


def own_imports() -> Iterator[tuple[str, str, str]]:
    """Importing module, imported module, and where, for imports inside the package."""
    known = modules()
    for module, path in known.items():
        for line, name in imports(path, known):
            if within(name, "ckptstore"):
                yield module, name.removeprefix("ckptstore").removeprefix("."), f"{path.relative_to(ROOT)}:{line}"


@cache
def executed_imports() -> list[tuple[str, str, str]]:
    """Importing module, imported module, and where, of everything that is imported when code runs."""
    known = modules()
    return [
        (module, name, f"{path.relative_to(ROOT)}:{line}")
        for module, path in known.items()
        for line, name in imports(path, known, typing=False)
    ]


def test_a_file_imports_only_from_its_own_or_a_lower_layer() -> None:
    upward = [f"{place}: {module} imports {name}" for module, name, place in own_imports() if layer(name) > layer(module)]
    assert not upward, "\n".join(upward)


def test_state_knows_nothing_of_storage_and_history() -> None:
    for module, name, place in own_imports():
        if within(module, "state"):
            assert any(within(name, prefix) for prefix in STATE_MAY_IMPORT), f"{place}: state imports {name}"
            assert layer(name) <= layer("objects") or within(name, "state"), f"{place}: state imports {name}, which does I/O"


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_foreign_package_is_imported_only_where_it_belongs(package: str) -> None:
    astray = [
        f"{place}: {name}"
        for module, name, place in executed_imports()
        if within(name, package) and not any(within(module, home) for home in ONLY_IN[package])
    ]
    assert not astray, "\n".join(astray)


@pytest.mark.parametrize("module", QUICK)
def test_what_a_query_imports_starts_without_the_slow_packages(module: str) -> None:
    code = f"import sys, {module}; print(*[package for package in {SLOW} if package in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} imports {done.stdout.strip()}"


def test_every_package_ships() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {_dotted(path.parent.relative_to(ROOT) / "__init__.py") for path in PACKAGE.rglob("*.py")}
    folders |= {_dotted(Path("ckptstore") / path.parent.relative_to(ROOT) / "__init__.py") for path in (ROOT / "migrations").rglob("*.py")}
    assert set(setuptools["packages"]) == folders


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
