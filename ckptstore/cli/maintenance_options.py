"""Options of the commands that maintain a store and exchange commits with others."""

from argparse import ArgumentParser
from typing import Any

from ckptstore.cli.arguments import Parser, command, count, share, size


def _add_fsck(commands: Any, common: ArgumentParser) -> None:
    parser = command(
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
    parser = command(
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
    command(
        commands,
        common,
        "reindex",
        "make the indexes anew",
        "Make this host's catalog and chunk index anew from log and packs.",
    )


def _add_doctor(commands: Any, common: ArgumentParser) -> None:
    command(
        commands,
        common,
        "doctor",
        "try the storage out",
        "Try out whether the storage does what a store needs, how fast, and whether the next "
        "commit will fit.",
    )


def _add_forget(commands: Any, common: ArgumentParser) -> None:
    parser = command(
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
    parser = command(
        commands,
        common,
        "undelete",
        "bring forgotten commits back",
        "Bring forgotten commits back, by their ids.",
    )
    parser.add_argument("refs", nargs="+", metavar="REF", help="the beginnings of their ids")


def _add_gc(commands: Any, common: ArgumentParser) -> None:
    parser = command(
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
    command(
        commands,
        common,
        "sessions",
        "who is writing now",
        "Who is writing now, and which condemned packs wait for whom.",
    )


MAINTENANCE = (
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
    parser = command(
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
    parser = command(
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
    parser = command(
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
    parser = command(
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
    parser = command(
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


EXCHANGE = (_add_push, _add_pull, _add_clone, _add_import, _add_export)


def add_migrate(commands: Any, common: ArgumentParser) -> None:
    parser = command(
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
