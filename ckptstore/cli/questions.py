"""The commands that look at commits, with their options, as data (see `commands`)."""

from ckptstore.cli.parser import Command, Option, count, flag, port, several, span

RUN = Option("--run", "RUN", "resolve steps, 'latest' and 'best:' in this run")
REF = Option("ref", "REF", "the commit (default: latest)", nargs="?", default="latest")
_FOLD = (
    flag("-a --all", "print one line per leaf", dest="fold", means=False, default=None),
    flag("--fold", "fold leaves, also in a pipe and if they are few", default=None),
)

_NUMBERS = ("norm", "mean", "std", "min", "max", "zeros", "nan", "drift", "drift_first")

QUESTIONS = (
    Command(
        "log",
        "log.log",
        "list commits, newest first",
        (
            Option("-n", "N", "list at most N commits", type=count, dest="limit"),
            flag("-a --all", "list every commit"),
            several("--run", "RUN", "commits of this run (default: all runs)"),
            flag("--forgotten", "list the forgotten commits that `undelete` can restore"),
            several("--tag", "GLOB", "commits with a tag that matches GLOB", nargs="?", const="*"),
            Option(
                "--since",
                "TIME",
                "commits since TIME: a span before now (90min, 2h, 3d), or a date or time",
            ),
            Option("--until", "TIME", "commits until TIME"),
            several("--metric", "NAME", "show this metric (default: the three most frequent)"),
            Option("--sort", "METRIC[:max]", "sort by a metric: smallest first, or largest"),
            (
                flag(
                    "--graph",
                    "draw the lineage (default on a terminal if it branches)",
                    default=None,
                ),
                flag(
                    "--no-graph", "do not draw the lineage", dest="graph", means=False, default=None
                ),
            ),
        ),
        "List commits, newest first: 50 on a terminal, all with --all, with --json and in a pipe.",
    ),
    Command(
        "show",
        "show.show",
        "show everything about a commit",
        (
            REF,
            RUN,
            flag("--usage", "add exclusive and shared bytes, which reads every commit"),
        ),
    ),
    Command(
        "ls",
        "ls.ls",
        "list the leaves of a commit",
        (
            REF,
            RUN,
            Option(
                "globs",
                "GLOB",
                "leaves whose path, in full or below its key, matches or lies below: model, "
                "'layers.*', '*.bias' (* crosses /)",
                nargs="*",
            ),
            flag("-l --long", "also show chunks, sizes of values, and small values"),
            _FOLD,
        ),
        "List the leaves of a commit. A terminal folds more than 40: leaves whose paths differ "
        "only in\nnumbers become one line, whose pattern is a GLOB.",
    ),
    Command(
        "diff",
        "diff.diff",
        "compare two commits",
        (
            Option("a", "A", "the older commit"),
            Option("b", "B", "the newer commit"),
            RUN,
            flag("--stat", "print sums per key"),
            _FOLD,
        ),
        "Compare two commits leaf by leaf. More than 40 changes are folded: leaves whose paths "
        "differ only in\nnumbers become one line. If there still are more than 40 lines, sums per "
        "key are printed, and the\nchanges that are more than another content of a tensor.",
    ),
    Command(
        "parted",
        "analysis.parted",
        "find where two runs part that should be equal",
        (
            Option("a", "RUN_A", "a run"),
            Option("b", "RUN_B", "another run"),
            several("--select", "GLOB", "compare these leaves only, such as 'model/*'"),
            Option("-n", "N", "list and measure N leaves", type=count, dest="limit", default=10),
        ),
        "Compare the commits of two runs step by step, and list the leaves that differ at the "
        "first step\nat which some do: the largest difference of two elements, and the norm of the "
        "difference by that of\nthe tensor. Reads tensors of these leaves only.",
    ),
    Command(
        "history",
        "history.history",
        "show how tensors moved over the commits of a run",
        (
            Option("globs", "GLOB", "tensors by their paths (default: all)", nargs="*"),
            Option("--run", "RUN", "commits of this run (default: the one trained last)"),
            several("--ref", "REF", "this commit, instead of all of a run", dest="refs"),
            Option("-n", "N", "show the last N commits", type=count, dest="limit"),
            flag("--nan", "for each tensor, show the first commit with a NaN or an infinity"),
        ),
        "Norm, mean, standard deviation, minimum, maximum, zeros and NaN of tensors in each "
        "commit, and how far\nthey moved since the one before (drift) and since the first. What is "
        "measured is kept in the catalog:\na second look reads no tensor.",
    ),
    Command(
        "plot",
        "plot.plot",
        "draw metrics, sizes, tensors or a difference",
        (
            Option(
                "kind",
                "KIND",
                "metrics, size, tensor or diff",
                choices=("metrics", "size", "tensor", "diff"),
            ),
            Option("words", "WORD", "metrics, GLOBs of tensors, or two REFs", nargs="*"),
            Option("-o", "FILE", "an .svg, .png or .pdf file (default: here)", dest="output"),
            several(
                "--run",
                "RUN",
                "this run (default: all; of tensors the one trained last)",
                dest="runs",
            ),
            Option(
                "--of",
                "NUMBER",
                f"of tensors: {', '.join(_NUMBERS)}",
                choices=_NUMBERS,
                default="norm",
            ),
            flag("--log", "a logarithmic axis"),
        ),
        "Draw a chart into FILE, or on the terminal: metrics over steps, the size of all commits, "
        "a number of\ntensors over steps, or which tensors changed most from one commit to "
        "another.",
    ),
    Command(
        "watch",
        "watch.watch",
        "show new commits, writers and the disk as they change",
        (
            Option("--every", "SPAN", "look every SPAN (default: 2s)", type=span, default=2),
            Option("-n", "N", "end after N new commits", type=count, dest="count"),
            Option("--mirror", "STORE", "also count the commits that this mirror lacks"),
        ),
        "Show the last commits, their rate, when the disk will be full, and which processes write, "
        "until Ctrl-C.\nIn a pipe, print a line for each new commit.",
        draws=True,
    ),
    Command(
        "bisect",
        "analysis.bisect",
        "find the first bad commit between two",
        (
            Option("--good", "REF", "a commit that is good"),
            Option("--bad", "REF", "a later one that is bad (default: latest)", default="latest"),
            Option("--run", "RUN", "resolve REFs in this run (default: the one trained last)"),
            Option(
                "--command",
                "CMD",
                "ask a shell command: 0 is good; the commit is in $CKPTSTORE_REF",
                dest="command_line",
            ),
            flag("--nan", "bad is a commit with a NaN or an infinity"),
            Option("--leaf", "GLOB", "bad is a commit in which these tensors' norm is above"),
            Option("--above", "NUMBER", "this number", type=float),
            Option("--verdicts", "FILE", "keep verdicts, and begin with those that FILE has"),
        ),
        "Look at about log2 of the commits between, along first parents, and name the first bad "
        "one.",
    ),
    Command(
        "verify",
        "signing.verify",
        "check that a commit is signed by a key that you trust",
        (
            REF,
            RUN,
            several("--keys", "FILE", "public keys that you trust", action="extend", nargs="+"),
        ),
        "Check that one of the keys signed the commit. To compare its bytes with its id too, run\n"
        "`ckptstore fsck --read-data`, or restore with `checkout(…, require_signature=FILE)`.",
    ),
    Command(
        "ui",
        "ui.ui",
        "show a web page of the store",
        (
            Option("--host", "HOST", "the address to serve it at (default: 127.0.0.1)"),
            Option("--port", "PORT", "its port (default: the first free one from 8765)", type=port),
            flag("--open", "open it in the browser"),
            flag("--allow-changes", "let the page tag, untag, forget and undelete"),
            Option("--export", "DIR", "write the page as static files to DIR, and serve nothing"),
            Option(
                "--commits",
                "N",
                "the newest commits that --export writes pages of (default: 200)",
                type=count,
                default=200,
            ),
        ),
        "Serve a web page of the store, or of several: -s may be repeated. It changes nothing "
        "without\n--allow-changes. Needs `pip install 'ckptstore[ui]'`.",
        several_stores=True,
    ),
)
