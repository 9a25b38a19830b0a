"""`ckptstore migrate`: bring this host's catalog up to this version of ckptstore, and say what that took."""

import sqlite3
from argparse import Namespace
from pathlib import Path

from ckptstore.cli.exits import Exit
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.engine.opening import CATALOG_NAME
from ckptstore.index.queries import REVISION
from ckptstore.text import count_text


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args) as store:
        path = store.index_directory / CATALOG_NAME
        before = _revision(path)
        with screen.working("bringing the catalog up to date"):
            queries = store.queries()
            entry, commits = queries.position().n, queries.totals().commits
        after = _revision(path)
        if screen.json:
            document = {"catalog": str(path), "before": before, "after": after, "wanted": REVISION, "entry": entry, "commits": commits}
            screen.document({"store": store.url, **document})
        else:
            screen.line(f"{path}: {_story(before, after)}; {count_text(commits, 'commit')}, log entry {entry}")
    return Exit.OK if after == REVISION else Exit.FAILED


def _story(before: str | None, after: str | None) -> str:
    if after != REVISION:
        return f"could not be written, so queries run in memory (revision {before or 'none'}, wanted {REVISION})"
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
