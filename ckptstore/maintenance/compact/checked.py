"""Does a coded chunk decode to what it was made of? Each is decoded before it is written, so that
the gc that follows need not read it back from its pack."""

from ckptstore.core.ids import checksum
from ckptstore.core.model import NO_BASE, PackEntry
from ckptstore.errors import Corrupt
from ckptstore.objects import codecs
from ckptstore.repository.pack_writer import OpenPack, PackWriter
from ckptstore.repository.thread_pool import Scratch


class CheckedPack:
    """A pack that takes a strip of coded chunks, each after its base."""

    def __init__(self, pack: OpenPack, scratch: Scratch) -> None:
        self._pack, self._scratch = pack, scratch
        self._bases: dict[int, memoryview] = {}
        """The bases of its differences, decoded, by their offsets."""

    @property
    def offset(self) -> int:
        return self._pack.offset

    @property
    def entries(self) -> list[PackEntry]:
        return self._pack.entries

    def put(self, entry: PackEntry, stored: memoryview | bytes, *, is_base: bool) -> int:
        """Queue a chunk, and return the number of its record; differences may be made of it if it
        `is_base`. Raises `Corrupt`."""
        with self._scratch.lend(0 if is_base else entry.raw_bytes) as lent:
            raw = memoryview(bytearray(entry.raw_bytes)) if is_base else lent
            if entry.base == NO_BASE:
                codecs.decode_into(entry.codec, stored, raw, entry.width)
            else:
                base = self._bases[codecs.base_of(stored).offset]
                codecs.decode_delta(stored, base, raw, entry.width)
            self._compare(entry, raw)
        if is_base:
            self._bases[entry.offset] = raw
        return self._pack.put(entry, stored)

    def _compare(self, entry: PackEntry, raw: memoryview) -> None:
        if checksum(raw) != entry.checksum:
            raise Corrupt(
                f"chunk {entry.chunk.hex()[:12]} does not come back from what was made of it, so "
                "it stays as it was; test this host's memory, and report it"
            )

    def flush(self) -> None:
        """Write the queued chunks; afterwards the caller may reuse their memory."""
        self._pack.flush()


class CheckedWriter:
    """One thread's writer of packs with coded chunks."""

    def __init__(self, writer: PackWriter) -> None:
        self._writer, self._scratch = writer, Scratch()

    def pack_with_room(self, nbytes: int) -> CheckedPack:
        """The pack for a strip of so many bytes."""
        return CheckedPack(self._writer.pack_with_room(nbytes), self._scratch)
