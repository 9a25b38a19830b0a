"""Where in a zip or tar archive do its files lie that are stored as they are?"""

import io
import zipfile

from ckptstore.plugins.foreign.magic import ZIP_MAGIC
from ckptstore.plugins.foreign.sources import Window
from ckptstore.plugins.parsers.pickle_ops import PICKLE_BYTES_MAX, TooLarge

_BLOCK_BYTES = 512
MEMBERS_MAX = 10_000
"""Files in an archive, each of which is looked into."""
_NAMES_MAX = 1 << 16
_FILE, _GNU_NAME, _PAX = b"0\0", b"L", b"x"


class _Bounded(io.BufferedReader):
    """Refuses to read a table of contents that would fill the memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > PICKLE_BYTES_MAX:
            raise TooLarge(f"its table of contents has {size} bytes")
        return super().read(size)


def zip_members(file: Window) -> dict[str, tuple[int, int]]:
    """Offset and size of each member of an archive that is stored as it is. Raises for a file that
    is no archive."""
    with zipfile.ZipFile(_Bounded(file.part(0, file.size))) as archive:
        infos = archive.infolist()
    if len({info.filename for info in infos}) != len(infos):
        raise ValueError("a member is there twice")
    members = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            continue
        head = file.read_at(info.header_offset, 30)
        if head[:4] != ZIP_MAGIC or info.compress_size != info.file_size:
            raise ValueError("a member has no header")
        names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        members[info.filename] = info.header_offset + 30 + names, info.file_size
    return members


def tar_members(file: Window) -> dict[str, tuple[int, int]]:
    """Offset and size of each file in a tar archive that is not compressed. Raises for a file that
    is no archive.

    Python's own reader is not asked: a forged archive leads that of 3.11.7 in circles.
    """
    members: dict[str, tuple[int, int]] = {}
    position, name, size = 0, "", -1
    while position + _BLOCK_BYTES <= file.size:
        head = file.read_at(position, _BLOCK_BYTES)
        if not any(head):
            break
        start, kind = position + _BLOCK_BYTES, head[156:157]
        nbytes = _tar_number(head[124:136])
        if nbytes < 0:
            raise ValueError("a file has a negative size")
        if kind in (_GNU_NAME, _PAX):
            if nbytes > _NAMES_MAX:
                raise TooLarge(f"the name of a file in it has {nbytes} bytes")
            text = file.read_at(start, nbytes)
            if kind == _GNU_NAME:
                name = text.rstrip(b"\0").decode("utf-8", "replace")
            else:
                pairs = dict(
                    line.partition(b" ")[2].partition(b"=")[::2] for line in text.split(b"\n")
                )
                name = pairs.get(b"path", name.encode()).decode("utf-8", "replace")
                size = int(pairs.get(b"size", size))
        else:
            nbytes = size if size >= 0 else nbytes
            if kind in _FILE:
                own = head[:100].rstrip(b"\0").decode("utf-8", "replace")
                members[name or own] = start, file.part(start, nbytes).size
                if len(members) > MEMBERS_MAX:
                    raise ValueError("an archive of so many files is data")
            name, size = "", -1
        position = start + -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
    return members


def _tar_number(field: bytes) -> int:
    """A number in octal digits, or, if it has too many, in bytes."""
    if field[0] & 128:
        return int.from_bytes(field[1:], "big") if field[0] == 128 else -1
    return int(field.strip(b" \0") or b"0", 8)
