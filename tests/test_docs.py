"""What the docs name exists: modules, functions, files, links, tests; the picture is current."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tests.conftest import APART, LONGEST, ON_DISK, TOGETHER
from tests.support.rooms import PICTURE, SAYS, draw
from tests.test_layers import PACKAGE, ROOMS, modules

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=lambda page: page.relative_to(ROOT)
)
DECISIONS = ROOT / "docs" / "decisions"
PRIVATE_WORDS = re.compile(
    r"\b(crew|hired|wish|loans?|vouch(es|ed)?|parcels?|deeds?|journeys?|descent)\b", re.IGNORECASE
)

NAMED_FILE = re.compile(r"(?<![\w/])((?:docs|tests|examples|benchmarks)/[\w./-]+\.\w+)")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def is_superseded(page: Path) -> bool:
    return "\n**Superseded" in text_of(page)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page outside of its code blocks."""
    in_code = False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def every_line() -> Iterator[tuple[Path, int, str]]:
    """The prose of all pages."""
    return ((page, number, line) for page in PAGES for number, line in prose(page))


def named(page: Path) -> Iterator[tuple[int, str]]:
    """Backticked dotted names of a page that begin with a room."""
    for number, line in prose(page):
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`", line):
            short = name.removeprefix("ckptstore.")
            if short.partition(".")[0] in ROOMS:
                yield number, short


def exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, or an attribute below one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if module in modules():
            found: object = import_module(f"ckptstore.{module}")
            for attribute in parts[count:]:
                if not hasattr(found, attribute):
                    return False
                found = getattr(found, attribute)
            return True
    return False


def test_the_modules_and_functions_that_a_page_names_exist() -> None:
    """A superseded page keeps the names of its time."""
    missing = [
        f"{page.name}:{line}: {name}"
        for page in PAGES
        if not is_superseded(page)
        for line, name in named(page)
        if "torchft" not in name or find_spec("torchft")
        if not exists(name)
    ]
    assert not missing, "\n".join(missing)


def test_the_tour_names_only_what_exists() -> None:
    page = ROOT / "docs" / "architecture.md"
    tour = text_of(page).partition("## Tour")[2].partition("\n## ")[0]
    names = [
        name
        for name in re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", tour)
        if not name.startswith("model.")
    ]
    assert len(names) > 30
    assert [name for name in names if not exists(name)] == []


def test_the_links_of_a_page_lead_somewhere() -> None:
    lost = []
    for page, number, line in every_line():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", line):
            if "://" not in target and not (page.parent / target).exists():
                lost.append(f"{page.name}:{number}: {target}")
        for path in re.findall(NAMED_FILE, line):
            if page.name != "CHANGELOG.md" and not (ROOT / path).exists():
                lost.append(f"{page.name}:{number}: {path}")
    assert not lost, "\n".join(lost)


def test_a_page_is_plain_and_its_lines_are_short() -> None:
    bad = []
    for page, number, line in every_line():
        if len(line) > 100 and not line.startswith(("|", "#", "![", "<!--")):
            bad.append(f"{page.name}:{number}: {len(line)} columns")
        word = PRIVATE_WORDS.search(line)
        if word and page.name != "CHANGELOG.md" and not is_superseded(page):
            bad.append(f"{page.name}:{number}: {word[0]!r}")
    assert not bad, "\n".join(bad)


def test_references_to_decisions_from_code_lead_to_a_page() -> None:
    numbers = {page.name[:3] for page in DECISIONS.glob("[0-9]*.md")}
    sources = [*ROOT.glob("ckptstore/**/*.py"), *ROOT.glob("tests/**/*.py")]
    lost = [
        f"{source.relative_to(ROOT)}: {number}"
        for source in sources
        for number in re.findall(r"decisions/(\d{3})", text_of(source))
        if number not in numbers
    ]
    assert not lost, "\n".join(lost)


def test_the_index_lists_every_decision_with_its_title_and_status() -> None:
    listed = re.findall(
        r"^\| \[(\d{3})\]\(([^)]+)\) \| (.+) \| (\w+)", text_of(DECISIONS / "README.md"), re.M
    )
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    assert listed == [
        (
            page.name[:3],
            page.name,
            text_of(page).splitlines()[0].removeprefix(f"# {page.name[:3]} "),
            "Superseded" if is_superseded(page) else "Accepted",
        )
        for page in pages
    ]


def test_the_table_of_long_tests_names_files_and_selections_that_exist() -> None:
    rows = [line for _, line in prose(ROOT / "docs" / "testing.md") if line.startswith("| `")]
    assert len(rows) > 25
    for row in rows:
        folder = ROOT
        for choice in re.findall(r"`([^`]+)`", row.split("|")[1]):
            if choice.startswith("python -m "):
                script = ROOT.joinpath(*choice.split()[2].split("."))
                assert script.with_suffix(".py").exists(), choice
                continue
            path, _, selection = choice.partition(" -k ")
            found = ROOT / path if path.startswith("tests/") else folder / path
            assert found.exists(), choice
            folder = found.parent
            files = [found] if found.is_file() else sorted(found.rglob("test_*.py"))
            texts = [text_of(file) for file in files]
            assert any("soak" in text for text in texts), f"{choice} has no long test"
            tests = "\n".join(re.findall(r"def (test_\w+)", "\n".join(texts)))
            assert selection in tests, f"no test matches {choice}"


def test_the_picture_of_the_rooms_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "run `python -m tests.support.rooms`"
    assert set(SAYS) == set(ROOMS)


def test_the_source_files_that_a_page_names_exist() -> None:
    lost = [
        f"{page.name}:{number}: {path}"
        for page, number, line in every_line()
        for path in re.findall(r"`([a-z]+/[\w/]+\.py)`", line)
        if not is_superseded(page) and not any((at / path).exists() for at in (ROOT, PACKAGE))
    ]
    assert not lost, "\n".join(lost)


def test_the_parts_of_the_suite_name_what_exists() -> None:
    named = [*(name for files in TOGETHER.values() for name in files), *APART, *ON_DISK, *LONGEST]
    assert [name for name in named if name not in TOGETHER and not (ROOT / name).exists()] == []
