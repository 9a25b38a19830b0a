"""The code blocks of a page, run in order as a reader would; `python -m tests.support.snippets
[PAGE…]` writes what they print into the pages.

A block's language says what becomes of it:

* `python` runs in the page's namespace, which begins with what `tests.support.page_state` prepares.
  With `title="NAME"` it is written to the file NAME instead.
* `console`: each line that begins with `$ ` is given to one shell on a terminal; the lines below it
  are what appears. What they show behind `[y/N]` is typed at that question. `# exit code N` at the
  end of a command says what it ends with.
* `output` is what the `python` block above it prints.
* Any other language is an illustration.

A line `…` in shown output stands for any lines. A block below the paragraph `*Not run by the tests:
REASON.*` does not run.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.page_state import prepared
from tests.support.terminal import (
    answers_in,
    environment_of_terminal,
    lines_seen,
    open_terminal,
)

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"^\*Not run by the tests: ([^*]+)\.\*\n\n\Z", re.MULTILINE)
EXIT_CODE = re.compile(r"# exit code (\d+)$")
RUNS = ("python", "console", "output")


@dataclass(frozen=True)
class Block:
    """A fenced block; `start` and `end` are where its code lies in the page's text."""

    page: Path
    line: int
    language: str
    title: str | None
    code: str
    not_run: str | None
    start: int
    end: int

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README and docs, but for a page that another script writes and checks as a whole."""
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in found if page.name != "first-hour.md"]


def pages_to_run() -> list[Path]:
    """The pages that have blocks to run."""
    return [page for page in pages() if any(block.language in RUNS for block in blocks(page))]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = NOT_RUN.search(before)
        yield Block(
            page,
            before.count("\n") + 1,
            match["language"],
            match["title"],
            match["code"],
            " ".join(reason[1].split()) if reason else None,
            *match.span("code"),
        )


@dataclass
class Run:
    """One reading of a page: the namespace, the shell, and what the last block printed."""

    page: Path
    shell: "Shell"
    names: dict[str, Any]
    printed: str = ""

    def text(self) -> str:
        """The page with what its blocks print now."""
        old = self.page.read_text(encoding="utf-8")
        parts, done = [], 0
        for block in blocks(self.page):
            if block.language not in RUNS or block.not_run:
                continue
            try:
                code = self.run(block)
            except Exception as error:
                error.add_note(f"in the block at {block.place}")
                raise
            parts += [old[done : block.start], code]
            done = block.end
        return "".join([*parts, old[done:]])

    def run(self, block: Block) -> str:
        if block.language == "console":
            return "".join(self.shell.answer(*command) for command in commands(block.code))
        if block.language == "output":
            return shown(block.code, self.printed)
        if block.title:
            Path(block.title).write_text(block.code)
            return block.code
        out = io.StringIO()
        code = compile("\n" * block.line + block.code, str(self.page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, self.names)
        self.printed = out.getvalue()
        return block.code


class Shell:
    """A bash that keeps its directory and variables from one command to the next, which it gives a
    terminal for input and output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._ours, theirs = open_terminal()
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env={**os.environ, **environment_of_terminal(), "PATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=theirs,
            stderr=theirs,
            text=True,
            start_new_session=True,
        )
        self._terminal = os.ttyname(theirs)
        os.close(theirs)

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self._bash.communicate()
        os.close(self._ours)

    def answer(self, command: str, output: str) -> str:
        """The command, and what it prints if the page shows output."""
        assert self._bash.stdin
        end = "--end of the answer--"
        asked = f"{{ {command}\n}} <{self._terminal}"
        self._bash.stdin.write(f"{asked}\nprintf '\\n{end} %d\\n' $?\n")
        self._bash.stdin.flush()
        printed = "".join(self._until(end, answers_in(output)))
        printed, _, code = printed.rpartition(f"\n{end} ")
        printed = printed.replace(str(self._folder), "/data")
        wanted = EXIT_CODE.search(command)
        if int(code) != (int(wanted[1]) if wanted else 0):
            raise AssertionError(f"exit code {int(code)} of `{command}`:\n{printed}")
        line = "$ " + command.replace("\n", "\n> ") + "\n"
        return line + (shown(output, printed) if output else "")

    def _until(self, end: str, answers: Iterable[str]) -> Iterator[str]:
        for line in lines_seen(self._ours, answers):
            # bash in a script says where it was when a signal ended its child
            yield re.sub(r"^bash: line \d+: +\d+ (\w+) .*", r"\1", line)
            if line.startswith(end):
                return


def commands(code: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output below it."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        count = 1
        while count < len(lines) and lines[count].startswith("> "):
            count += 1
        command = "".join(line.removeprefix("> ") for line in lines[:count]).rstrip("\n")
        yield command, "".join(lines[count:])


def shown(old: str, new: str) -> str:
    """The new output, cut as the old one: `…` stands for the lines that are left out."""
    lines, cut = new.rstrip("\n").split("\n"), old.rstrip("\n").split("\n")
    if "…" in cut:
        head = cut.index("…")
        tail = len(cut) - head - 1
        lines = [*lines[:head], "…", *lines[len(lines) - tail :]]
    empty = "\n" if old.endswith("\n\n") else ""
    return "".join(f"{line}\n" for line in lines) + empty


def masked(text: str) -> str:
    """What two runs have in common: without ids, times, measured figures and column widths."""
    text = re.sub(r"\b([0-9a-f]{2}/)?[0-9a-f]{8,64}(-\d+)*\b", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d[\d:.]*(Z| \+0000| UTC)?", "TIME", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d\b", "DAY", text)
    text = re.sub(r"\b[\d.]+ (ms|s|min|h)\b", "SPAN", text)
    text = re.sub(
        r"\b\d+\.\d+(e-?\d+)?( [KMG]iB| B)?|\b\d{9,}\b|\b\d{1,3}(,\d{3})+\b", "FIGURE", text
    )
    return re.sub(r"[ ─]+", " ", text)


def rewritten(page: Path, folder: Path) -> str:
    """The text of a page after it ran in `folder`, an empty directory."""
    with contextlib.chdir(folder), contextlib.ExitStack() as stack:
        names = {"__name__": f"tests.{page.stem}", **prepared(page, stack)}
        return Run(page, stack.enter_context(Shell(folder)), names).text()


def main(names: list[str]) -> None:
    for page in [ROOT / name for name in names] or pages_to_run():
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "page"
            folder.mkdir()
            text = rewritten(page, folder)
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
