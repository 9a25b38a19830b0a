"""Results as people read them: tables in Markdown, one plot, and the headline of the README."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill

from benchmarks.measure import Result, Series, ratio
from benchmarks.results import Record
from benchmarks.targets import TARGETS, Target

PLOTTED = ("first", "unchanged", "one-layer", "restore-warm", "restore-cold")
NUMBERS_BEGIN, NUMBERS_END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
SPEED_FROM_BYTES = 100_000_000

INTRODUCTION = """\
# Benchmarks

Written by `make bench`; the figures of every round are in `benchmarks/results/`. Do not edit.

Everybody saves the same state in the same run on the same disk, in turns: each round runs every
contestant once, in random order, after a round that warms up and does not count. Figures are
medians over the rounds; *times ckptstore* is the median of the rounds' own ratios, because
absolute figures move with the neighbours' load and ratios within a round hardly do. *CPU* is
processor time of all threads, user and system, per GB of logical state, *system* the kernel's part
of it. *Fresh* counts the rounds in which the kernel took more than a tenth of the state's size from
its free memory for the contestant: such pages may cost up to 1.2 s per GB where the machine's host
had taken them back.

* The state is 1.45 GB in 171 float32 tensors, shaped as a GPT of seven layers, 1,024 wide, with
  both Adam moments; random contents.
* *Durable*: every file and folder is synced before the clock stops. That is ckptstore's own doing
  in its row; for the peers the harness syncs within the timed part. (DCP, asked to sync its
  files, calls `fsync` on `.metadata` before its bytes are written, and never syncs a folder.)
* Peers write to a fresh folder each time; deleting is not timed. Restores go in place, into wiped
  memory that has been touched, and every one is compared with what was saved. `torch.load` and
  safetensors map the file and copy; DCP has two writer threads; torch_checkpointing saves
  synchronously, two files at a time, without direct I/O (its default fails on ext4).
* ckptstore verifies the XXH3 of every chunk that it restores; the peers verify nothing. *Not
  verified* is the same restore with that check patched out, which no user can ask for.
* Limits: *write*: two threads append 8 MiB at a time, each to its own file, ask for write-back
  every 64 MiB, and sync; *read*: two threads `preadv` into place; *read, then XXH3*: the same, and
  the checksum of what was read, the least that a verified restore must do; *memcpy*:
  `Tensor.copy_`; *BLAKE3* and *XXH3*: two threads, 1 MiB at a time.
* `held`: what counts is the call, and waits before the next optimizer step; who saves has waited
  for the save before. The first round, not counted, is everybody's first call. *memcpy*: the
  state's bytes by two threads, to memory that was touched before: no call that copies all of it
  before it returns can hold its caller for less. DCP takes fresh memory in each call, most of it
  pages that must be zeroed first: about three times the processor time of the copy, and what that
  is in seconds depends on the machine and on what the process has given back before. *Memory
  kept*: with a `DefaultStager` that is used again (it writes over the save before, so that one
  has to be waited for). *Staged beside*: one that copies on a thread of its own; its caller waits
  for `staging_completion` before the next step.
* `torchft-full` and `torchft-recovery`: the sender is a process on the same host; both sides
  begin at the same moment, as in a Manager, and all goes through the loopback interface, as all of
  torchft's does. With `-link`, the sender is in a network namespace of its own, behind a pair of
  virtual interfaces that `tc` limits to a rate, with `-slow-link` to 1gbit; both still share the
  processors.
  *Committed*: the sender has a store in which the state is committed, so that nothing is copied.
  *CPU* is the receiver's.
* `ranks` and `ranks-…`: four processes of one gloo group on this host, which share its two
  processors; *CPU* is that of all four. The state is the GPT at 0.6 of its width under
  DistributedDataParallel with AdamW, 0.52 GB on every rank. ckptstore is handed the module and
  the optimizer; peers get dictionaries of the same tensors, TorchSnapshot with
  `replicated=["**"]`, and what they wrote is synced within the timed part. *Limit: write* is one
  process that writes the bytes of one rank and syncs them. A restore is one of every rank.
  `ranks-leaves`: fresh processes in each round; *planning* ends when the last rank knows what it
  is to do, *log entry* begins when the last rank's packs are durable and ends when the last
  rank's call returns; between the two, 15 MB of fragments are exchanged, and 20 MB hashed and
  written.
* `s3-commit` and `s3-restore`: 268 MB in 16 tensors. The server runs on the same processors, in
  memory; its own processor time is not in *CPU*. ckptstore uses obstore, its default where that
  is installed. The raw client is boto3's in threads, with parts
  and ranges of 8 MiB, eight on their way; it hashes nothing.
* What memory costs that is new to a process, or to the page cache, depends on whether this
  virtual machine's host had taken it back: 0.1 to 1.2 s per GB were seen. Rounds of one
  contestant then fall into two groups: `StoreWriter` of `dcp-face` took 0.45 or 1.6 s and
  `FileSystemWriter` 0.7 or 2.1 s, mostly whoever came after a pause; torchft's HTTPTransport of
  `torchft-recovery` 0.38 s in one run and 1.45 s in all others, ckptstore 0.14 s in each.
