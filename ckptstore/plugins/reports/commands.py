"""`ckptstore doctor`: what the place of a store can do, and whether the next commit fits."""

from ckptstore.cli.call import Answer, Call, Exit
from ckptstore.cli.screen import columns
from ckptstore.plugin.maintenance import Maintenance
from ckptstore.plugin.text import Table
from ckptstore.plugins.reports.doctor import Verdict


def doctor(call: Call) -> Answer:
    checks = call.carry_out(Maintenance.doctor, call.open(), "testing the storage")
    rows = [(check.name, check.verdict, check.seen) for check in checks]
    table = Table(columns("check", "verdict", "seen"), rows)
    advice = [f"{check.name}: {check.next}" for check in checks if check.next]
    failed = any(check.verdict is Verdict.FAILED for check in checks)
    return Answer({"checks": checks}, [table, *advice], code=Exit.FAILED if failed else Exit.OK)
