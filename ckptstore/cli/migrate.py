"""`ckptstore migrate`: bring this host's catalog up to this version of ckptstore, and say what that
took."""

import os
import sqlite3
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from ckptstore.cli.exits import Exit, NoStore
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import find, opened
from ckptstore.core.text import count_text
from ckptstore.errors import NotFound
from ckptstore.index.catalog_sqlite import REVISION
from ckptstore.repository.init_store import read_config
from ckptstore.repository.store_handle import CATALOG_NAME
from ckptstore.storage.registry import open_storage


def run(args: Namespace, screen: Screen) -> Exit:
    if args.log_to:
        return _move(args, screen)
    if args.restore_log:
        return _restore(args, screen)
    if _in_database(find(args.store, os.environ, Path.cwd())):
        return _migrate_tables(args, screen)
    with opened(args) as store:
        path = store.index_directory / CATALOG_NAME
        before = _revision(path)
        with screen.working("bringing the catalog up to date"):
            queries = store.queries()
            entry, commits = queries.position().n, queries.totals().commits
        after = _revision(path)
        if screen.json:
            document = {
                "catalog": str(path),
                "before": before,
                "after": after,
                "wanted": REVISION,
                "entry": entry,
                "commits": commits,
            }
            screen.document({"store": store.url, **document})
        else:
            screen.line(
                f"{path}: {_story(before, after)}; {count_text(commits, 'commit')}, log entry "
                f"{entry}"
            )
    return Exit.OK if after == REVISION else Exit.FAILED


def _in_database(place: str) -> bool:
    with closing(open_storage(place, read_only=True)) as storage:
        try:
            return read_config(storage).in_database
        except NotFound as error:
            raise NoStore(str(error)) from error


def _move(args: Namespace, screen: Screen) -> Exit:
    from ckptstore.maintenance.move_log import move_log

    place = find(args.store, os.environ, Path.cwd())
    with screen.working("moving the log"):
        moved = move_log(place, None if args.log_to == "store" else args.log_to, index=args.index)
    if screen.json:
        screen.document(
            {
                "store": place,
                "log": moved.place,
                "generation": moved.generation,
                "entries": moved.entries,
            }
        )
    else:
        screen.line(
            f"the log is in {moved.place} now (entry {moved.entries}, generation "
            f"{moved.generation})"
        )
    return Exit.OK


def _restore(args: Namespace, screen: Screen) -> Exit:
    from ckptstore.maintenance.move_log import restore_log

    place = find(args.store, os.environ, Path.cwd())
    with screen.working("making the database again"):
        missing = restore_log(place, index=args.index)
    if screen.json:
        screen.document({"store": place, "restored": missing})
    else:
        screen.line(f"put {count_text(missing, 'log row')} back into the database")
    return Exit.OK


def _migrate_tables(args: Namespace, screen: Screen) -> Exit:
    from ckptstore.maintenance.move_log import migrate_tables

    place = find(args.store, os.environ, Path.cwd())
    with screen.working("bringing the tables up to date"):
        before, after = migrate_tables(place, index=args.index)
    if screen.json:
        screen.document({"store": place, "before": before, "after": after, "wanted": REVISION})
    else:
        screen.line(f"the tables in the database: {_story(before, after)}")
    return Exit.OK if after == REVISION else Exit.FAILED


def _story(before: str | None, after: str | None) -> str:
    if after != REVISION:
        return (
            f"could not be written, so queries run in memory (revision {before or 'none'}, "
            f"wanted {REVISION})"
        )
    if before == after:
        return f"is up to date (revision {after})"
    if before is None:
        return f"was made (revision {after})"
    return f"was brought from revision {before} to {after}"


def _revision(path: Path) -> str | None:
    """Which revision's tables the catalog has; None if there is no catalog that can be read."""
    if not path.is_file():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        finally:
            connection.close()
    except sqlite3.Error:
        return None
    return str(row[0]) if row else None
