"""What the README and the docs show runs as it stands there, and prints what they say."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.snippets import ROOT, RUNS, Block, blocks, masked, pages, pages_to_run, rewritten

NOT_RUN = Counter(
    {
        "docs/formats.md": 2,
        "docs/accelerate.md": 2,
        "docs/deepspeed.md": 4,
        "docs/engines.md": 1,  # Slurm
        "docs/follow.md": 3,  # what serves until it is stopped; vLLM
        "docs/megatron.md": 2,
        "docs/lightning.md": 8,
        "docs/migrating.md": 12,  # torchft's Manager, trainers
        "docs/mirrors.md": 1,  # a bucket and a database
        "docs/quick-start.md": 1,  # pip install
        "docs/ray.md": 2,
        "docs/recovery.md": 2,  # a bucket, ranks under torchrun, several hosts
        "docs/serving.md": 4,  # transformers, PEFT and vLLM
        "docs/shared-store.md": 2,  # credentials; a database
        "docs/torch_checkpointing.md": 5,
        "docs/torchft.md": 1,  # its Manager
        "docs/torchtitan.md": 3,
        "docs/trackers.md": 5,  # W&B, MLflow and Trackio
        "docs/transformers.md": 2,
        "docs/ui.md": 2,  # it serves until it is interrupted
    }
)
"""How many blocks of a page its reader is told of that the tests do not run them."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def page_of(page: Path) -> Any:
    """A parameter of its name; `pickles` where a page shows files of `torch.save`."""
    marks = [pytest.mark.pickles] if page.stem in ("formats", "fsspec", "migrating") else []
    return pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.docs
@pytest.mark.parametrize("page", [page_of(page) for page in pages_to_run()])
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_shows(
    page: Path, tmp_path: Path
) -> None:
    """`python -m tests.support.snippets` writes what they print into the pages."""
    folder = tmp_path / "page"
    folder.mkdir()
    assert masked(rewritten(page, folder)) == masked(page.read_text(encoding="utf-8"))


def test_blocks_that_do_not_run_say_so_and_are_counted() -> None:
    found = Counter(name_of(block.page) for block in every() if block.not_run)
    assert found == NOT_RUN


def test_what_a_reader_would_type_is_in_blocks_that_run() -> None:
    hidden = [
        block.place
        for block in every()
        if block.language not in RUNS and re.search(r"^(\$ |ckptstore |import )", block.code, re.M)
    ]
    assert not hidden, hidden
    indented = [
        name_of(page)
        for page in pages()
        if re.search(r"^ +```(python|console|output)", page.read_text(encoding="utf-8"), re.M)
    ]
    assert not indented, "blocks in lists are not found by the tests"


def every() -> Iterator[Block]:
    """The blocks of all pages, those that do not run too."""
    for page in pages():
        yield from blocks(page)


def test_the_readme_is_what_a_first_reader_can_take_in() -> None:
    """The loop in at most twelve lines, five commands, a comparison in eight rows, one plot,
    one picture of the page."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    loop, _, commands = list(blocks(readme))[:3]
    assert loop.code.count("\n") <= 12
    assert commands.code.count("\n$ ckptstore ") == 5
    compared = text.partition("## How it compares")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert compared.count("\n") - 1 == 8
    assert text.count("![") == 2


def test_the_first_screen_says_how_to_run_the_main_job_and_the_tests() -> None:
    """A fresh clone needs the README alone; an index that does not have the package is not named as
    the way to it."""
    screen = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert screen.count("\n") < 50
    targets = re.findall(r"^\* `make (\w+)`", screen, re.M)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}: " in makefile for target in targets)
    assert "`pip install .`" in screen
    for page in (ROOT / "README.md", ROOT / "docs" / "quick-start.md"):
        assert "$ pip install ckptstore\n" not in page.read_text(encoding="utf-8")
