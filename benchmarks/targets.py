"""What the project aims at, and whether a result reaches it."""

from dataclasses import dataclass

from benchmarks.measure import Result, ratio

MIB = 1 << 20
ABOVE_ONE = "above one rank's"
COUNTED = "planning and log entry"


@dataclass(frozen=True, slots=True)
class Target:
    """`ours` against `other` in one case, how many times as fast (`at_least`) or as slow
    (`at_most`); alone, the median itself."""

    case: str
    text: str
    other: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    ours: str = "ckptstore"

    def applies(self, result: Result) -> bool:
        return result.case == self.case and {self.ours, self.other or self.ours} <= set(
            result.series
        )

    def value(self, result: Result) -> float:
        if self.other is None:
            return result.series[self.ours].median
        return (
            ratio(result, self.ours, self.other)
            if self.at_most is not None
            else ratio(result, self.other, self.ours)
        )

    def holds(self, result: Result) -> bool:
        value = self.value(result)
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


TARGETS = (
    Target("first", "first commit, of the two-thread write limit", "limit: write", at_least=0.85),
    Target("first", "first commit, against torch.save + fsync", "torch.save", at_least=1.8),
    Target("first", "first commit, against DCP", "DCP", at_least=3),
    Target("unchanged", "unchanged commit, of two-thread XXH3", "limit: XXH3", at_least=0.8),
    Target(
        "one-layer",
        "one layer of seven changed, of XXH3 of all, BLAKE3 and write of the layer",
        "limit: XXH3 of all, BLAKE3 and write of the change",
        at_least=0.8,
    ),
    Target("tiny", "20,000 tensors of 256 bytes, against DCP", "DCP", at_least=5),
    Target("overhead-changed", "bytes on disk beside a changed 256-byte tensor", at_most=400),
    Target("overhead-unchanged", "bytes on disk for a commit without changes", at_most=10_000),
    Target(
        "held", "asynchronous commit, of the memcpy into warm memory", "limit: memcpy", at_most=1.2
    ),
    Target(
        "held",
        "asynchronous commit by a process, of the memcpy",
        "limit: memcpy",
        at_most=1.2,
        ours="ckptstore, a process",
    ),
    Target(
        "held",
        "lazy commit of parameters and moments, of the memcpy",
        "limit: memcpy",
        at_most=0.05,
        ours="ckptstore, lazy",
    ),
    Target(
        "held",
        "commit of frozen weights, trusted, seconds",
        at_most=0.005,
        ours="ckptstore, frozen",
    ),
    Target(
        "held",
        "asynchronous commit, against DCP's in a thread",
        "DCP async_save, thread",
        at_least=2,
    ),
    Target(
        "held",
        "asynchronous commit, against DCP's in a process",
        "DCP async_save, process",
        at_least=2,
    ),
    Target(
        "held",
        "asynchronous commit, against TorchSnapshot's",
        "TorchSnapshot async_take",
        at_least=2,
    ),
    Target(
        "held",
        "lazy commit, against DCP's, memory kept",
        "DCP async_save, thread, memory kept",
        at_least=2,
        ours="ckptstore, lazy",
    ),
    Target(
        "held",
        "lazy commit, against DCP's, staged beside",
        "DCP async_save, staged beside",
        at_least=2,
        ours="ckptstore, lazy",
    ),
    Target(
        "async-training",
        "20 steps with a commit, of the same alone",
        "training alone",
        at_most=1.05,
    ),
    Target(
        "async-training",
        "20 steps with a commit by a process",
        "training alone",
        at_most=1.05,
        ours="ckptstore, a process",
    ),
    Target(
        "async-step", "a step while a commit runs, of one alone", "training alone", at_most=1.05
    ),
    Target(
        "async-step",
        "a step while a process commits",
        "training alone",
        at_most=1.05,
        ours="ckptstore, a process",
    ),
    Target(
        "restore-warm",
        "warm restore, verified, of the same without verification",
        "ckptstore, not verified",
        at_least=0.85,
    ),
    Target("restore-warm", "warm restore, against DCP", "DCP", at_least=4),
    Target(
        "restore-warm",
        "warm restore, verified, of safetensors' mapped copy",
        "safetensors",
        at_least=0.6,
    ),
    Target(
        "restore-cold", "cold restore, verified, of the raw cold read", "limit: read", at_least=0.9
    ),
    Target("restore-cold", "cold restore, against DCP", "DCP", at_least=2),
    Target("one-tensor", "one 4 MiB tensor from an open store, seconds", at_most=0.003),
    Target(
        "dcp-face",
        "dcp.save on a store, against DCP's files",
        "FileSystemWriter",
        at_least=2.5,
        ours="StoreWriter",
    ),
    Target(
        "dcp-face",
        "dcp.load from a store, against DCP's files",
        "FileSystemReader",
        at_least=2,
        ours="StoreReader",
    ),
    Target(
        "ranks",
        "commit by four ranks under DDP, of a plain write of the same bytes",
        "limit: write",
        at_least=0.85,
    ),
    Target("ranks", "commit by four ranks under DDP, against DCP", "DCP", at_least=2.5),
    Target(
        "ranks",
        "commit by four ranks under DDP, against TorchSnapshot",
        "TorchSnapshot",
        at_least=2.5,
    ),
    Target(
        "ranks",
        "restore on four ranks, against DCP",
        "DCP, restore",
        at_least=2.5,
        ours="ckptstore, restore",
    ),
    Target(
        "ranks",
        "restore on four ranks, against TorchSnapshot",
        "TorchSnapshot, restore",
        at_least=2,
        ours="ckptstore, restore",
    ),
    Target(
        "ranks-fixed",
        "commit of an unchanged small state by four ranks, above one rank's, seconds",
        at_most=0.03,
        ours=ABOVE_ONE,
    ),
    Target(
        "ranks-leaves",
        "10,000 sharded leaves on four ranks, planning and log entry, seconds",
        at_most=1,
        ours=f"first, {COUNTED}",
    ),
    Target(
        "ranks-leaves", "the same of later commits, seconds", at_most=0.3, ours=f"later, {COUNTED}"
    ),
    Target(
        "ranks-written",
        "bytes that four ranks write of a state that all have",
        "one copy",
        at_most=1.01,
    ),
    Target(
        "ranks-written",
        "the most of them on one rank",
        "a quarter",
        at_most=1.1,
        ours="most of a rank",
    ),
    Target(
        "ranks-resharded",
        "bytes that three ranks read of what four wrote",
        "needed",
        at_most=1.1,
        ours="read",
    ),
    Target("peak-save", "peak memory of a commit, bytes", at_most=256 * MIB),
    Target("peak-restore", "peak memory of a restore, bytes", at_most=256 * MIB),
    Target("peak-average", "peak memory of an average of ten commits, bytes", at_most=256 * MIB),
    Target(
        "fixed-cost",
        "the 10,000th commit, of the 10th",
        "after 10 commits",
        at_most=1.2,
        ours="after 10,000 commits",
    ),
    *(
        Target(
            case,
            f"CPU of a first commit of {what} with statistics, of one without",
            "without",
            at_most=1.1,
            ours="with statistics",
        )
        for case, what in (("statistics", "fp32"), ("statistics-bf16", "bf16"))
    ),
    Target(
        "average",
        "average of ten commits, of the rate of their restore",
        "restore",
        at_least=0.5,
        ours="average",
    ),
    *(
        Target(case, f"{what}, {text}", other, at_least=least)
        for case, what in (
            ("s3-commit", "commit to a bucket"),
            ("s3-restore", "restore from a bucket"),
        )
        for text, other, least in (
            ("of the raw client's rate", "raw client", 0.9),
            ("against DCP through fsspec", "DCP, fsspec", 2),
            ("against TorchSnapshot's plugin", "TorchSnapshot, S3 plugin", 2),
        )
    ),
    Target(
        "torchft-full",
        "all of a state from a peer, against torchft's HTTPTransport",
        "torchft HTTPTransport",
        at_least=1,
    ),
    Target(
        "torchft-full-link",
        "the same over a link between hosts",
        "torchft HTTPTransport",
        at_least=1,
    ),
    Target(
        "torchft-full-slow-link", "the same over a slow link", "torchft HTTPTransport", at_least=1
    ),
    Target(
        "torchft-recovery",
        "5 % of a state's chunks from a peer, against torchft's HTTPTransport",
        "torchft HTTPTransport",
        at_least=8,
        ours="ckptstore, in place",
    ),
    Target(
        "torchft-recovery-link",
        "the same over a link between hosts",
        "torchft HTTPTransport",
        at_least=8,
        ours="ckptstore, in place",
    ),
    Target(
        "torchft-recovery-slow-link",
        "the same over a slow link",
        "torchft HTTPTransport",
        at_least=8,
        ours="ckptstore, in place",
    ),
    Target(
        "log",
        "`ckptstore log -n 20` after 10,000 commits, seconds",
        at_most=0.35,
        ours="ckptstore log -n 20",
    ),
)