* Warm: the files are in the page cache. Cold: all of the contestant's files were synced and
  evicted (`POSIX_FADV_DONTNEED`).
"""


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def size(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB" if abs(value) >= 2**20 else f"{value:,.0f} B"


def amount(result: Result, series: Series) -> str:
    return seconds(series.median) if result.unit == "s" else size(series.median)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:" for _ in header[1:]]], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def case_table(result: Result) -> str:
    """One row per contestant; the first of them is what the others are divided by."""
    ours = next(iter(result.series))
    fast = result.nbytes >= SPEED_FROM_BYTES
    header = [
        result.title,
        "median",
        *(["GB/s"] if fast else []),
        f"times {ours}",
        *(["CPU s/GB", "system", "fresh"] if fast else []),
    ]
    return table(header, (_row(result, name, ours, fast) for name in result.series))


def _row(result: Result, name: str, ours: str, fast: bool) -> list[str]:
    series = result.series[name]
    row = [name, amount(result, series)]
    if fast:
        row.append(f"{result.nbytes / series.median / 1e9:.2f}")
    row.append(f"{ratio(result, name, ours):.2f}")
    if fast:
        row += [
            f"{Series(series.cpu_seconds).median / result.nbytes * 1e9:.2f}",
            f"{median(series.system_seconds) / result.nbytes * 1e9:.2f}"
            if series.system_seconds
            else "",
            _fresh(result, series),
        ]
    return row


def _fresh(result: Result, series: Series) -> str:
    """In how many rounds the kernel took free pages for more than a tenth of the state."""
    if not series.fresh_bytes:
        return ""
    count = sum(nbytes > result.nbytes / 10 for nbytes in series.fresh_bytes)
    return f"{count} of {len(series.fresh_bytes)}"


def target_table(records: Sequence[Record]) -> str:
    """What is aimed at, beside what came out; empty where nothing is."""
    found = [
        (target, record.result)
        for target in TARGETS
        for record in records
        if target.applies(record.result)
    ]
    if not found:
        return ""
    return table(
        ["target", "wanted", "measured", ""],
        (_target_row(target, result) for target, result in found),
    )


def _target_row(target: Target, result: Result) -> list[str]:
    value, (sign, bound) = (
        target.value(result),
        ("≥", target.at_least) if target.at_least is not None else ("≤", target.at_most),
    )
    assert bound is not None
    show = (lambda x: f"{x:.2f}×") if target.other else seconds if result.unit == "s" else size
    return [
        target.text.removesuffix(", seconds").removesuffix(", bytes"),
        f"{sign} {show(bound)}",
        show(value),
        _verdict(target, result),
    ]


def _verdict(target: Target, result: Result) -> str:
    return "yes" if target.holds(result) else "**no**"


def machine_line(record: Record) -> str:
    its = record.machine
    packages = ", ".join(f"{name} {version}" for name, version in its["packages"].items())
    return (
        f"{its['processors']} × {its['processor']}, {its['memory_bytes'] / 2**30:.0f} GiB of "
        f"memory, {its['filesystem']}, "
        f"Linux {its['kernel']}, Python {its['python']}; {packages}."
    )


def page(records: Sequence[Record]) -> str:
    """docs/benchmarks.md."""
    plot = "![GB/s by case and contestant](benchmarks.svg)"
    parts = [
        INTRODUCTION,
        "## Targets",
        target_table(records),
        plot,
        "## Cases",
        *map(section, records),
        "## Machine",
    ]
    machine = fill(machine_line(records[0]), 100, break_on_hyphens=False)
    return "\n\n".join([*(part.strip() for part in parts), machine]) + "\n"


def section(record: Record) -> str:
    rounds = "once" if record.rounds == 1 else f"{record.rounds} rounds"
    under = f"{rounds}, load {record.machine['load']} at the start."
    return (
        f"### `{record.result.case}`: "
        f"{record.result.title}\n\n{case_table(record.result)}\n\n{under}"
    )


def headline(records: Sequence[Record]) -> str:
    """The README's table: GB/s of logical state, without limits and variants of a contestant."""
    results = {record.result.case: record.result for record in records}
    cases = [case for case in PLOTTED if case in results]
    names = list(
        dict.fromkeys(
            name
            for case in cases
            for name in results[case].series
            if not name.startswith("limit") and ", " not in name
        )
    )
    rows = [[name, *(_speed(results[case], name) for case in cases)] for name in names]
    return table(["GB/s, 1.45 GB state, two processors", *cases], rows)


def _speed(result: Result, name: str) -> str:
    return (
        f"{result.nbytes / result.series[name].median / 1e9:.1f}" if name in result.series else ""
    )


def put_headline(readme: Path, records: Sequence[Record]) -> None:
    """Replace what stands between the two marks."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(NUMBERS_BEGIN)
    _, _, after = rest.partition(NUMBERS_END)
    readme.write_text(
        f"{before}{NUMBERS_BEGIN}\n{headline(records)}\n{NUMBERS_END}{after}", encoding="utf-8"
    )
