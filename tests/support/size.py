"""How large the package is: tokens, files, the longest file and functions, and the offenders.
`python -m tests.support.size [FOLDER]`; for the package itself, the core and each plugin as well.

A token is one of the standard library's `tokenize`. Comments and layout (COMMENT, NL, NEWLINE,
INDENT, DEDENT, ENCODING, ENDMARKER) do not count. Everything else does, a docstring as one token.
The length of a function is its lines from `def` or its first decorator to its end, with the
functions inside it.
"""

import ast
import sys
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median

PLUGINS = {
    "buckets": ("plugins/buckets/",),
    "foreign": ("plugins/foreign/",),
    "cli": ("cli/", "__main__.py"),
    "dcp": ("interop/dcp/", "interop/__init__.py"),
    "parsers": ("plugins/parsers/",),
    "adopt": ("plugins/adopt/",),
    "formats": ("interop/formats/", "interop/fsspec.py", "interop/serving.py"),
    "trainers": (
        *("interop/lightning/", "interop/accelerate/", "interop/torchtitan/", "interop/ray.py"),
        *("interop/transformers.py", "interop/deepspeed", "interop/directories.py"),
        *("interop/megatron.py", "interop/leaving.py", "interop/background_saves.py"),
        *("interop/oldest.py",),
    ),
    "trackers": (
        *("interop/mlflow.py", "interop/trackers.py", "interop/trackio.py", "interop/wandb.py"),
        "interop/vllm.py",
    ),
    "torchft": ("interop/torchft/",),
    "torchsnapshot": ("interop/torchsnapshot/",),
    "torch_checkpointing": ("plugins/torch_checkpointing/",),
    "analysis": ("plugins/analysis/", "analysis.py", "averages.py", "history.py"),
    "reports": ("plugins/reports/",),
    "ui": ("plugins/ui/",),
    "postgres": ("plugins/postgres/",),
    "signing": ("plugins/signing/",),
    "follow": ("plugins/follow/",),
    "tiers": ("plugins/tiers/",),
    "schedule": ("plugins/schedule/",),
    "engine": ("plugins/engine/",),
    "hosts": ("plugins/hosts/",),
}
"""How the names of the files of each plugin begin, below the package; all others are the core."""


def owner(below: str) -> str:
    """The plugin of a file, by its name below the package; `core` if it is of none."""
    owners = (plugin for plugin, begins in PLUGINS.items() if below.startswith(begins))
    return next(owners, "core")


FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60

_NOT_COUNTED = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A file or a function, and its lines."""

    place: str
    lines: int


@dataclass(frozen=True, slots=True)
class Size:
    """Sums over files."""

    tokens: int
    files: tuple[Piece, ...]
    functions: tuple[Piece, ...]

    @property
    def large_files(self) -> tuple[Piece, ...]:
        return _over(self.files, FILE_LINES_MAX)

    @property
    def long_functions(self) -> tuple[Piece, ...]:
        return _over(self.functions, FUNCTION_LINES_MAX)


def measure(sources: Iterable[tuple[str, bytes]]) -> Size:
    """The size of sources, each a name and the bytes of the file."""
    tokens = 0
    files: list[Piece] = []
    functions: list[Piece] = []
    for name, source in sources:
        tokens += sum(
            token.type not in _NOT_COUNTED for token in tokenize.tokenize(BytesIO(source).readline)
        )
        files.append(Piece(name, len(source.splitlines())))
        functions += _functions(name, source)
    return Size(tokens, tuple(files), tuple(functions))


def sources_in(folder: Path) -> list[tuple[str, bytes]]:
    """The Python files below `folder`, by their names from the folder that it lies in."""
    return [
        (path.relative_to(folder.parent).as_posix(), path.read_bytes())
        for path in sorted(folder.rglob("*.py"))
    ]


def shares(sources: Iterable[tuple[str, bytes]]) -> dict[str, int]:
    """The tokens of the core and of each plugin, of sources named `ckptstore/…`."""
    tokens = dict.fromkeys(("core", *PLUGINS), 0)
    for name, source in sources:
        tokens[owner(name.partition("/")[2])] += measure([(name, source)]).tokens
    return tokens


def report(size: Size) -> str:
    """A table of sums, and of the offenders below it."""
    rows = [
        ("tokens", f"{size.tokens:,}"),
        ("files", f"{len(size.files):,}"),
        ("lines", f"{sum(file.lines for file in size.files):,}"),
    ]
    rows.append(("largest file", _described(size.files)))
    rows.append(("functions", f"{len(size.functions):,}"))
    rows.append(("longest function", _described(size.functions)))
    rows.append(
        (
            "median function",
            f"{median(function.lines for function in size.functions):g} lines"
            if size.functions
            else "-",
        )
    )
    lines = [f"{name:<17} {text}" for name, text in rows]
    lines += _listed(f"files over {FILE_LINES_MAX} lines", size.large_files)
    lines += _listed(f"functions over {FUNCTION_LINES_MAX} lines", size.long_functions)
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        print(report(measure(sources_in(Path(arguments[0]).resolve()))))
        return
    sources = sources_in(Path(__file__).parents[2] / "ckptstore")
    for name, tokens in shares(sources).items():
        print(f"{name:<17} {tokens:,} tokens")
    print(report(measure(sources)))


def _functions(name: str, source: bytes) -> list[Piece]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(Piece(f"{name}:{node.lineno} {node.name}", node.end_lineno - first + 1))
    return found


def _over(pieces: Iterable[Piece], limit: int) -> tuple[Piece, ...]:
    return tuple(
        sorted((piece for piece in pieces if piece.lines > limit), key=lambda piece: -piece.lines)
    )


def _described(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return "-"
    longest = max(pieces, key=lambda piece: piece.lines)
    return f"{longest.lines} lines, {longest.place}"


def _listed(title: str, pieces: Sequence[Piece]) -> list[str]:
    return [
        "",
        f"{title}: {len(pieces)}",
        *(f"{piece.lines:>6}  {piece.place}" for piece in pieces),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
