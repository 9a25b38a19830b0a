"""What the command line looks like. A command is a module of its own here, named by `module` and
imported when it is run."""

import argparse
import difflib
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from ckptstore.cli.arguments import Parser, count, meant, share, size
from ckptstore.cli.exits import UsageError
from ckptstore.core.config import CHUNK_BYTES, CODECS

_REFS = """\
A REF is a step, 'latest', 'best:METRIC' or 'best:METRIC:max', a tag, the beginning of a commit id (6 digits or
more), 'RUN@STEP' or 'RUN@latest', any of them with '~K' behind for the K-th parent, and the path of a pointer file."""

_EPILOG = f"""\
{_REFS}

The store is -s, else $CKPTSTORE, else the nearest enclosing directory that is one.
Exit codes: 0 ok, 1 failed, 2 usage, 3 partial or damaged, 10 no store, 11 busy, 130 interrupted."""


class _Version(argparse.Action):
    """Print the version and stop."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        import ckptstore

        print(f"ckptstore {ckptstore.__version__}")
        parser.exit()


def build() -> Parser:
    """The parser of the whole command line."""
    given: dict[str, Any] = {}
    top = Parser(
        prog="ckptstore",
        description="Look into a store of checkpoints and manage it.",
        epilog=_EPILOG,
        parents=[_common(given)],
    )
    top.set_defaults(store=None, index=None, json=False, debug=False)
    top.add_argument("--version", action=_Version, help="print the version and exit")
    common = _common(
        given
    )  # another one: parsers share the options of a parent, and top's have defaults now
    commands = top.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    queries = (_add_log, _add_show, _add_ls, _add_diff, _add_tag, _add_stats)
    for add in (_add_init, *queries, *_UPKEEP, *_MIRRORS, _add_migrate, _add_completion):
        add(commands, common)
    top.commands = commands.choices
    return top


def parse(words: Sequence[str]) -> Namespace:
    """The command line as a namespace; `command` is None if there is no command. Raises
    `UsageError`."""
    parser = build()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked = parser.commands.get(args.command, parser)
        options = re.findall(r"--[a-z-]+", asked.format_help())
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=2, cutoff=0.6)
        raise UsageError(f"did not understand {unknown[0]!r}{meant(near)}", asked.prog)
    return args


def _common(given: dict[str, Any]) -> ArgumentParser:
    """Options that stand before or behind the command, once in all."""
    # Their defaults are the top parser's: a subparser's own would overwrite what was given before
    # the command.
    parser = Parser(add_help=False, argument_default=SUPPRESS)
    group = parser.add_argument_group("common options")
    group.add_argument(
        "-s", "--store", given=given, metavar="STORE", help="the store: a directory or a URL"
    )
    group.add_argument(
        "--index",
        given=given,
        metavar="URL",
        help="the database that holds the log, if one does (default: $CKPTSTORE_INDEX)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document (docs/cli.md)")
    group.add_argument("--debug", action="store_true", help="show tracebacks and what is going on")
    return parser


def _command(
    commands: Any, common: ArgumentParser, name: str, summary: str, description: str = ""
) -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        parents=[common],
    )
    parser.set_defaults(module=name)
    return parser


def _add_init(commands: Any, common: ArgumentParser) -> None:
    parser = _command(commands, common, "init", "make an empty store")
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
    parser = _command(
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
    parser = _command(commands, common, "show", "everything about one commit")
    _add_ref(parser)
    parser.add_argument(
        "--fast",
        action="store_true",
        help="leave out exclusive and shared bytes, which take a look at every commit",
    )


def _add_ls(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
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
    parser = _command(
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
    parser = _command(
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
    parser = _command(
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


def _add_fsck(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "fsck",
        "look for damage",
        "Look for damage, as far as --level says: `refs` (log, tags, catalog), `connectivity` "
        "(every commit's document, schemas,\n"
        "pages and chunks), `packs` (every pack, both footers), `data` (every stored byte). "
        "Changes nothing. Exit code 3 for damage.",
    )
    levels = ("refs", "connectivity", "packs", "data")
    parser.add_argument(
        "--level",
        choices=levels,
        default="connectivity",
        metavar="LEVEL",
        help="how far (default: connectivity)",
    )
    parser.add_argument(
        "--read-data",
        nargs="?",
        const="100%",
        metavar="AMOUNT",
        help="read and hash all stored data, or 5%% or 10G of it, oldest first",
    )


def _add_repair(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "repair",
        "heal damage as far as it can be",
        "Say what can be done about damage, with --apply do it. Only what is proved to be right is "
        "written; what is replaced goes\n"
        "to quarantine/ in the store; commits that stay damaged are named. Writers and readers may "
        "go on meanwhile.",
    )
    parser.add_argument(
        "--apply", action="store_true", help="do it (default: only say what would be done)"
    )
    parser.add_argument(
        "--from",
        action="append",
        default=[],
        dest="mirrors",
        metavar="STORE",
        help="a mirror, or any other store that has the chunks; may be repeated",
    )
    parser.add_argument(
        "--read-data",
        nargs="?",
        const="100%",
        metavar="AMOUNT",
        help="first read and hash stored data, as `fsck` does",
    )


def _add_reindex(commands: Any, common: ArgumentParser) -> None:
    _command(
        commands,
        common,
        "reindex",
        "make the indexes anew",
        "Make this host's catalog and chunk index anew from log and packs.",
    )


def _add_doctor(commands: Any, common: ArgumentParser) -> None:
    _command(
        commands,
        common,
        "doctor",
        "try the storage out",
        "Try out whether the storage does what a store needs, how fast, and whether the next "
        "commit will fit.",
    )


def _add_forget(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "forget",
        "forget commits, by policy or by name",
        "Forget the commits that no --keep option keeps, run by run, or just those named. Tagged "
        "commits, the two newest of each\n"
        "run and the best by the store's settings always stay. `undelete` brings commits back "
        "until `gc` has removed them.",
    )
    parser.add_argument(
        "refs", nargs="*", metavar="REF", help="forget these; not together with --keep options"
    )
    parser.add_argument("--keep-last", type=count, metavar="N", help="keep the newest N")
    parser.add_argument(
        "--keep-every-steps", type=count, metavar="N", help="keep steps that are multiples of N"
    )
    parser.add_argument(
        "--keep-best",
        nargs="+",
        action="append",
        default=[],
        metavar=("METRIC[:max]", "N"),
        help="keep the best N (default: 1) by a metric; may be repeated",
    )
    parser.add_argument(
        "--keep-within",
        metavar="SPAN",
        help="keep what is at most SPAN (90min, 12h, 7d) older than the run's newest",
    )
    for period in ("hourly", "daily", "weekly", "monthly"):
        parser.add_argument(
            f"--keep-{period}",
            type=count,
            metavar="N",
            help=f"keep the newest {period} commit, N times",
        )
    parser.add_argument(
        "--run", metavar="RUN", help="only this run (default: all); REFs are looked for in it"
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="only say what would be forgotten, and why the rest stays",
    )


def _add_undelete(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "undelete",
        "bring forgotten commits back",
        "Bring forgotten commits back, by their ids.",
    )
    parser.add_argument("refs", nargs="+", metavar="REF", help="the beginnings of their ids")


def _add_gc(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "gc",
        "free what no commit needs",
        "Remove forgotten commits, and what no commit needs, and copy sparse and small packs "
        "together. Others may commit, read\n"
        "and collect meanwhile. What a commit in flight may still reuse is freed by a later gc.",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument(
        "--max-unused",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="dead bytes that may stay in packs (default: 5%%)",
    )
    parser.add_argument(
        "--max-repack",
        type=size,
        metavar="SIZE",
        help="copy at most so much, such as 10G (default: no limit)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="free at once; commits in flight may have to write again",
    )


def _add_sessions(commands: Any, common: ArgumentParser) -> None:
    _command(
        commands,
        common,
        "sessions",
        "who is writing now",
        "Who is writing now, and which condemned packs wait for whom.",
    )


_UPKEEP = (
    _add_forget,
    _add_undelete,
    _add_gc,
    _add_sessions,
    _add_fsck,
    _add_repair,
    _add_reindex,
    _add_doctor,
)


def _add_push(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "push",
        "bring commits to another store",
        "Bring commits and their tags to the store TO: those that are named, else all. Only what "
        "TO lacks travels; a commit appears\n"
        "there whole, under the same id. What was interrupted goes on where it was when the "
        "command is run again.",
    )
    parser.add_argument("other", metavar="TO", help="a directory or a URL")
    parser.add_argument("--create", action="store_true", help="make the store TO if there is none")
    _add_end_index(parser, "to")
    _add_mirror_options(parser)


def _add_pull(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "pull",
        "bring commits from another store",
        "Bring commits and their tags from the store FROM, as `push` does.",
    )
    parser.add_argument("other", metavar="FROM", help="a directory or a URL")
    _add_end_index(parser, "from")
    _add_mirror_options(parser)


def _add_clone(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "clone",
        "make a store with the commits of another one",
        "Make the store TO with every commit and tag of the store FROM. Run again, it completes a "
        "clone that was interrupted.",
    )
    parser.add_argument("other", metavar="FROM", help="a directory or a URL")
    parser.add_argument("to", metavar="TO", help="a new directory or a URL")
    parser.add_argument("--run", metavar="RUN", help="only the commits of one run")
    parser.add_argument("--verify", action="store_true", help="read back what was written")
    for end in ("from", "to"):
        _add_end_index(parser, end)
    parser.set_defaults(
        module="mirror", refs=(), ancestors=False, tags=True, force=False, dry_run=False
    )


def _add_end_index(parser: Parser, end: str) -> None:
    parser.add_argument(
        f"--{end}-index",
        metavar="URL",
        help=f"the database that has the log of the store {end.upper()}, if one does",
    )


def _add_mirror_options(parser: Parser) -> None:
    parser.add_argument(
        "refs",
        nargs="*",
        metavar="REF",
        help="these commits (default: all), looked for where they come from",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="only the commits of one run; steps and 'latest' are looked for in it",
    )
    parser.add_argument(
        "--ancestors", action="store_true", help="with the REFs, all commits that they descend from"
    )
    tags = parser.add_mutually_exclusive_group()
    tags.add_argument(
        "--force", action="store_true", help="let tags move that name another commit in the target"
    )
    tags.add_argument("--no-tags", action="store_false", dest="tags", help="leave tags out")
    parser.add_argument(
        "--verify", action="store_true", help="read back what was written before a commit appears"
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="only say which commits, chunks and bytes would travel",
    )
    parser.set_defaults(module="mirror")


def _add_import(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "import",
        "commit a file or a directory of another format",
        "Commit what is at PATH: a .safetensors file, a .safetensors.index.json with its shards, a "
        ".pt file, a directory of DCP or of\n"
        "TorchSnapshot, or any other directory, such as a Hugging Face model. What the store has "
        "already takes no room again.",
    )
    parser.add_argument("path", metavar="PATH", help="a file or a directory")
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="the run of the new commit (default: $CKPTSTORE_RUN, else main)",
    )
    parser.add_argument("--step", type=count, metavar="N", help="its step")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="NAME", help="a tag for it; may be repeated"
    )
    parser.add_argument(
        "--message", default="", metavar="TEXT", help="its message (default: where it is from)"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a metric of it; may be repeated",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="unpickle what could not be read otherwise: it may run any code",
    )
    parser.set_defaults(module="imports")


def _add_export(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "export",
        "write a commit as files of another format",
        "Write a commit to PATH. What was imported from files becomes the same files again; else "
        "PATH's name or --format says what to\n"
        "write: safetensors (tensors only), torch (a .pt file), dcp (a directory for "
        "torch.distributed.checkpoint).",
    )
    parser.add_argument("ref", metavar="REF", help="which commit")
    parser.add_argument("path", metavar="PATH", help="a new file or directory")
    parser.add_argument(
        "--run", metavar="RUN", help="look for steps, 'latest' and 'best:' in this run"
    )
    formats = ("files", "safetensors", "torch", "dcp")
    parser.add_argument(
        "--format", choices=formats, metavar="FORMAT", help=f"one of {', '.join(formats)}"
    )
    parser.add_argument(
        "--select",
        action="append",
        metavar="KEY|GLOB",
        help="a key of the state (model), or leaves by their paths; may be repeated",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="unpickle what was pickled when it was committed",
    )


_MIRRORS = (_add_push, _add_pull, _add_clone, _add_import, _add_export)


def _add_migrate(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
        commands,
        common,
        "migrate",
        "bring the catalog up to this version of ckptstore, or move the log",
        "Bring this host's catalog of the store up to this version of ckptstore. Every command "
        "does so when it must, but for tables\n"
        "in PostgreSQL; this one says what it did. With --log-to, move the store's log into a "
        "database, or back into the store;\n"
        "with --restore-log, make a lost database again from the copies of its entries. Packs and "
        "commits are not touched.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--log-to",
        metavar="URL",
        help="postgresql+psycopg://USER@HOST/DATABASE, or 'store'; others commit again after it",
    )
    what.add_argument(
        "--restore-log",
        action="store_true",
        help="bring the database that --index names up to the copies in the store",
    )


def _add_completion(commands: Any, common: ArgumentParser) -> None:
    parser = _command(
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
