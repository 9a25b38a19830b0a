"""`ckptstore doctor`: whether the storage does what a store needs, and whether the next commit will
fit."""

from argparse import Namespace
from dataclasses import asdict

from ckptstore.cli.exits import Exit
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.maintenance.doctor import Verdict, doctor


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args) as store:
        with screen.working("trying the storage"):
            checks = doctor(store)
        if screen.json:
            screen.document({"store": store.url, "checks": [asdict(check) for check in checks]})
        else:
            columns = (Column("check"), Column("verdict"), Column("seen", fit="wrap"))
            screen.table(
                Table(
                    columns,
                    tuple((check.name, check.verdict.value, check.seen) for check in checks),
                )
            )
            for check in checks:
                if check.next:
                    screen.line(f"{check.name}: {check.next}")
    return Exit.FAILED if any(check.verdict is Verdict.FAILED for check in checks) else Exit.OK
