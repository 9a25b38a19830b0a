"""`ckptstore sessions`: who is writing now, and what waits for whom."""

import time
from argparse import Namespace

from ckptstore.cli import timestamps
from ckptstore.cli.exits import Exit
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.core.text import bytes_text, seconds_text
from ckptstore.maintenance.gc.session_monitor import activities


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args) as store:
        found = activities(store)
        if screen.json:
            sessions = [
                {
                    "session": activity.info.id,
                    "status": activity.status,
                    "what": activity.info.what,
                    "host": activity.info.host,
                    "pid": activity.info.pid,
                    "time_ns": activity.info.time_ns,
                    "still_s": activity.still_s,
                    "waiting_packs": activity.packs,
                    "waiting_bytes": activity.bytes,
                }
                for activity in found
            ]
            screen.document({"store": store.url, "sessions": sessions})
            return Exit.OK
    columns = (
        Column("session", style="yellow"),
        Column("status"),
        Column("what"),
        Column("host"),
        Column("pid", right=True),
        Column("beat", right=True),
        Column("still", right=True),
        Column("packs waiting for it", right=True),
    )
    now_ns = time.time_ns()
    rows = tuple(
        (
            activity.info.id,
            activity.status,
            activity.info.what,
            activity.info.host,
            str(activity.info.pid or ""),
            timestamps.age_text(activity.info.time_ns, now_ns) if activity.info.time_ns else "",
            seconds_text(activity.still_s) if activity.still_s >= 1 else "",
            f"{activity.packs:,} ({bytes_text(activity.bytes)})" if activity.packs else "",
        )
        for activity in found
    )
    if rows:
        screen.table(Table(columns, rows))
    else:
        screen.hint("nobody is writing")
    return Exit.OK
