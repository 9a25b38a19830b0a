"""Results as JSON: one file per case, with the machine it was measured on; numbers only, no names
of people, hosts or folders."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.disk import filesystem
from benchmarks.measure import Result, Series

PACKAGES = ("torch", "safetensors", "torchsnapshot", "torch_checkpointing", "torchft", "blake3")


@dataclass(frozen=True, slots=True)
class Record:
    """One case as it is kept."""

    result: Result
    rounds: int
    machine: dict[str, Any]


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on. `load` is the one-minute load average when the case began."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().partition("-")[0],
        "filesystem": filesystem(folder),
        "python": platform.python_version(),
        "packages": {name: version(name).partition("+")[0] for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def save(folder: Path, record: Record) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False)
    (folder / f"{record.result.case}.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path, case: str) -> Record | None:
    """The last measurement of a case, None if it was never measured."""
    path = folder / f"{case}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    series = {name: Series(**its) for name, its in found["result"].pop("series").items()}
    return Record(Result(**found["result"], series=series), found["rounds"], found["machine"])
