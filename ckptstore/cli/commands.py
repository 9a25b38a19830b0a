"""Every command with its options, as data; the modules that run them are imported when needed."""

from ckptstore.cli.parser import Operation, Option, Options, flag, several
from ckptstore.plugin.model import CHUNK_BYTES, CODECS

_RUN = Option("--run", "RUN", "resolve steps, 'latest' and 'best:' in this run")
_REF = Option("ref?", "REF", "the commit (default: latest)", default="latest")
_FOLD = (
    flag("-a --all", "print one line per leaf", dest="fold", means=False, default=None),
    flag("--fold", "fold leaves, also in a pipe and if they are few", default=None),
)

_NUMBERS = ("norm", "mean", "std", "min", "max", "zeros", "nan", "drift", "drift_first")
_PLACE = "a directory or a URL"
_DRY_RUN = flag("-n --dry-run", "print the plan and change nothing")
_READ_DATA = Option(
    "--read-data",
    "AMOUNT",
    "read and hash stored data: all, or an amount such as 5%% or 10G, oldest check first",
    nargs="?",
    const="100%",
)
_ON = Option(
    "--on",
    "ENGINE",
    "run on the workers of a Ray cluster: ray for this host's, or ray://HOST:PORT",
)
_VERIFY = flag("--verify", "read written data back before a commit appears")
_PICKLE = flag("--allow-pickle", "unpickle data if necessary; this may run any code")
_TO_INDEX = Option("--to-index", "URL", "the database with the log of TO, if it is in one")
_FROM_INDEX = Option("--from-index", "URL", "the database with the log of FROM, if it is in one")
_MIRROR: Options = (
    Option("refs*", "REF", "commits of the source (default: all)"),
    Option("--run", "RUN", "copy commits of this run only, and resolve REFs in it"),
    flag("--ancestors", "copy all ancestors of the REFs too"),
    (
        flag("--force", "move tags that name another commit in the target"),
        flag("--no-tags", "copy no tags", dest="tags", means=False, default=True),
    ),
    _VERIFY,
    _ON,
    _DRY_RUN,
)
_STEP = Option("--step", "N", "its step")
_SAID: Options = (
    Option("--message", "TEXT", "its message (default: the origin)", default=""),
    several("--metric", "NAME=VALUE", "one of its metrics"),
)
_LABEL: Options = (
    Option("--run", "RUN", "the run of the commit (default: $CKPTSTORE_RUN, else main)"),
    _STEP,
    several("--tag", "NAME", "a tag for it"),
    *_SAID,
)
_PERIODS = {"hourly": "hour", "daily": "day", "weekly": "week", "monthly": "month"}
_FORMATS = ("files", "safetensors", "torch", "dcp")

_KEEP = (
    Option("--keep-last", "N", "keep the newest N"),
    Option("--keep-every-steps", "N", "keep steps that are multiples of N"),
    several(
        "--keep-best",
        ("METRIC[:max]", "N"),
        "keep the best N (default: 1) by a metric",
        nargs="+",
    ),
    Option(
        "--keep-within",
        "SPAN",
        "keep commits at most SPAN (90min, 12h, 7d) older than the run's newest",
    ),
    *(
        Option(
            f"--keep-{adverb}",
            "N",
            f"keep the newest commit of each of N {unit}s",
        )
        for adverb, unit in _PERIODS.items()
    ),
    several(
        "--thin",
        "GLOB",
        "instead of forgetting the others, drop their leaves that match ('optimizer/**')",
    ),
)
"""What stays, and stays whole, for `forget` and `stats --what-if`."""

