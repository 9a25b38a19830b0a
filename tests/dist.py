"""`make dist`: build the sdist, the wheel from the sdist, and try the wheel as a user does.

The wheel is installed in a fresh virtual environment. There, away from the checkout, run the first
snippet of the README, the command, and mypy on code that uses the package rightly and wrongly. Ends
with 1 and the reason if something fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ckptstore

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VENV = ROOT / ".venv-dist"
CONSTRAINTS = ROOT / "constraints.txt"

PREPARED = """\
import torch

model = torch.nn.ModuleDict(
    {
        "embedding": torch.nn.Embedding(8, 4),
        "encoder": torch.nn.Linear(4, 4),
        "layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)]),
    }
)
optimizer = torch.optim.AdamW(model.parameters())


def train_one_step() -> float:
    return 0.5


"""
"""What the README's snippet finds."""

TYPED = """\
import ckptstore

with ckptstore.open("store") as store:
    commit = store.commit({"x": 1}, step=1, metrics={"loss": 0.5})
    name: str = commit.id
    step: int | None = store.checkout("latest").step
"""
MISTYPED = TYPED + "    wrong: int = commit.id\n"


def main() -> int:
    started = time.monotonic()
    sdist, wheel = build()
    print(f"dist: {sdist.name} ({size(sdist)}), {wheel.name} ({size(wheel)})")
    try:
        python = install(wheel)
        with tempfile.TemporaryDirectory() as elsewhere:
            check(python, Path(elsewhere))
    finally:
        shutil.rmtree(VENV, ignore_errors=True)
    print(f"dist: both are sound ({time.monotonic() - started:.0f} s)")
    return 0


def build() -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, so that the sdist lacks nothing."""
    shutil.rmtree(DIST, ignore_errors=True)
    backend = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run(sys.executable, "-c", backend, cwd=ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    pip(Path(sys.executable), "wheel", "--no-deps", "--no-build-isolation", "-w", DIST, sdist)
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def install(wheel: Path) -> Path:
    """The Python of a fresh environment with the wheel and what it needs, torch before all else."""
    shutil.rmtree(VENV, ignore_errors=True)
    run(sys.executable, "-m", "venv", VENV)
    python = VENV / "bin" / "python"
    pip(python, "install", "-c", CONSTRAINTS, "torch")
    pip(python, "install", "-c", CONSTRAINTS, wheel, "mypy")
    pip(python, "check")
    return python


def check(python: Path, place: Path) -> None:
    where = run(python, "-c", "import ckptstore; print(ckptstore.__file__)", cwd=place).strip()
    expect(Path(where).is_relative_to(VENV), f"it is imported from {where}")
    command = python.with_name("ckptstore")
    said = run(command, "--version", cwd=place)
    expect(said == f"ckptstore {ckptstore.__version__}\n", f"--version says {said!r}")
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    (place / "loop.py").write_text(PREPARED + snippet[1])
    run(python, "-W", "error", "loop.py", cwd=place)
    log = run(command, "-s", "checkpoints", "log", cwd=place)
    expect("1000" in log, f"after the README's loop the log is {log!r}")
    (place / "typed.py").write_text(TYPED)
    (place / "mistyped.py").write_text(MISTYPED)
    mypy = [python, "-m", "mypy", "--strict", "--follow-imports=silent"]
    said = run(*mypy, "typed.py", "mistyped.py", cwd=place, code=1)
    right = said.startswith("mistyped.py:7: error: Incompatible types") and "Found 1 error" in said
    expect(right, f"mypy says of right and wrong types {said!r}")


def pip(python: Path, *words: str | Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *words, cwd=ROOT)


def run(*words: str | Path, cwd: Path = ROOT, code: int = 0) -> str:
    """What a program prints on standard output. Ends the run if its exit code is another."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    text = f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    expect(done.returncode == code, f"exit code {done.returncode} of {text}")
    return done.stdout


def expect(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"dist: {what}")


def size(file: Path) -> str:
    return f"{file.stat().st_size / 1024:.0f} KiB"


if __name__ == "__main__":
    sys.exit(main())
