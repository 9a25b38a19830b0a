"""What the kernel says of a process."""

import os
import re
from pathlib import Path


def status_bytes(field: str) -> int:
    """A field of this process's status (proc_pid_status(5)): `VmRSS`, or `VmHWM`, its highest since
    the program was started."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """Processor time of another process so far, all its threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
