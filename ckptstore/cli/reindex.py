"""`ckptstore reindex`: make catalog and chunk index anew from the store."""

from argparse import Namespace
from dataclasses import asdict

from ckptstore.cli.exits import Exit
from ckptstore.cli.progress import progress
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.core.text import count_text
from ckptstore.maintenance.check.indexes import reindex


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args) as store:
        with progress(screen) as shown:
            done = reindex(store, progress=shown)
        if screen.json:
            screen.document(
                {"store": store.url, "index": str(store.index_directory), **asdict(done)}
            )
        else:
            broken = (
                f"; {count_text(done.unreadable, 'pack')} cannot be read, see `ckptstore fsck`"
                if done.unreadable
                else ""
            )
            packs, commits = count_text(done.packs, "pack"), count_text(done.commits, "commit")
            screen.line(
                f"{store.index_directory}: {commits}, {packs}, as of log entry "
                f"{done.entries}{broken}"
            )
    return Exit.DAMAGED if done.unreadable else Exit.OK
