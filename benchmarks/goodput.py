"""A year of a job on 1,024 GPUs: what failures cost it with a bucket alone, and with the memory of
its hosts before the bucket: `python -m benchmarks.goodput`.

Failures are drawn as they were published. Of jobs on 1,024 GPUs one failed every 7.9 hours (Kokolis
et al., *Revisiting Reliability in Large-Scale Machine Learning Research Clusters*, HPCA 2025,
arXiv:2410.21680). What failed is the table of interruptions in *The Llama 3 Herd of Models*
(arXiv:2407.21783, section 3.3.4), where hardware of a host, and its maintenance, count as the loss
of the host. That partners are lost together was not published: the share is a guess.

Times of commits and restores were measured with 64 MiB a host (`benchmarks.hosts`, on a host of two
cores that others kept busy), and grow with the bytes of a host. The rest is arithmetic.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from random import Random

HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
MEASURED_BYTES = 64 << 20
HELD_S, DURABLE_S, OWN_S, PARTNER_S = 0.036, 0.768, 0.316, 1.293
"""Of so many bytes a host: a step held, both copies made, a restore from the own host, and from the
partner, beside the start of an agent."""
AGENT_S = 2.3

LEAVES_HOST = {
    "software bug": 54,
    "network switch or cable": 35,
    "NCCL watchdog timeout": 7,
    "dependency": 2,
}
TAKES_HOST = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "host maintenance": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "silent data corruption": 6,
    "GPU thermal interface": 6,
    "SSD": 3,
    "power supply": 3,
    "chassis": 2,
    "IO board": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Unexpected interruptions of 54 days."""


@dataclass(frozen=True)
class Job:
    """What fails how often, and what comes after it either way."""

    failure_s: float = 7.9 * HOUR_S
    """Mean time between failures."""
    host: float = sum(TAKES_HOST.values()) / (sum(TAKES_HOST.values()) + sum(LEAVES_HOST.values()))
    """Share of failures that take a host."""
    partners: float = 0.01
    """Share of these that take its partner, too."""
    restart_s: float = 300.0
    """Until the ranks run again; then they restore."""


@dataclass(frozen=True)
class Way:
    """How a job commits, in seconds; `restores` by what was lost."""

    name: str
    every_s: float
    held_s: float
    durable_s: float
    """After which a commit survives all but `partners`."""
    every_nth: int
    """Of the commits goes to the bucket."""
    uploaded_s: float
    restores_s: Mapping[str, float]


@dataclass(frozen=True)
class Year:
    """Seconds of a year, by what they went to, and the failures."""

    useful_s: float
    held_s: float
    repeated_s: float
    restart_s: float
    restore_s: float
    failures: Counter[str]

    @property
    def goodput(self) -> float:
        spent = self.held_s + self.repeated_s + self.restart_s + self.restore_s
        return self.useful_s / (self.useful_s + spent)

    @property
    def wasted_s(self) -> float:
        """Of a failure: what is done again, and the restore."""
        return (self.repeated_s + self.restore_s) / self.failures.total()


def best_interval_s(held_s: float, failure_s: float) -> float:
    """Young's."""
    return sqrt(2 * held_s * failure_s)


def daly_goodput(way: Way, job: Job) -> float:
    """Daly's (*A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS
    22, 2006, equation 13) for commits that are durable at once, and one way to restore."""
    (restore_s,) = {*way.restores_s.values()}
    down = exp((job.restart_s + restore_s) / job.failure_s)
    return way.every_s / (job.failure_s * down * expm1((way.every_s + way.held_s) / job.failure_s))


def live(job: Job, way: Way, random: Random, seconds: float = YEAR_S) -> Year:
    """A year. A failure comes at any time, also while ranks restart or restore."""
    cycle, clock, done, count, mirrored = way.every_s + way.held_s, 0.0, 0.0, 0, 0
    held = repeated = restart = restore = restore_s = 0.0
    failures = Counter[str]()
    while clock < seconds:
        up = random.expovariate(1 / job.failure_s)
        clock += up
        down = min(up, job.restart_s + restore_s) if failures else 0.0
        restart += min(down, job.restart_s)
        restore += max(0.0, down - job.restart_s)
        ran = up - down
        begun = count
        made = max(0, int((ran - way.durable_s) // cycle))
        sent = max(0, int((ran - way.durable_s - way.uploaded_s) // cycle))
        count += made
        mirrored = max(mirrored, (begun + sent) // way.every_nth * way.every_nth)
        lost = kind_of(job, random)
        failures[lost] += 1
        restore_s = way.restores_s[lost]
        if lost == "partners":
            count = min(count, mirrored)
        held += ran / cycle * way.held_s
        gained = (count - begun) * way.every_s
        done += gained
        repeated += ran / cycle * way.every_s - gained
    return Year(done, held, repeated, restart, restore, failures)


def kind_of(job: Job, random: Random) -> str:
    if random.random() >= job.host:
        return "processes"
    return "partners" if random.random() < job.partners else "host"


def ways(job: Job, host_bytes: float, upload_s: float) -> tuple[Way, Way]:
    """With a bucket alone, and with the hosts before it; each commits as often as is best."""
    times = host_bytes / MEASURED_BYTES
    held, durable, own = HELD_S * times, DURABLE_S * times, OWN_S * times
    partner, bucket = AGENT_S + PARTNER_S * times, AGENT_S + upload_s
    kinds = ("processes", "host", "partners")
    alone = max(best_interval_s(held, job.failure_s), upload_s)
    near = max(best_interval_s(held, job.failure_s), durable)
    return (
        Way("bucket", alone, held, upload_s, 1, 0.0, dict.fromkeys(kinds, bucket)),
        Way(
            "hosts, then bucket",
            near,
            held,
            durable,
            max(1, ceil(upload_s / near)),
            upload_s,
            {"processes": own, "host": partner, "partners": bucket},
        ),
    )


def main() -> None:
    job = Job()
    print(f"{job.host:.0%} of failures take a host, {job.partners:.0%} of these its partner, too")
    for host_bytes, upload_s in ((1e9, 600.0), (8.75e9, 600.0), (8.75e9, 70.0)):
        print(f"{host_bytes / 1e9:.2f} GB a host, which a bucket has after {upload_s:.0f} s")
        wasted = []
        for way in ways(job, host_bytes, upload_s):
            year = live(job, way, Random(1), 100 * YEAR_S)
            wasted.append(year.wasted_s)
            whole = year.useful_s / year.goodput
            print(
                f"  {way.name:20} every {way.every_s:5.0f} s, 1 of {way.every_nth:2} sent: goodput "
                f"{year.goodput:.2%}; held {year.held_s / whole:.2%}, done again "
                f"{year.repeated_s / whole:.2%}, restarts {year.restart_s / whole:.2%}, restores "
                f"{year.restore_s / whole:.2%}; {year.wasted_s:.0f} s a failure"
            )
        print(f"  a failure wastes {wasted[0] / wasted[1]:.1f} times less")


if __name__ == "__main__":
    main()
