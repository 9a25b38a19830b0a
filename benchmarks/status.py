"""What the kernel says of this process."""

import re
from pathlib import Path


def status_bytes(field: str) -> int:
    """A field of this process's status (proc_pid_status(5)): `VmRSS`, or `VmHWM`, its highest since the program was started."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
