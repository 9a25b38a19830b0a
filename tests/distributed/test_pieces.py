"""The pieces of cut chunks that ranks send each other belong to the chunks that were asked for."""

from collections.abc import Sequence
from typing import Any

import pytest

from ckptstore.core.ids import CHECKSUM_BYTES
from ckptstore.distributed.collective import RankBytes
from ckptstore.distributed.rank_worker import LeafRef, Message, RankTask, RankWorker, Window
from ckptstore.errors import Corrupt
from ckptstore.state.leaf_sources import BytesSource

PIECE = 64


class OneByteEach:
    """A rank's part of the state: each leaf is all of one byte."""

    def source(self, ref: LeafRef) -> BytesSource:
        return BytesSource(bytes([ref.leaf]) * PIECE)


class Delivering:
    """A message of rank 1 arrives."""

    def __init__(self, sent: memoryview) -> None:
        self._sent = sent

    def exchange(self, outgoing: Sequence[RankBytes], incoming: Sequence[RankBytes]) -> None:
        (part,) = incoming
        part.memory[:] = self._sent


def message_of(chunks: Sequence[int]) -> Message:
    """A piece of each chunk; chunk n is of leaf n."""
    message = Message()
    for chunk in chunks:
        message.add(chunk, LeafRef(0, chunk, 0), 0, PIECE)
    return message


def worker() -> Any:
    task = RankTask((), (), {}, (), ())
    return RankWorker(None, OneByteEach(), task, {}, None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent", "is_asked"), [([3, 4], True), ([4, 3], False), ([3, 5], False), ([4, 5], False)]
)
def test_pieces_of_other_chunks_than_those_asked_for_are_refused(
    sent: list[int], is_asked: bool
) -> None:
    data = worker()._joined(message_of(sent))
    assert bytes(data[CHECKSUM_BYTES:]) == b"".join(bytes([chunk]) * PIECE for chunk in sent)
    receiver, window = worker(), Window()
    window.incoming[1] = message_of([3, 4])
    arrived = receiver._exchange(Delivering(data), window)
    if is_asked:
        receiver._later.settle()
        assert bytes(arrived[1].take(2 * PIECE)) == bytes(data[CHECKSUM_BYTES:])
    else:
        with pytest.raises(Corrupt, match="rank 1 sends pieces of other chunks than were asked"):
            receiver._later.settle()