COMMANDS = (
    Operation(
        "init",
        "cli.setup.init",
        "create an empty store",
        (
            Option(
                "path?",
                "PATH",
                "a new or empty directory, or a URL (default: -s, $CKPTSTORE, or here)",
            ),
            Option(
                "--chunk-size",
                "SIZE",
                "a power of two from 64KiB to 64MiB (default: 1MiB)",
                default=CHUNK_BYTES,
            ),
            Option(
                "--codec",
                "CODEC",
                f"{', '.join(CODECS)} (default: raw)",
                choices=CODECS,
                default="raw",
            ),
            flag("--private", "let only the owner read and write the store"),
        ),
    ),
    Operation(
        "log",
        "plugins.reports.log.log",
        "list commits, newest first",
        (
            Option("-n", "N", "list at most N commits", dest="limit"),
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
    Operation(
        "show",
        "plugins.reports.show.show",
        "show everything about a commit",
        (
            _REF,
            _RUN,
            flag("--usage", "add exclusive and shared bytes, which reads every commit"),
        ),
    ),
    Operation(
        "ls",
        "plugins.reports.ls.ls",
        "list the leaves of a commit",
        (
            _REF,
            _RUN,
            Option(
                "globs*",
                "GLOB",
                "leaves whose path, in full or below its key, matches or lies below: model, "
                "'layers.*', '*.bias' (* crosses /)",
            ),
            flag("-l --long", "also show chunks, sizes of values, and small values"),
            _FOLD,
        ),
        "List the leaves of a commit. A terminal folds more than 40: leaves whose paths differ "
        "only in\nnumbers become one line, whose pattern is a GLOB.",
    ),
    Operation(
        "diff",
        "plugins.reports.diff.diff",
        "compare two commits",
        (
            Option("a", "A", "the older commit"),
            Option("b", "B", "the newer commit"),
            _RUN,
            flag("--stat", "print sums per key"),
            _FOLD,
        ),
        "Compare two commits leaf by leaf. More than 40 changes are folded: leaves whose paths "
        "differ only in\nnumbers become one line. If there still are more than 40 lines, sums per "
        "key are printed, and the\nchanges that are more than another content of a tensor.",
    ),
    Operation(
        "parted",
        "plugins.analysis.commands.parted",
        "find where two runs part that should be equal",
        (
            Option("a", "RUN_A", "a run"),
            Option("b", "RUN_B", "another run"),
            several("--select", "GLOB", "compare these leaves only, such as 'model/*'"),
            Option("-n", "N", "list and measure N leaves", dest="limit", default=10),
        ),
        "Compare the commits of two runs step by step, and list the leaves that differ at the "
        "first step\nat which some do: the largest difference of two elements, and the norm of the "
        "difference by that of\nthe tensor. Reads tensors of these leaves only.",
    ),
    Operation(
        "history",
        "plugins.analysis.history_command.history",
        "show how tensors moved over the commits of a run",
        (
            Option("select*", "GLOB", "tensors by their paths (default: all)"),
            Option("--run", "RUN", "commits of this run (default: the one trained last)"),
            several("--ref", "REF", "this commit, instead of all of a run", dest="refs"),
            Option("-n", "N", "show the last N commits", dest="limit"),
            flag("--nan", "for each tensor, show the first commit with a NaN or an infinity"),
        ),
        "Norm, mean, standard deviation, minimum, maximum, zeros and NaN of tensors in each "
        "commit, and how far\nthey moved since the one before (drift) and since the first. What is "
        "measured is kept in the catalog:\na second look reads no tensor.",
    ),
    Operation(
        "plot",
        "plugins.analysis.plot.plot",
        "draw metrics, sizes, tensors or a difference",
        (
            Option(
                "kind",
                "KIND",
                "metrics, size, tensor or diff",
                choices=("metrics", "size", "tensor", "diff"),
            ),
            Option("words*", "WORD", "metrics, GLOBs of tensors, or two REFs"),
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
    Operation(
        "watch",
        "plugins.follow.watch.watch",
        "show new commits, writers and the disk as they change",
        (
            Option("--every", "SPAN", "look every SPAN (default: 2s)", default=2),
            Option("-n", "N", "end after N new commits", dest="count"),
            Option("--mirror", "STORE", "also count the commits that this mirror lacks"),
        ),
        "Show the last commits, their rate, when the disk will be full, and which processes write, "
        "until Ctrl-C.\nIn a pipe, print a line for each new commit.",
        draws=True,
    ),
    Operation(
        "follow",
        "plugins.follow.command.follow",
        "hand each new commit of a run on",
        (
            Option("run", "RUN", "the run"),
            Option(
                "--ref",
                "REF",
                "what to follow in it: latest, best:METRIC, a tag (default: latest)",
                default="latest",
            ),
            Option("-o --output", "FILE", "replace this safetensors file by one of the commit"),
            several("--select", "GLOB", "write these leaves to FILE (default: all)"),
            Option(
                "--exec",
                "CMD",
                "then run a shell command; the commit is in $CKPTSTORE_REF, FILE in "
                "$CKPTSTORE_FILE",
                dest="command_line",
            ),
            Option("--every", "SPAN", "look every SPAN (default: 1s)", default=1),
            Option("-n", "N", "end after N commits", dest="count"),
        ),
        "Print a line for the commit that REF names now, and for each that it names later, until "
        "Ctrl-C.\nCommits that came meanwhile are skipped.",
        draws=True,
    ),
    Operation(
        "bisect",
        "plugins.analysis.commands.bisect",
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
    Operation(
        "verify",
        "plugins.signing.commands.verify",
        "check that a commit is signed by a key that you trust",
        (
            _REF,
            _RUN,
            several("--keys", "FILE", "public keys that you trust", action="extend", nargs="+"),
        ),
        "Check that one of the keys signed the commit. To compare its bytes with its id too, run\n"
        "`ckptstore fsck --read-data`, or restore with `checkout(…, require_signature=FILE)`.",
    ),
    Operation(
        "ui",
        "plugins.ui.command.ui",
        "show a web page of the store",
        (
            Option("--host", "HOST", "the address to serve it at (default: 127.0.0.1)"),
            Option("--port", "PORT", "its port (default: the first free one from 8765)"),
            flag("--open", "open it in the browser"),
            flag("--allow-changes", "let the page tag, untag, forget and undelete"),
            Option("--export", "DIR", "write the page as static files to DIR, and serve nothing"),
            Option(
                "--commits",
                "N",
                "the newest commits that --export writes pages of (default: 200)",
                default=200,
            ),
        ),
        "Serve a web page of the store, or of several: -s may be repeated. It changes nothing "
        "without\n--allow-changes. Needs `pip install 'ckptstore[ui]'`.",
        several_stores=True,
    ),
    Operation(
        "tag",
        "cli.tag.tag",
        "list, set, rename or remove tags",
        (
            Option("name?", "NAME", "the tag to set, move or rename"),
            Option("ref?", "REF", "the commit that it names (default: latest), or a new name"),
            flag("--names", "list only the names"),
            flag("-m --rename", "rename the tag NAME: --rename OLD NEW"),
            several(
                "-d --delete",
                "NAME",
                "remove these tags; their commits stay",
                action="extend",
                nargs="+",
            ),
            _RUN,
        ),
        "List tags. With NAME, set a tag; with --rename, give it another name; with -d, remove "
        "tags.",
    ),
    Operation(
        "stats",
        "plugins.reports.show.stats",
        "show the size of the store and its largest commits",
        (
            Option(
                "-n",
                "N",
                "list the N commits with most exclusive bytes (default: 10)",
                default=10,
                dest="top",
            ),
            flag("--what-if", "what the --keep options, --thin or --compact would free by run"),
            flag("--compact", "with --what-if: what `compact` would free, by a sample"),
            *_KEEP,
        ),
    ),
    Operation(
        "forget",
        "cli.maintain.forget",
        "forget commits by policy or by name",
        (
            Option("refs*", "REF", "commits to forget, instead of --keep options"),
            *_KEEP,
            Option("--run", "RUN", "this run only (default: all); REFs are resolved in it"),
            flag(
                "--all",
                "forget the whole run that --run names; with REFs, also a run's last",
                dest="all_commits",
            ),
            flag("--yes", "do not ask, on a terminal, before --keep options or --all forget"),
            _DRY_RUN,
        ),
        "Forget the commits that no --keep option keeps, in each run, or the commits REF, or a "
        "whole run.\nTagged commits stay, and by --keep options also the two newest of each run. "
        "`undelete` restores\nforgotten commits, and what --thin dropped, until `gc` deletes them.",
    ),
    Operation(
        "undelete",
        "cli.maintain.undelete",
        "restore forgotten commits",
        (
            Option("refs*", "REF", "forgotten commits"),
            flag("-a --all", "restore every forgotten commit"),
            Option("--run", "RUN", "resolve REFs in this run, or restore all of this run"),
        ),
        "Restore forgotten commits that no gc has deleted. A REF names a forgotten commit here: a "
        "step the\nnewest of them, 'latest' the newest of all. `log --forgotten` lists them.",
    ),
    Operation(
        "release",
        "cli.maintain.release",
        "let the commits of deleted hollow directories go",
        (
            Option("holds*", "DIR|HOLD", "hollow directories, or holds by name"),
            several(
                "--except-in",
                "FOLDER",
                "release all holds but those of the hollow directories in these folders",
                action="extend",
                nargs="+",
            ),
            _DRY_RUN,
        ),
        "Release the holds (tags held/…) of hollow directories that are about to go, or are gone "
        "with all their\ncopies. A store never does so alone: it cannot know where copies lie.",
    ),
    Operation(
        "compact",
        "cli.maintain.compact_store",
        "store old commits smaller, without loss",
        (
            _DRY_RUN,
            Option(
                "--newest",
                "N",
                "the newest N commits of each run stay as they are (default: 1)",
                default=1,
            ),
            Option(
                "--every",
                "N",
                "N consecutive commits share a base (default: 8)",
                default=8,
            ),
            (Option("--threads", "N", "code on N threads (default: 1)"), _ON),
            (
                flag("--with-gc", "let every later gc compact like this", default=None),
                flag(
                    "--without-gc",
                    "let gc compact no more",
                    dest="with_gc",
                    means=False,
                    default=None,
                ),
            ),
        ),
        "Store the chunks of old commits as byte planes, and as differences from those of a "
        "neighboring commit. Nothing of them is lost; they take longer to read.",
    ),
    Operation(
        "gc",
        "cli.maintain.gc",
        "delete what no commit needs",
        (
            _DRY_RUN,
            Option(
                "--max-unused",
                "SHARE",
                "share of dead bytes that packs may keep (default: 5%%)",
            ),
            Option(
                "--max-repack",
                "SIZE",
                "copy at most SIZE, such as 10G, and merge small packs with what is left of it "
                "(default: copy what pays)",
                dest="max_repack_bytes",
            ),
            (
                Option(
                    "--grace",
                    "SPAN",
                    "keep what was forgotten less than SPAN ago (default: 1h)",
                    dest="grace_s",
                ),
                Option(
                    "--now",
                    None,
                    "delete what was just forgotten, too",
                    dest="grace_s",
                    const=0,
                    action="store_const",
                ),
            ),
            flag("--force", "wait for no commit in flight; it may have to write chunks again"),
            _ON,
        ),
        "Delete commits that were forgotten over an hour ago and everything that no commit needs, "
        "and combine\nsparse and small packs. Others may commit, read and collect meanwhile. A "
        "later gc deletes what commits\nin flight may reuse.",
    ),
    Operation("sessions", "cli.maintain.sessions", "list writers and the packs that wait for them"),
    Operation(
        "fsck",
        "cli.checks.fsck_store",
        "check the store for damage",
        (
            Option(
                "--level",
                "LEVEL",
                "the depth of the check (default: connectivity)",
                choices=("refs", "connectivity", "packs", "data"),
                default="connectivity",
            ),
            _READ_DATA,
            Option("--shard", "I/N", "check part I of N, for arrays of jobs on N hosts"),
            _ON,
        ),
        "Check the store for damage; change nothing. Levels, each with those before:\n"
        "  refs          log, tags and catalog\n"
        "  connectivity  documents, schemas, pages and chunks of every commit\n"
        "  packs         footers of every pack\n"
        "  data          every stored byte",
    ),
    Operation(
        "repair",
        "cli.checks.repair_store",
        "repair damage",
        (
            flag("--apply", "carry the plan out"),
            several(
                "--from", "STORE", "a mirror, or any store that has the chunks", dest="mirrors"
            ),
            _READ_DATA,
        ),
        "Plan the repair of damage; with --apply, carry it out. Only verified data is written. "
        "Replaced objects\ngo to quarantine/ in the store. Commits that stay damaged are named. "
        "Readers and writers may continue.",
    ),
    Operation("reindex", "cli.maintain.reindex", "rebuild this host's catalog and chunk index"),
    Operation(
        "doctor",
        "plugins.reports.commands.doctor",
        "test the storage, and check the space for the next commit",
    ),
    Operation(
        "push",
        "cli.mirrors.push",
        "copy commits to another store",
        (
            Option("other", "TO", _PLACE),
            flag("--create", "create the store TO if there is none"),
            _TO_INDEX,
            *_MIRROR,
        ),
        "Copy commits and their tags to the store TO, without chunks that it has. A commit "
        "appears there whole,\nunder the same id. Repeat an interrupted push to resume it.",
    ),
    Operation(
        "pull",
        "cli.mirrors.pull",
        "copy commits from another store",
        (Option("other", "FROM", _PLACE), _FROM_INDEX, *_MIRROR),
        "Copy commits and their tags from the store FROM, as `push` does.",
    ),
    Operation(
        "clone",
        "cli.mirrors.clone",
        "copy a whole store",
        (
            Option("other", "FROM", _PLACE),
            Option("to", "TO", "a new directory or a URL"),
            Option("--run", "RUN", "copy commits of this run only"),
            _VERIFY,
            _ON,
            _FROM_INDEX,
            _TO_INDEX,
        ),
        "Create the store TO with every commit and tag of the store FROM. Repeat an interrupted "
        "clone to\nresume it.",
    ),
    Operation(
        "import",
        "cli.files.import_files",
        "commit files of another format",
        (Option("path", "PATH", "a file or a directory"), *_LABEL, _PICKLE),
        "Commit the content of PATH: a .safetensors file, a .safetensors.index.json with its "
        "shards, a .pt\nfile, a directory of DCP or TorchSnapshot, or any other directory, such "
        "as a Hugging Face model.",
    ),
    Operation(
        "average",
        "plugins.analysis.commands.average",
        "commit the average of commits",
        (
            Option("refs*", "REF", "two commits or more"),
            (
                Option("--weights", "W,W,…", "one for each, which are made to add up to 1"),
                Option("--ema", "DECAY", "a moving average, from the first REF to the last"),
                Option("--slerp", "PART", "a point of the arc from the first of two to the second"),
                Option("--factors", "F,F,…", "one for each, as they are: 1,0.5,-0.5"),
            ),
            several("--select", "GLOB", "add these leaves only; others are the last REF's"),
            several("-o --tag", "TAG", "a tag for it"),
            Option("--run", "RUN", "resolve REFs in this run (default: the one trained last)"),
            Option("--into", "RUN", "the run of the new commit (default: averages)"),
            _STEP,
            *_SAID,
        ),
        "Commit the mean of REFs, leaf by leaf, or another sum of them; they are its parents. "
        "Tensors of\nfloats are added, everything else is as in the last REF. Memory does not grow "
        "with the state.",
    ),
    Operation(
        "export",
        "cli.files.export_files",
        "write a commit as files of another format",
        (
            Option("ref", "REF", "the commit"),
            Option("path", "PATH", "a new file or directory"),
            _RUN,
            Option("--format", "FORMAT", f"one of {', '.join(_FORMATS)}", choices=_FORMATS),
            several("--select", "KEY|GLOB", "a key of the state, or leaves by their paths"),
            Option(
                "--shard-size",
                "SIZE",
                "PATH becomes a directory of safetensors files of at most SIZE, and their index",
            ),
            _ON,
            _PICKLE,
        ),
        "Write a commit to PATH. Imported files become the same files again. Otherwise the name "
        "of PATH or\n--format selects safetensors (tensors only), torch (a .pt file) or dcp (a "
        "directory for\ntorch.distributed.checkpoint).",
    ),
    Operation(
        "sign",
        "plugins.signing.commands.sign",
        "sign a commit, or make a key to sign with",
        (
            Option("ref?", "REF", "the commit"),
            _RUN,
            Option("--key", "FILE", "a private key (OpenSSH, Ed25519), or the .pub of an agent's"),
            Option("--new-key", "FILE", "make a key: FILE, and FILE.pub for those who verify"),
        ),
        "Sign the id of a commit, and so every byte of it. Mirrors copy signatures.",
    ),
    Operation("which", "cli.setup.which", "print which store is used, and where it was found"),
    Operation(
        "adopt",
        "plugins.adopt.commands.adopt",
        "commit a checkpoint directory, byte for byte",
        (
            Option("directory", "DIR", "the directory"),
            flag("--hollow", "remove the files with tensors from DIR when the commit is durable"),
            *_LABEL,
            several("--link", "NAME=TEXT", "a link, such as the URL of the run in a tracker"),
        ),
        "Commit the directory DIR of any program. Tensors in its files share chunks with other "
        "commits; nothing\nis unpickled. `materialize` writes the directory again, byte for byte.",
    ),
    Operation(
        "materialize",
        "plugins.adopt.commands.materialize",
        "write an adopted directory again",
        (
            Option("ref", "REF", "the commit, or a hollow directory"),
            Option(
                "directory?",
                "DIR",
                "a new or empty directory, or a hollow one of this commit; default: REF",
            ),
            _RUN,
            Option("--select", "GLOB", "files, by their names in DIR (* crosses /)", default="*"),
        ),
    ),
    Operation(
        "migrate",
        "cli.setup.migrate",
        "update the catalog to this version, or move the log",
        (
            (
                Option(
                    "--log-to",
                    "URL",
                    "move the log to postgresql+psycopg://USER@HOST/DATABASE, or to 'store'",
                ),
                flag(
                    "--restore-log",
                    "rebuild the lost database at --index from the copies in the store",
                ),
            ),
        ),
        "Update this host's catalog to this version of ckptstore, and report what that took. "
        "Other commands\ndo so too if necessary, except for tables in PostgreSQL. Packs and "
        "commits stay as they are.",
    ),
    Operation(
        "completion",
        "cli.setup.completion",
        "print a completion script for a shell",
        (Option("shell", "SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish")),),
        'Print a completion script.\n  bash: eval "$(ckptstore completion bash)" in ~/.bashrc\n'
        "  zsh:  ckptstore completion zsh > a directory of $fpath, as _ckptstore\n"
        "  fish: ckptstore completion fish > ~/.config/fish/completions/ckptstore.fish",
    ),
)
