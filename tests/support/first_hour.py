"""The first hour of a new user: twenty things typed without reading, and nine wrong turns, run for
real. `python -m tests.support.first_hour` writes docs/first-hour.md anew.

A turn is typed into a shell on a terminal, or into one Python session that lasts. What it answers
must contain what the table says, so that a page can only be written of turns that end well.
"""

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tests.cli.running import environment
from tests.support.terminal import environment_of_terminal, lines_seen, open_terminal

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"
HOME = "/home/me"
NOBODY = 65_534

FILES = {
    "model.py": """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
""",
    "train.py": """\
import torch
import ckptstore
from model import model, optimizer, state

x, y = torch.randn(256, 64), torch.randn(256, 8)
with ckptstore.open("checkpoints") as store:
    store.resume(state)
    begin = state["progress"]["step"]
    for step in range(begin + 1, begin + 31):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            state["progress"]["step"] = step
            store.commit(state, step=step, metrics={"loss": loss})
            print("committed step", step)
""",
    "ranks.py": """\
import torch.distributed as dist
import ckptstore
from model import state

dist.init_process_group("gloo")
with ckptstore.open("checkpoints") as store:
    store.resume(state)
    if dist.get_rank() == 0:
        store.commit(state, step=100)
    dist.barrier()
""",
}


OLD = 'torch.save(model.state_dict(), "old.pt")'


@dataclass(frozen=True, slots=True)
class Turn:
    """What is typed, and what the answer must contain. `until`: the user has seen enough after a
    line with that text, and presses Ctrl-C. `lines` of a long answer are shown. `as_nobody`: root,
    who may write anywhere, steps aside for the turn. `answer` is typed where the turn asks."""

    title: str
    typed: str
    says: str
    python: bool = False
    until: str = ""
    lines: int = 40
    as_nobody: bool = False
    answer: str = ""


THINGS = (
    Turn("Train, and commit every ten steps", "python train.py", "committed step 30"),
    Turn("Start it again: it resumes", "python train.py", "committed step 60"),
    Turn("Ask for help", "ckptstore help", "usage: ckptstore", lines=4),
    Turn("What is in the store?", "ckptstore -s checkpoints log", "loss"),
    Turn("One commit", "ckptstore -s checkpoints show 20", "step       20"),
    Turn("Its tensors", "ckptstore -s checkpoints ls 20 model", "model/0.weight"),
    Turn("What changed?", "ckptstore -s checkpoints diff 10 20", "17 changed", lines=6),
    Turn(
        "List commits in Python",
        "import ckptstore\nfrom model import model, state\n\n"
        'store = ckptstore.open("checkpoints")\nstore.log(3)',
        "run=main, step=60",
        python=True,
    ),
    Turn(
        "Restore the newest commit",
        'store.checkout().restore(state)\nstate["progress"]',
        "{'step': 60}",
        python=True,
    ),
    Turn(
        "Go back to a step",
        'store.checkout(20).restore(state)\nstate["progress"]',
        "{'step': 20}",
        python=True,
    ),
    Turn(
        "Read one tensor of an old commit",
        'store.checkout(20).read("model/0.weight").shape',
        "torch.Size([256, 64])",
        python=True,
    ),
    Turn(
        "Load the weights alone",
        'store.checkout("latest").restore({"model": model})',
        "unexpected=('optimizer', 'progress')",
        python=True,
    ),
    Turn(
        "Give the best commit a name",
        'store.tag("good", "best:loss")\nstore.checkout("good")',
        "step=60>",
        python=True,
    ),
    Turn(
        "Commit by hand",
        'store.commit(state, step=61, tag="final", message="before the paper")',
        "step=61>",
        python=True,
    ),
    Turn("Is it all right?", "ckptstore -s checkpoints fsck --read-data", "no damage: "),
    Turn("How large is it?", "ckptstore -s checkpoints stats", "stored", lines=8),
    Turn(
        "Keep the last three and the tagged ones",
        "ckptstore -s checkpoints forget --keep-last 3",
        "forgot 4 commits",
        answer="y",
    ),
    Turn(
        "Free the space, which waits an hour for second thoughts",
        "ckptstore -s checkpoints gc\nckptstore -s checkpoints gc --now",
        "freed",
    ),
    Turn(
        "Weights for another library",
        "ckptstore -s checkpoints export good model.safetensors --select model",
        "as safetensors: 1 file",
    ),
    Turn(
        "An old checkpoint of torch.save",
        "ckptstore -s checkpoints import old.pt --step 5 --run old",
        "of run old: 4 leaves",
    ),
)

