"""Where things may live on this host: which file systems are shared between hosts, and where the cache directory is."""

import os
from pathlib import Path

_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "glusterfs",
        "gpfs",
        "beegfs",
        "pvfs2",
        "orangefs",
        "afs",
        "9p",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.juicefs",
    ]
)


def cache_directory() -> Path:
    """`$CKPTSTORE_CACHE`, else `$XDG_CACHE_HOME/ckptstore`, else `~/.cache/ckptstore`."""
    if named := os.environ.get("CKPTSTORE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptstore"


def is_network_filesystem(path: Path) -> bool:
    """Whether `path` lies on a file system that other hosts may write too, as far as this host's mount table says."""
    return file_system(path) in _NETWORK


def file_system(path: Path) -> str:
    """The type of the file system that `path` is on (`ext4`), `""` where the mount table cannot be read."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= best:
            best, kind = len(mount), right.split()[0]
    return kind
