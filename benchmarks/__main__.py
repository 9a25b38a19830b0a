"""`python -m benchmarks`: run the chosen cases, keep the results, print the tables, write
docs/benchmarks.md and the README's numbers."""

import argparse
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    dcp_face,
    held,
    history,
    memory,
    questions,
    ranks,
    ranks_cost,
    ranks_leaves,
    report,
    restores,
    results,
    s3,
    saves,
    snapshots,
    training,
    transports,
)
from benchmarks.context import Context
from benchmarks.disk import work_dir
from benchmarks.links import NoLink
from benchmarks.measure import Result
from benchmarks.peers import PEERS
from benchmarks.plot import draw
from benchmarks.progress import phase
from benchmarks.results import Record

ROOT = Path(__file__).parents[1]
ROUNDS = 11

CASES: dict[str, Callable[[Context], Result]] = {
    "first": saves.first,
    "unchanged": saves.unchanged,
    "one-percent": saves.one_percent,
    "one-layer": saves.one_layer,
    "tiny": saves.tiny,
    "big": saves.big,
    "held": held.held,
    "async-training": training.async_training,
    "async-step": training.async_step,
    "async-busy": training.async_busy,
    "restore-warm": restores.restore_warm,
    "restore-cold": restores.restore_cold,
    "one-tensor": restores.one_tensor,
    "snapshot-take": snapshots.snapshot_take,
    "snapshot-restore": snapshots.snapshot_restore,
    "overhead-changed": history.overhead_changed,
    "overhead-unchanged": history.overhead_unchanged,
    "fixed-cost": history.fixed_cost,
    "log": history.shell_log,
    "statistics": questions.statistics,
    "statistics-bf16": questions.statistics_bf16,
    "average": questions.average,
    "dcp-face": dcp_face.dcp_face,
    "ranks": ranks.ranks,
    "ranks-fixed": ranks_cost.fixed,
    "ranks-leaves": ranks_leaves.leaves,
    "ranks-written": ranks_cost.written,
    "ranks-resharded": ranks_cost.resharded,
    "peak-save": memory.peak_save,
    "peak-restore": memory.peak_restore,
    "peak-average": memory.peak_average,
    "s3-commit": s3.s3_commit,
    "s3-restore": s3.s3_restore,
    "torchft-full": transports.full,
    "torchft-recovery": transports.recovery,
    "torchft-full-link": transports.full_link,
    "torchft-recovery-link": transports.recovery_link,
    "torchft-full-slow-link": transports.full_slow_link,
    "torchft-recovery-slow-link": transports.recovery_slow_link,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=CASES, help="run this case only; may be repeated"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"rounds that count (default {ROUNDS})"
    )
    parser.add_argument(
        "--peer",
        action="append",
        choices=[peer.name for peer in PEERS],
        help="only this peer; may be repeated",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="a folder on a disk with 15 GB free (default: the temporary folder)",
    )
    parser.add_argument(
        "--link",
        default="10gbit",
        metavar="RATE",
        help="between hosts, as `tc` writes it (default 10gbit); needs root",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="shrink the states to try the harness; needs --out"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT,
        help="where benchmarks/results, docs and README.md are (default: the repository)",
    )
    parsed = parser.parse_args(argv)
    if parsed.rounds < 1:
        parser.error("--rounds must be at least 1")
    if parsed.scale != 1.0 and parsed.out == ROOT:
        parser.error(
            "--scale needs --out: figures of a shrunk state do not belong into the repository"
        )
    return parsed


def run(case: str, folder: Path, chosen: argparse.Namespace) -> Record:
    """One case in a folder of its own, which is gone afterwards."""
    machine = results.machine(folder)
    place = folder / case
    place.mkdir()
    peers = tuple(peer for peer in PEERS if chosen.peer is None or peer.name in chosen.peer)
    result = CASES[case](Context(place, chosen.rounds, chosen.scale, peers, chosen.link))
    shutil.rmtree(place)
    return Record(result, len(next(iter(result.series.values())).values), machine)


def write_documents(out: Path) -> None:
    """The page, the plot and the README's numbers, from everything that was ever measured into
    `out`."""
    records = [
        record for case in CASES if (record := results.load(out / "benchmarks" / "results", case))
    ]
    docs = out / "docs"
    docs.mkdir(exist_ok=True)
    (docs / "benchmarks.md").write_text(report.page(records), encoding="utf-8")
    draw(docs / "benchmarks.svg", records)
    if (out / "README.md").exists():
        report.put_headline(out / "README.md", records)


def main(argv: Sequence[str] | None = None) -> int:
    # The peers warn that they run in a single process: that is what is measured.
    warnings.simplefilter("ignore")
    logging.getLogger("torchsnapshot").setLevel(logging.ERROR)
    chosen = arguments(argv)
    folder = work_dir(chosen.dir)
    try:
        for number, case in enumerate(chosen.case or CASES, 1):
            phase(f"{case} ({number} of {len(chosen.case or CASES)})")
            try:
                record = run(case, folder, chosen)
            except NoLink as error:
                phase(f"{case} is left out: {error}")
                continue
            results.save(chosen.out / "benchmarks" / "results", record)
            print(
                "\n"
                + "\n\n".join(
                    filter(None, [report.case_table(record.result), report.target_table([record])])
                ),
                flush=True,
            )
    finally:
        shutil.rmtree(folder)
    write_documents(chosen.out)
    phase(f"written: {chosen.out / 'docs' / 'benchmarks.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
