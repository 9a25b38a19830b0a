"""A link of a given rate to a server: a TCP proxy in a process of its own, for those who may not
lay a cable with `benchmarks.links`.

Each direction is a bucket of tokens that all connections share, so that requests side by side get
no more than the link has; or each connection has buckets of its own, and a latency before each
answer, as a bucket of a cloud has. A buffer is held until the link has carried it; the burst is
small, so that a transfer of a megabyte takes its time already.
"""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

GIGABIT = 125e6
"""Bytes a second of a link of 1 Gbit/s."""

BUFFER_BYTES = 64 << 10
BURST_S = 0.001
"""What an idle link carries at once: as much as in this time."""


class Direction:
    """One direction of a link."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at_s = bytes_per_s, 0.0

    async def carry(self, nbytes: int) -> None:
        """Return when the link has carried so many bytes."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + nbytes / self._bytes_per_s
        if self._free_at_s > now_s:
            await asyncio.sleep(self._free_at_s - now_s)


@dataclass
class Turn:
    """Whether a connection has asked since the last answer."""

    asked: bool = False


async def _pump(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    direction: Direction,
    turn: Turn,
    latency_s: float | None = None,
) -> None:
    """Carry one direction; with a latency, that of the answers."""
    with suppress(OSError):
        while data := await source.read(BUFFER_BYTES):
            if latency_s is None:
                turn.asked = True
            elif turn.asked:
                turn.asked = False
                await asyncio.sleep(latency_s)
            await direction.carry(len(data))
            sink.write(data)
            await sink.drain()
    sink.close()


async def _serve(
    target: tuple[str, int], bytes_per_s: float, latency_s: float | None, ready: Connection
) -> None:
    shared = Direction(bytes_per_s), Direction(bytes_per_s)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            its_reader, its_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        own, turn = (Direction(bytes_per_s), Direction(bytes_per_s)), Turn()
        up, down = shared if latency_s is None else own
        await asyncio.gather(
            _pump(reader, its_writer, up, turn),
            _pump(its_reader, writer, down, turn, latency_s or 0.0),
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=64)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _run(
    target: tuple[str, int], bytes_per_s: float, latency_s: float | None, ready: Connection
) -> None:
    asyncio.run(_serve(target, bytes_per_s, latency_s, ready))


@contextmanager
def rated_link(
    target: tuple[str, int], bytes_per_s: float = GIGABIT, latency_s: float | None = None
) -> Iterator[str]:
    """The endpoint of a proxy to `target`, each direction of which carries `bytes_per_s`; with a
    latency, each direction of each connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(target, bytes_per_s, latency_s, theirs), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()
