"""Whatever stands where a path should: every command ends with one line of ours and a documented
exit code, never with a traceback."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.parser import build
from tests.cli.running import Result, call, run_without_privileges

ODD = {
    "NUL": lambda root: "a\0b",
    "no Unicode": lambda root: os.fsdecode(os.fsencode(root) + b"/\xff\xfe"),
    "lone surrogate": lambda root: f"{root}/\ud800",
    "FIFO": lambda root: str(root / "fifo"),
    "FIFO with a suffix": lambda root: str(root / "fifo.safetensors"),
    "FIFO called .pt": lambda root: str(root / "fifo.pt"),
    "directory": lambda root: str(root / "directory"),
    "directory called .pt": lambda root: str(root / "directory.pt"),
    "file": lambda root: str(root / "file"),
    "below a file": lambda root: str(root / "file" / "x"),
    "unreadable": lambda root: "/proc/self/mem",
    "too long": lambda root: str(root / ("x" * 300)),
    "loop of links": lambda root: str(root / "loop"),
    "link to nothing": lambda root: str(root / "dangling"),
    "nothing can be made": lambda root: "/proc/nothing",
    "device": lambda root: "/dev/null",
    "URL without a bucket": lambda root: "s3://",
    "URL of no kind": lambda root: "kind://place",
    "no URL": lambda root: "://",
}
"""What stands where a path should, by what is odd about it."""

STORE = "STORE"
"""Stands for a good store in the words below, PATH for what is odd, NEW for a path that is new each
time."""

OTHERS = {
    "diff": "1 1",
    "undelete": "abcdef",
    "forget": "--keep-last 1",
    "push": "STORE",
    "pull": "STORE",
    "import": "STORE/file",
    "export": "1 NEW",
    "parted": "main main",
    "bisect": "--good 1 --nan",
    "average": "1 1",
    "plot": "size -o NEW.svg",
    "watch": "-n 0",
    "follow": "main -n 0",
    "verify": "1 --keys STORE/key.pub",
    "sign": "1 --key STORE/key",
    "ui": "--export NEW",
}
"""What a command needs besides its store."""

NO_STORE_OF_THEIR_OWN = {"init", "clone", "completion"}

WORDS = [
    *(
        f"{command} -s PATH {OTHERS.get(command, '')}"
        for command in build(COMMANDS).commands
        if command not in NO_STORE_OF_THEIR_OWN
    ),
    "init PATH",
    "init -s PATH",
    "clone PATH NEW",
    "clone STORE PATH",
    *(
        f"{words} -s STORE"
        for words in ("push PATH", "push --create PATH", "pull PATH", "repair --apply --from PATH")
    ),
    *(
        f"{command} -s STORE PATH"
        for command in ("show", "ls", "ls latest", "diff 1", "tag n", "forget -n", "undelete")
    ),
    "import -s STORE PATH",
    *(
        f"export -s STORE 1 PATH {format}"
        for format in (
            "",
            "--format safetensors",
            "--format torch",
            "--format dcp",
            "--format files",
        )
    ),
    "export -s STORE PATH NEW",
    "export -s STORE 1 NEW.pt --select PATH",
    *(
        f"log -s STORE {option} PATH"
        for option in ("--run", "--tag", "--metric", "--sort", "--since", "--until", "--index")
    ),
    "ui -s STORE --commits 0 --export PATH",
    "average -s STORE 1 PATH",
    "average -s STORE 1 1 --tag PATH",
    "bisect -s STORE --good PATH --nan",
    "history -s STORE PATH",
    "plot -s STORE size -o PATH",
    "watch -s STORE -n 0 --mirror PATH",
    "plot -s STORE diff 1 PATH -o NEW.svg",
    "plot -s STORE metrics PATH -o NEW.svg",
    "history -s STORE --ref PATH",
    "sign -s STORE 1 --key PATH",
    "sign --new-key PATH",
    "verify -s STORE 1 --keys PATH",
    "verify -s STORE PATH --keys STORE/key.pub",
    "bisect -s STORE --good 1 --nan --verdicts PATH",
    "fsck -s STORE --read-data PATH",
    "forget -n -s STORE --keep-within PATH",
    "import -s STORE FILES --tag PATH",
    "import -s STORE FILES --message PATH",
    "import -s STORE FILES --run PATH",
]


TOUCHING = (
    "log -s PATH",
    "fsck -s PATH",
    "init PATH",
    "clone STORE PATH",
    "push",
    "import -s STORE PATH",
    "export -s STORE 1 PATH",
    "show -s",
)
"""How the words begin with which every odd path is tried in the default suite; the others are tried
with what no name may have."""

QUICK = {
    text: list(ODD) if text.startswith(TOUCHING) else ["NUL", "lone surrogate"] for text in WORDS
}
"""The odd paths of the default suite by words; `make soak` tries the others."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good store, files to import, and a file of each odd kind."""
    root = tmp_path_factory.mktemp("odd")
    with ckptstore.open(root / STORE) as store:
        store.commit({"model": {"w": torch.ones(5)}}, step=1)
    for name in ("fifo", "fifo.safetensors", "fifo.pt"):
        os.mkfifo(root / name)
    for name in ("directory", "directory.pt", "FILES"):
        (root / name).mkdir()
    save_file({"w": torch.zeros(3)}, root / "FILES" / "model.safetensors")
    (root / "file").write_text("x")
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "nothing")
    return root


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`root`, for a command that runs tmp_path."""
    monkeypatch.chdir(tmp_path)
    return root


def words_of(text: str, root: Path, odd: str, new: Path) -> list[str]:
    meant = {
        "PATH": odd,
        "NEW": f"{new}/made",
        "NEW.pt": f"{new}/made.pt",
        "NEW.svg": f"{new}/made.svg",
        "FILES": f"{root}/FILES",
    }
    return [meant.get(word, word.replace("STORE", f"{root}/{STORE}", 1)) for word in text.split()]


def check_ending(result: Result, words: list[str]) -> None:
    assert result.code in set(Exit), (words, result)
    assert "Traceback" not in result.err + result.out, (words, result)
    assert "should not have happened" not in result.err, (words, result)
    if result.code:
        assert result.err.startswith("ckptstore: ") and len(result.err) > 20, (words, result)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        *((text, kinds) for text, kinds in QUICK.items()),
        *(
            pytest.param(text, [kind for kind in ODD if kind not in kinds], marks=pytest.mark.soak)
            for text, kinds in QUICK.items()
            if len(kinds) < len(ODD)
        ),
    ],
)
def test_every_command_ends_with_a_message_of_ours(
    text: str, kinds: list[str], place: Path, tmp_path: Path
) -> None:
    for i, kind in enumerate(kinds):
        new = tmp_path / str(i)
        new.mkdir()
        words = words_of(text, place, ODD[kind](place), new)
        check_ending(call(*words), words)


def test_a_home_that_takes_no_files_hinders_no_command(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    home.chmod(0o555)
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    commands = [
        ["-s", str(store), *words]
        for words in (
            ("init", str(store)),
            ("import", str(tmp_path / "model.safetensors"), "--step", "1"),
            ("fsck", "--read-data"),
            ("gc",),
            ("export", "1", str(tmp_path / "out.safetensors")),
        )
    ]
    for words, result in zip(commands, run_without_privileges(*commands, home=home), strict=True):
        assert (result.code, result.err) == (0, ""), (words, result)
    assert list(home.iterdir()) == []
    assert load_file(tmp_path / "out.safetensors")["w"].sum() == 3


def test_files_and_stores_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for store in ("store", "closed"):
        with ckptstore.open(tmp_path / store) as made:
            made.commit({"w": torch.ones(3)}, step=1)
    for name in ("model.pt", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"{}" * 50)
    (tmp_path / "directory" / "below").mkdir(parents=True)
    (tmp_path / "directory" / "readable.txt").write_text("x")
    closed = ("model.pt", "model.safetensors.index.json", "directory/below")
    for name in (*closed, "closed/packs", "closed/log"):
        (tmp_path / name).chmod(0)
    names = ["model.pt", "model.safetensors.index.json", "directory"]
    imports = [["-s", str(tmp_path / "store"), "import", str(tmp_path / name)] for name in names]
    others = [
        ["-s", str(tmp_path / "closed"), *words]
        for words in (["log"], ["gc"], ["import", str(tmp_path / "model.safetensors")])
    ]
    results = run_without_privileges(*imports, *others, home=tmp_path)
    for name, result in zip(names, results[: len(names)], strict=True):
        check_ending(result, [name])
        assert (result.code, result.err.count("\n")) == (Exit.FAILED, 1), result
        assert ("directory/below" if name == "directory" else name) in result.err
        assert "ermission denied" in result.err
    for words, result in zip(others, results[len(names) :], strict=True):
        check_ending(result, words)
        assert result.code and "ermission denied" in result.err, (words, result)
