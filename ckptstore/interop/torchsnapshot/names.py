"""How a path in a snapshot is spelled: `RANK/KEY/…`, the keys of each level with `%` and `/`
escaped."""

from ckptstore.interop.torchsnapshot.errors import NoSuchObject


def encode(key: str) -> str:
    """A key as it stands in a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def split_rank(path: str) -> tuple[int, str]:
    """The rank that a path begins with, and what is behind it. Raises `NoSuchObject` for a path
    without one."""
    rank, _, rest = path.partition("/")
    if not rank.isdecimal() or not rest:
        raise NoSuchObject(
            f"{path!r} is no path of a snapshot: wanted RANK/KEY/…, as in '0/model/weight'; "
            "get_manifest() has them all"
        )
    return int(rank), rest
