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
SELDOM = {
    *("secrets", "hashlib", "random", "tempfile", "difflib"),
    *("shutil", "bz2", "asyncio", "email"),
}
"""Modules of the standard library that take milliseconds each, for what a query seldom does."""


def imported(words: str, store: Path) -> set[str]:
    """The modules that `ckptstore words` has imported when it ends well, and their packages."""
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
    names = set(done.stderr.split())
    return names | {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "words",
    [
        "log",
        "log -n 20 --graph --json",
        "show",
        "ls",
        "ls best model",
        "tag",
    ],
)
def test_a_query_imports_nothing_slow(made_store: Path, words: str) -> None:
    assert imported(words, made_store) & (SLOW | SELDOM) == set()


def test_the_versions_are_found_without_importing_what_they_are_of(made_store: Path) -> None:
    assert imported("--version --json", made_store) & SLOW == set()


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
    # numpy.unique imports numpy.ma, which takes a fifth of all imports.
    without = NEVER | {"sqlalchemy", "numpy.ma", *SELDOM} - {"shutil", "bz2"}
    assert imported(f"adopt {files} --step 1 --metric loss=1", store) & without == set()
    assert imported(f"materialize 1 {tmp_path / 'out'}", store) & without == set()


def test_a_history_and_an_export_to_safetensors_import_no_torch(
    made_store: Path, tmp_path: Path
) -> None:
    assert imported("history", made_store) & (NEVER | {"sqlalchemy"}) == set()
    words = f"export best {tmp_path / 'out.safetensors'} --select model"
    assert imported(words, made_store) & (NEVER | {"sqlalchemy"}) == set()


def test_a_process_of_a_command_is_set_up_before_anything_is_imported() -> None:
    code = (
        "import sys; from ckptstore.__main__ import main; import gc, os\n"
        "early = [name for name in sys.modules if name.startswith('ckptstore.cli')]\n"
        "sys.argv = ['ckptstore', '--version']; code = main()\n"
        "print(code, early, gc.get_threshold()[0], gc.get_freeze_count() > 10_000,"
        " os.environ['OPENBLAS_NUM_THREADS'])"
    )
    env = environment()
    env.pop("OPENBLAS_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 [] 50000 True 1"


def test_the_first_page_imports_neither_arrays_nor_maintenance(made_store: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.ui.asking import browsing\n"
        f"with browsing(Path({str(made_store)!r})) as browser:\n"
        "    assert browser.ask('/data/site.json').status_code == 200\n"
        "    assert browser.view('store.json')['commits'] > 0\n"
        "print(*sys.modules)"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    late = {"ckptstore.maintenance.gc", "ckptstore.maintenance.forget", "ckptstore.restore"}
    assert set(done.stdout.split()) & (SLOW | late) == set()


def test_gc_imports_neither_checks_nor_mirrors(made_store: Path) -> None:
    others = {"check.fsck", "repair", "mirror"}
    found = imported("gc -n", made_store)
    assert found & {f"ckptstore.maintenance.{name}" for name in others} == set()


def test_setting_a_tag_imports_no_torch(store: Path) -> None:
    assert imported("tag champion 100", store) & {"torch", "s3fs", "sqlalchemy"} == set()
