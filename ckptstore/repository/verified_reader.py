"""How is one planned read carried out, verified, and recovered from the pack's twin?"""

from ckptstore.core.config import MIB
from ckptstore.core.ids import ChunkId, digest, pack_key, twin_key
from ckptstore.errors import Corrupt, NotFound, Unavailable
from ckptstore.index.chunks import ChunkIndex
from ckptstore.index.suspect_packs import SuspectPacks
from ckptstore.objects import codecs
from ckptstore.repository import footers
from ckptstore.repository.read_planner import Read, Request, slices, with_gaps
from ckptstore.storage.contract import Storage
from ckptstore.storage.read_cache import ReadCache

HASHED_BYTES = MIB
"""Bytes of a local disk that are read before they are hashed: they fit a processor's own cache."""


class VerifiedReader:
    """Reads chunks of packs into a request's memory. Threads may share it."""

    def __init__(
        self,
        storage: Storage,
        index: ChunkIndex,
        suspect_packs: SuspectPacks,
        cache: ReadCache | None,
    ) -> None:
        self._storage, self._index = storage, index
        self._suspect_packs, self._cache = suspect_packs, cache
        self._slow = storage.capabilities.slow_requests

    def read(self, read: Read, request: Request) -> None:
        """Read and verify the chunks of one planned read.

        Tries the twin of a damaged pack. Marks the pack as suspect and raises `Corrupt` if neither
        has the bytes. Raises `NotFound` if the pack is absent or the index has a wrong position.
        """
        for i in read.which:
            if len(request.out[i]) != int(request.where["raw"][i]):
                raise Corrupt(
                    f"chunk {request.short(i)} ({request.name(i)}) in pack {read.pack} has "
                    f"{int(request.where['raw'][i])} bytes; "
                    f"wanted {len(request.out[i])}; run `ckptstore fsck`"
                )
        failed = self._try_read(pack_key(read.pack), read, request)
        if failed and self._storage.size(twin_key(read.pack)) is not None:
            failed = {
                i: problem for i, problem in failed.items() if not self._recovered(i, read, request)
            }
        for i, problem in failed.items():
            if isinstance(problem, Corrupt):
                if self._is_misplaced(i, read, request):
                    self._index.reset()
                    raise NotFound(
                        f"pack {read.pack} does not hold what the chunk index says; every footer "
                        "is read again"
                    ) from problem
                self._suspect_packs.add(read.pack)
            raise problem
        if self._cache is not None:
            for i in read.which:
                self._cache.put(ChunkId(request.id(i)), request.out[i])

    def _is_misplaced(self, i: int, read: Read, request: Request) -> bool:
        """Whether the pack's footer places chunk `i` elsewhere or lacks it: the index is wrong
        then, not the pack."""
        try:
            table = footers.read_table_at(self._storage, pack_key(read.pack))
        except (Corrupt, NotFound, Unavailable):
            return False
        at = table[table["offset"] == request.where["offset"][i]]
        return request.id(i) not in at["chunk"].tolist()

    def _recovered(self, i: int, read: Read, request: Request) -> bool:
        """Whether chunk `i` alone can be read from the twin, or from the pack itself if another
        chunk of the read is the damaged one."""
        row = request.where[i]
        offset = int(row["offset"])
        alone = Read(read.pack, offset, int(row["stored"]), (i,), (offset,), read.encoded)
        return any(
            not self._try_read(key, alone, request)
            for key in (twin_key(read.pack), pack_key(read.pack))
        )

    def _try_read(self, key: str, read: Read, request: Request) -> dict[int, Exception]:
        """Read into the request's memory; returns the problem of each chunk that does not match
        its id.

        Local bytes are hashed in slices, while the processor still caches them.
        """
        if self._slow:
            return self._try_slice(key, read, request)
        problems: dict[int, Exception] = {}
        for part in slices(read, HASHED_BYTES):
            problems |= self._try_slice(key, part, request)
        return problems

    def _try_slice(self, key: str, read: Read, request: Request) -> dict[int, Exception]:
        stored = memoryview(bytearray(read.stored_bytes)) if read.encoded else None
        short: Exception | None = None
        try:
            self._storage.read_into(
                key, read.offset, with_gaps(read, request) if stored is None else [stored]
            )
        except Corrupt as error:
            short = error  # an object that ends early has its beginning
        except (NotFound, Unavailable) as error:
            error.add_note(f"while reading {request.name(read.which[0])}")
            return dict.fromkeys(read.which, error)
        problems = {i: self._problem(i, read, request, stored) for i in read.which}
        return {i: short or problem for i, problem in problems.items() if problem}

    def _problem(
        self, i: int, read: Read, request: Request, stored: memoryview | None
    ) -> Exception | None:
        """Decode chunk `i` if it is encoded, and compare it with its id. None if it matches."""
        try:
            if stored is not None:
                row = request.where[i]
                start = int(row["offset"]) - read.offset
                codecs.decode_into(
                    int(row["codec"]),
                    stored[start : start + int(row["stored"])],
                    request.out[i],
                    int(row["width"]),
                )
        except Corrupt as error:
            error.add_note(f"while reading {request.name(i)}")
            return error
        if not request.is_right(i):
            return Corrupt(
                f"chunk {request.short(i)} in pack {read.pack} ({request.name(i)}) does not match "
                "its id: "
                f"got {digest(request.out[i]).hex()[:12]}; "
                "run `ckptstore fsck --read-data`, restore another commit, or heal it with "
                "`ckptstore repair`"
            )
        return None
