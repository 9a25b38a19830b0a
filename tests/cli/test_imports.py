"""What a command imports decides how long somebody waits for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.running import environment

NEVER = {"torch", "s3fs", "fsspec", "alembic", "pydantic", "shtab"}
SLOW = NEVER | {"numpy", "sqlalchemy", "lmdb"}


def imported(words: str, store: Path) -> set[str]:
    """The packages that `ckptstore words` has imported when it ends well."""
    code = (
        f"import sys; from ckptstore.cli.main import main; assert main({words.split()!r}) == "
        "0; "
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment({"CKPTSTORE": str(store)}),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    "words",
    [
        "log",
        "log -n 20 --graph --json",
        "show",
        "ls",
        "ls best model",
        "tag",
        "--version --json",
    ],
)
def test_a_query_imports_nothing_slow(made_store: Path, words: str) -> None:
    assert imported(words, made_store) & SLOW == set()


@pytest.mark.parametrize("words", ["show --usage", "ls -l", "diff 100 200", "stats", "migrate"])
def test_a_query_that_reads_pages_imports_no_more_than_it_must(
    made_store: Path, words: str
) -> None:
    assert imported(words, made_store) & (NEVER | {"sqlalchemy"}) == set()


def test_adopting_and_materializing_files_imports_no_torch(tmp_path: Path) -> None:
    files, store = tmp_path / "files", tmp_path / "store"
    files.mkdir()
    save_file({"w": torch.arange(1000.0)}, files / "model.safetensors")
    imported(f"init {store}", store)
    assert imported(f"adopt {files} --step 1 --metric loss=1", store) & NEVER == set()
    without = NEVER | {"sqlalchemy", "asyncio"}
    assert imported(f"materialize 1 {tmp_path / 'out'}", store) & without == set()


def test_setting_a_tag_imports_no_torch(store: Path) -> None:
    assert imported("tag champion 100", store) & {"torch", "s3fs"} == set()
