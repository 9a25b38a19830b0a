"""Options of the commands that make a store, look into it, and complete command lines."""

from argparse import ArgumentParser
from typing import Any

from ckptstore.cli.arguments import command, count, size
from ckptstore.core.config import CHUNK_BYTES, CODECS


def _add_init(commands: Any, common: ArgumentParser) -> None:
    parser = command(commands, common, "init", "make an empty store")
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="a new or empty directory, or a URL; else -s, else $CKPTSTORE, else here",
    )
    parser.add_argument(
        "--chunk-size",
        type=size,
        default=CHUNK_BYTES,
        metavar="SIZE",
        help="64KiB to 64MiB, a power of two (default: 1MiB)",
    )
    parser.add_argument(
        "--codec",
        choices=CODECS,
        default="raw",
        metavar="CODEC",
        help=f"{', '.join(CODECS)} (default: raw)",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="readable and writable by you alone, with all that is made in it",
    )


def _add_log(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands,
        common,
        "log",
        "list commits, the newest first",
        "List commits, the newest first. A terminal shows the newest 50; a pipe, --all and --json "
        "all of them.",
    )
    parser.add_argument("-n", type=count, metavar="N", dest="limit", help="at most N commits")
    parser.add_argument(
        "-a", "--all", action="store_true", help="every commit of every run, however many there are"
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        action="append",
        help="the commits of this run (default: of all); may be repeated",
    )
    parser.add_argument(
        "--tag",
        metavar="GLOB",
        nargs="?",
        const="*",
        action="append",
        help="commits with a tag, or with one that matches GLOB; may be repeated",
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="commits from TIME on: a span before now (90min, 2h, 3d) or a date or time",
    )
    parser.add_argument("--until", metavar="TIME", help="commits up to TIME")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        action="append",
        help="a column for this metric; may be repeated (default: the first three)",
    )
    parser.add_argument(
        "--sort",
        metavar="METRIC[:max]",
        help="the best by a metric first: the smallest, with :max the largest",
    )
    graph = parser.add_mutually_exclusive_group()
    graph.add_argument(
        "--graph",
        action="store_true",
        default=None,
        help="draw the lineage (default on a terminal, where it branches)",
    )
    graph.add_argument("--no-graph", action="store_false", dest="graph", help="do not draw it")


def _add_show(commands: Any, common: ArgumentParser) -> None:
    parser = command(commands, common, "show", "everything about one commit")
    _add_ref(parser)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="leave out exclusive and shared bytes, which take a look at every commit",
    )


def _add_ls(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands,
        common,
        "ls",
        "list the leaves of a commit",
        "List the leaves of a commit. On a terminal, more than 40 are folded: paths that differ "
        "only in numbers become\n"
        "one line, whose pattern is a GLOB for the next `ls`.",
    )
    _add_ref(parser)
    parser.add_argument(
        "globs",
        nargs="*",
        metavar="GLOB",
        help="leaves whose path, in full or below its key, matches or lies below: model, "
        "'layers.*', '*.bias' (* crosses /)",
    )
    parser.add_argument(
        "-l",
        "--long",
        action="store_true",
        help="with kind, chunks, the values of small leaves, and what is shared memory",
    )
    fold = parser.add_mutually_exclusive_group()
    fold.add_argument(
        "-a",
        "--all",
        action="store_false",
        dest="fold",
        default=None,
        help="one line per leaf, however many",
    )
    fold.add_argument(
        "--fold",
        action="store_true",
        default=None,
        help="fold, whatever the number and in a pipe too",
    )


def _add_diff(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands, common, "diff", "what changed from one commit to another, leaf by leaf"
    )
    parser.add_argument("a", metavar="A", help="the commit before")
    parser.add_argument("b", metavar="B", help="the commit after")
    parser.add_argument(
        "--run", metavar="RUN", help="look for steps, 'latest' and 'best:' in this run"
    )
    parser.add_argument("--stat", action="store_true", help="sums per key instead of leaves")
    fold = parser.add_mutually_exclusive_group()
    fold.add_argument(
        "-a",
        "--all",
        action="store_false",
        dest="fold",
        default=None,
        help="one line per leaf, however many",
    )
    fold.add_argument(
        "--fold",
        action="store_true",
        default=None,
        help="fold, whatever the number and in a pipe too",
    )


def _add_tag(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands,
        common,
        "tag",
        "list tags, set one, remove some",
        "List tags; with NAME, let it mean REF; with -d, remove tags.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the tag to set; it moves if it is there already"
    )
    parser.add_argument(
        "ref", nargs="?", metavar="REF", help="the commit it shall mean (default: latest)"
    )
    parser.add_argument("--names", action="store_true", help="list nothing but the names")
    parser.add_argument(
        "-d",
        "--delete",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="remove these tags; their commits stay; may be repeated",
    )
    parser.add_argument(
        "--run", metavar="RUN", help="look for steps, 'latest' and 'best:' in this run"
    )


def _add_stats(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands, common, "stats", "what the store holds, and which commits hold most of it"
    )
    parser.add_argument(
        "-n",
        type=count,
        metavar="N",
        dest="top",
        default=10,
        help="the N commits with most exclusive bytes (default: 10)",
    )


def add_completion(commands: Any, common: ArgumentParser) -> None:
    parser = command(
        commands,
        common,
        "completion",
        "print a completion script for a shell",
        'Print a completion script. bash: eval "$(ckptstore completion bash)" in ~/.bashrc; zsh: '
        "ckptstore completion zsh >\n"
        "a directory of $fpath, as _ckptstore; fish: ckptstore completion fish > "
        "~/.config/fish/completions/ckptstore.fish",
    )
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )


def _add_ref(parser: ArgumentParser) -> None:
    parser.add_argument(
        "ref", nargs="?", default="latest", metavar="REF", help="which commit (default: latest)"
    )
    parser.add_argument(
        "--run", metavar="RUN", help="look for steps, 'latest' and 'best:' in this run"
    )


QUERIES = (
    _add_init,
    _add_log,
    _add_show,
    _add_ls,
    _add_diff,
    _add_tag,
    _add_stats,
)
"""Each adds one command to the parser."""
