"""`ckptstore init`, `which`, `migrate` and `completion`: create a store, find it, bring it to this
version, and teach a shell the command line."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from ckptstore.cli.call import VARIABLE, Answer, Call, Exit, NoStore
from ckptstore.cli.commands import COMMANDS
from ckptstore.cli.commits import config_text
from ckptstore.cli.parser import build
from ckptstore.cli.screen import Hint, fields_of
from ckptstore.errors import NotFound
from ckptstore.plugin.catalogs import REVISION
from ckptstore.plugin.files import check_path
from ckptstore.plugin.handles import CATALOG_NAME, init_store, read_config
from ckptstore.plugin.model import StoreConfig
from ckptstore.plugin.storage import open_storage
from ckptstore.plugin.text import count_text

TAGS = "latest $(ckptstore tag --names 2>/dev/null)"
PREAMBLE = {
    "bash": f'_ckptstore_refs() {{ compgen -W "{TAGS}" -- "$1"; }}',
    "zsh": f"_ckptstore_refs() {{ compadd {TAGS} }}",
    "fish": "function _ckptstore_refs; echo latest; ckptstore tag --names 2>/dev/null; end",
}
REFS = {"bash": "_ckptstore_refs", "zsh": "_ckptstore_refs", "fish": "(_ckptstore_refs)"}


def init(call: Call) -> Answer:
    args = call.args
    place = args.path or args.store or os.environ.get(VARIABLE) or "."
    if "://" not in place:
        check_path(place)
        place = os.path.abspath(place)
    config = init_store(
        place, chunk_bytes=args.chunk_size, codec=args.codec, private=args.private, index=args.index
    )
    document = {"store": place, "store_id": config.store}
    page = [f"created an empty store at {place} ({config_text(config)})"]
    return Answer({**document, **fields_of(config, "chunk_bytes", "codec")}, page)


def migrate(call: Call) -> Answer:
    if call.args.log_to or call.args.restore_log or _config(call.place())[0].in_database:
        return _migrate_log(call)
    store = call.open()
    path = store.index_directory / CATALOG_NAME
    before = _revision(path)
    with call.screen.progress("updating the catalog"):
        queries = store.queries()
        entry, commits = queries.position().n, queries.totals().commits
    after = _revision(path)
    document = {"catalog": str(path), "before": before, "after": after, "wanted": REVISION}
    counts = f"{count_text(commits, 'commit')}, log entry {entry}"
    return Answer(
        {**document, "entry": entry, "commits": commits},
        [f"{path} {_change(before, after)}; {counts}"],
        code=Exit.OK if after == REVISION else Exit.FAILED,
    )


def which(call: Call) -> Answer:
    config, call.url = _config(call.place(quiet=True))
    how = "named with -s" if call.found == "-s" else f"named by {call.found}"
    if call.found in ("here", "above"):
        how = f"found {call.found}"
    return Answer({"found": call.found, "store_id": config.store}, [call.url, Hint(how)])


def _config(place: str) -> tuple[StoreConfig, str]:
    """The configuration of a store, and its path or URL."""
    with closing(open_storage(place, read_only=True)) as storage:
        try:
            return read_config(storage), storage.url
        except NotFound as error:
            raise NoStore(str(error)) from error


def _migrate_log(call: Call) -> Answer:
    """Move the log, restore its database, or update the tables there."""
    from ckptstore.plugins.postgres.moving import migrate_tables, move_log, restore_log

    args = call.args
    call.url = place = call.place()
    if to := args.log_to:
        with call.screen.progress("moving the log"):
            moved = move_log(place, None if to == "store" else to, index=args.index)
        at = f"entry {moved.entries}, generation {moved.generation}"
        return Answer(
            {"log": moved.place, "generation": moved.generation, "entries": moved.entries},
            [f"the log is in {moved.place} now ({at})"],
        )
    if args.restore_log:
        with call.screen.progress("restoring the database"):
            missing = restore_log(place, index=args.index)
        return Answer(
            {"restored": missing}, [f"restored {count_text(missing, 'log row')} of the database"]
        )
    with call.screen.progress("updating the tables"):
        before, after = migrate_tables(place, index=args.index)
    return Answer(
        {"before": before, "after": after, "wanted": REVISION},
        [f"the database {_change(before, after)}"],
        code=Exit.OK if after == REVISION else Exit.FAILED,
    )


def _change(before: str | None, after: str | None) -> str:
    if after != REVISION:
        return (
            "could not be written, so queries run in memory (revision "
            f"{before or 'none'}, wanted {REVISION})"
        )
    if before == after:
        return f"is up to date (revision {after})"
    return f"was updated from revision {before} to {after}" if before else f"was made ({after})"


def _revision(path: Path) -> str | None:
    """The revision of the catalog's tables; None without a readable catalog."""
    if not path.is_file():
        return None
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.Error:
        return None
    return str(row[0]) if row else None


def completion(call: Call) -> Answer:
    import shtab

    parser = build(COMMANDS)
    for part in (parser, *parser.commands.values()):
        for action in part._actions:  # argparse has no public list of them
            if action.dest in ("store", "path"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # shtab's protocol
            elif action.dest in ("ref", "refs", "a", "b", "delete"):
                action.complete = REFS  # type: ignore[attr-defined]
    shell = call.args.shell
    script = shtab.complete(parser, shell=shell, preamble=PREAMBLE[shell])
    return Answer({"script": script}, script.rstrip("\n").split("\n"))