WRONG_TURNS = (
    Turn(
        "A mistyped path",
        'ckptstore.open("checkpoint").resume(state)',
        f"did you mean {HOME}/checkpoints?",
        python=True,
    ),
    Turn("A mistyped tag", 'store.checkout("godo")', "there are the tags good", python=True),
    Turn("A mistyped metric", 'store.checkout("best:lss")', "there is loss", python=True),
    Turn(
        "A mistyped leaf",
        'store.checkout().read("model/0.weigth")',
        "did you mean 'model/0.weight'",
        python=True,
    ),
    Turn(
        "A model of another size",
        "import torch\nlarger = torch.nn.Sequential(\n"
        "    torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)\n)\n"
        'store.checkout().restore({**state, "model": larger})',
        "model/0.weight: the commit has float32[256, 64], the target has float32[512, 64]",
        python=True,
    ),
    Turn(
        "Something that was not committed",
        'store.checkout().restore({**state, "scheduler": {"epoch": 0}})',
        "scheduler: wanted by the target, not in the commit",
        python=True,
    ),
    Turn(
        "A directory of somebody else",
        'ckptstore.open("/usr/checkpoints")',
        "no store can be made at /usr/checkpoints",
        python=True,
        as_nobody=True,
    ),
    Turn(
        "A commit by one rank of two, as with torch.save",
        "python -m torch.distributed.run --nproc-per-node 2 ranks.py",
        "every rank has to make this call, not only one under `if rank == 0:`",
        until="every rank has to make this call",
    ),
    Turn(
        "A damaged file",
        "from pathlib import Path\n\n"
        'large = [p for p in Path("checkpoints/packs").rglob("*") if p.stat().st_size > 200_000]\n'
        "pack = max(large, key=lambda p: p.stat().st_mtime)\n"
        'with pack.open("r+b") as file:\n    file.seek(100)\n    file.write(b"damage")\n'
        'store.resume(state)\nstate["progress"]',
        "skipped commit",
        python=True,
    ),
)


class Answers:
    """A shell and a Python session in a folder that has the files of a new user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in FILES.items():
            (folder / name).write_text(text)
        # The suite lets nobody pickle but tests.
        self._names: dict[str, Any] = {"__name__": "tests.typed"}
        exec(f"import torch\nfrom model import model\n{OLD}", self._names)

    def to(self, turn: Turn) -> str:
        """What the user sees. Raises `AssertionError` if the turn does not end as it should."""
        seen = self._python(turn) if turn.python else self._shell(turn)
        seen = seen.replace(str(self._folder), HOME).rstrip()
        assert turn.says in seen, f"{turn.title}: {turn.says!r} is not in\n{seen}"
        return seen

    def _python(self, turn: Turn) -> str:
        tree = ast.parse(turn.typed)
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        is_root = os.geteuid() == 0
        with StringIO() as out, redirect_stdout(out), redirect_stderr(out):
            try:
                if is_root and turn.as_nobody:
                    os.seteuid(NOBODY)
                exec(compile(tree, "<typed>", "exec"), self._names)
                value = eval(compile(ast.Expression(last.value), "<typed>", "eval"), self._names)
                if value is not None:
                    print(repr(value))
            except Exception as error:
                print("".join(traceback.format_exception_only(error)))
            finally:
                if is_root:
                    os.seteuid(0)
            return out.getvalue()

    def _shell(self, turn: Turn) -> str:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        ours, theirs = open_terminal()
        process = subprocess.Popen(
            ["bash", "-ec", turn.typed],
            cwd=self._folder,
            env=environment({**environment_of_terminal(), "PATH": path, "OMP_NUM_THREADS": "1"}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        lines = []
        for line in lines_seen(ours, [turn.answer]):
            if not re.match(r"\[?[WE][0-9]{4} |\[rank[0-9]+\]:\[W", line):  # of torch's own
                lines.append(line)
            if turn.until and turn.until in line:
                os.killpg(process.pid, signal.SIGINT)  # the launcher ends the ranks
                break
        os.close(ours)
        code = process.wait()
        assert turn.until or code == 0, f"{turn.title} ended with {code}: {''.join(lines)}"
        return "".join(lines) + ("^C" if turn.until else "")


_INTRODUCTION = """\
# The first hour

Twenty things that people type before they read anything, and nine wrong turns. Each was run, and
what it answered is below. Ids, times and sizes will be others where you try it.

`python -m tests.support.first_hour` runs all of it and writes this page anew.
`tests/test_first_hour.py` compares a run with the page.
"""


def page() -> str:
    """The page, from a run of all turns."""
    parts = [_INTRODUCTION, "## The files of a new user\n"]
    parts += [f"`{name}`:\n\n```python\n{text}```\n" for name, text in FILES.items()]
    parts.append(f"`old.pt`:\n\n```python\n{OLD}\n```\n")
    with tempfile.TemporaryDirectory() as base, chdir(base):
        folder = Path(base, "me")
        folder.mkdir()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        answers = Answers(folder)
        for heading, turns in (
            ("Twenty things typed, twenty done", THINGS),
            ("Nine wrong turns that end well", WRONG_TURNS),
        ):
            parts.append(f"## {heading}\n")
            for number, turn in enumerate(turns, 1):
                parts.append(f"### {number}. {turn.title}\n\n{_block(turn, answers.to(turn))}")
    return "\n".join(parts)


def _block(turn: Turn, seen: str) -> str:
    lines = seen.split("\n")
    shown = "\n".join(lines if len(lines) <= turn.lines else [*lines[: turn.lines], "…"])
    if turn.python:
        return f"```python\n{turn.typed}\n```\n\n```text\n{shown}\n```\n"
    typed = turn.typed.replace("\n", "\n$ ")
    return f"```console\n$ {typed}\n{shown}\n```\n"


def without_chance(text: str) -> str:
    """`text` without what differs from run to run, or with another torch: ids, times, numbers, and
    the widths of columns that depend on them."""
    text = re.sub(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.]+(?:Z| \+[0-9]{4})?", "TIME", text)
    text = re.sub(r"(?<=packs/)[0-9a-f]{2}\b|\b[0-9a-f]{8,64}\b", "ID", text)
    text = re.sub(r"\b[0-9]+(?:\.[0-9]+)?(?: (?:B|KiB|MiB|s|min)\b|%|×)", "AMOUNT", text)
    text = re.sub(r"\b[0-9]+(?:\.[0-9]+)?\b", "NUMBER", text)
    return re.sub(r"[ ]+", " ", text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
