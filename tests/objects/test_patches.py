"""A patch makes the chunk of its base, whatever changed; one that was damaged or forged is refused
with bounded work."""

import struct
from collections.abc import Iterable
from random import Random

import numpy as np
import pytest

from ckptstore.core.ids import CHECKSUM_BYTES, ChunkId, checksum
from ckptstore.errors import Corrupt
from ckptstore.objects import patches

BASE = ChunkId(bytes(range(32)))
WIDTHS = (1, 2, 4, 8, 16, 3)


def made(
    raw: memoryview, base: memoryview, width: int, named: ChunkId, chain: patches.ChainLength
) -> bytes | None:
    at = patches.changed(raw, base, width)
    return None if at is None else patches.encode(raw, base, width, at, [named], chain)


def applied(base: bytes | memoryview, chain: Iterable[tuple[bytes, int]]) -> bytearray:
    """What a chain of patches makes of the bytes at its end."""
    out = bytearray(base)
    links = [patches.Link.of(stored, width) for stored, width in chain]
    patches.apply([(memoryview(out), links)])
    return out


def drawn(random: Random) -> tuple[bytes, bytes, int]:
    """A chunk, its base, and the width of their elements: changes anywhere, or next to each
    other, small or large, in the tail as well."""
    width, nbytes = random.choice(WIDTHS), random.choice((64, 4096, 4099, 70_000, 70_003))
    base = bytearray(random.randbytes(nbytes))
    raw, changes = bytearray(base), random.randint(0, nbytes // width // 8)
    first = random.randrange(nbytes - changes * width + 1) // width * width
    for n in range(changes):
        at = random.randrange(nbytes) if random.random() < 0.5 else first + n * width
        raw[at] = (raw[at] + random.choice((1, 255, 77))) % 256
    if random.random() < 0.5:
        raw[-1] ^= 1
    return bytes(raw), bytes(base), width


def test_a_patch_makes_the_chunk_of_its_base(seed: int) -> None:
    random, count = Random(seed), 0
    for _ in range(300):
        raw, base, width = drawn(random)
        stored = made(memoryview(raw), memoryview(base), width, BASE, patches.WHOLE)
        if stored is None:
            continue
        count += 1
        assert applied(base, [(stored, width)]) == raw, f"seed {seed}: {len(raw)} bytes of {width}"
        head = patches.head_of(stored)
        assert head.bases == (BASE,)
        assert head.chain == patches.ChainLength(1, len(stored))
    assert count > 100


def test_a_chain_of_patches_makes_the_last_chunk(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are added at once, and however wide each takes the words to be."""
    random = Random(seed)
    for _ in range(60):
        monkeypatch.setattr(patches, "_GATHERED_WORDS", random.choice((1, 300, 1 << 16)))
        width, nbytes = random.choice(WIDTHS), random.choice((4096, 4099, 70_003))
        base = random.randbytes(nbytes)
        now, chain, length = bytearray(base), list[tuple[bytes, int]](), patches.WHOLE
        for _ in range(random.randint(1, 12)):
            before = bytes(now)
            for at in random.choices(range(nbytes), k=random.randint(0, 40)):
                now[at] ^= random.choice((1, 0x80, 0xFF))
            if random.random() < 0.2:
                width = random.choice(WIDTHS)
            stored = made(memoryview(bytes(now)), memoryview(before), width, BASE, length)
            assert stored is not None
            chain.append((stored, width))
            length = patches.head_of(stored).chain
        widths = [width for _, width in chain]
        assert applied(base, chain) == now, f"seed {seed}: {nbytes} bytes, {widths}"


def test_patches_of_many_chunks_are_applied_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each to its own chunk, whatever chunks come before and behind it."""
    random = Random(seed)
    monkeypatch.setattr(patches, "_GATHERED_WORDS", 300)
    chunks, wanted = list[tuple[memoryview, list[patches.Link]]](), list[bytes]()
    while len(chunks) < 60:
        raw, base, width = drawn(random)
        stored = made(memoryview(raw), memoryview(base), width, BASE, patches.WHOLE)
        if stored is not None:
            link = patches.Link.of(stored, width)
            chunks.append((memoryview(bytearray(base)), [link]))
            wanted.append(raw)
    patches.apply(chunks)
    assert [bytes(out) for out, _ in chunks] == wanted, f"seed {seed}"


def few_changes(nbytes: int = 1 << 16) -> tuple[memoryview, memoryview]:
    base = np.arange(nbytes // 2, dtype="<u2")
    raw = base.copy()
    raw[:: len(raw) // 40] += 1
    return memoryview(raw).cast("B"), memoryview(base).cast("B")


def test_what_changes_too_much_or_lies_too_far_is_no_patch() -> None:
    raw, base = few_changes()
    whole = made(raw, base, 2, BASE, patches.WHOLE)
    assert whole is not None
    other = memoryview(np.arange(len(raw) // 2, dtype="<u2")[::-1].copy()).cast("B")
    assert made(other, base, 2, BASE, patches.WHOLE) is None
    assert made(raw, base[:-2], 2, BASE, patches.WHOLE) is None
    far = patches.ChainLength(patches.DEPTH_MAX, 100)
    assert made(raw, base, 2, BASE, far) is None
    assert made(raw, base, 2, BASE, patches.ChainLength(3, len(raw) - len(whole) + 1)) is None
    near = made(raw, base, 2, BASE, patches.ChainLength(3, len(raw) - len(whole)))
    assert near is not None
    assert patches.head_of(near).chain == patches.ChainLength(4, len(raw))


def test_each_bit_that_is_turned_in_a_patch_is_noticed() -> None:
    raw, base = few_changes(4096)
    stored = made(raw, base, 2, BASE, patches.WHOLE)
    assert stored is not None
    for bit in range(8 * len(stored)):
        turned = bytearray(stored)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            patches.head_of(bytes(turned))
    for nbytes in range(len(stored)):
        with pytest.raises(Corrupt):
            patches.head_of(stored[:nbytes])


def resealed(stored: bytes, offset: int, form: str, value: int) -> bytes:
    """A forged patch, with the checksum that it should have."""
    forged = bytearray(stored)
    struct.pack_into(form, forged, offset, value)
    forged[:CHECKSUM_BYTES] = checksum(bytes(forged[CHECKSUM_BYTES:]))
    return bytes(forged)


HEAD = CHECKSUM_BYTES + len(BASE)
FORGED = {
    "words": (HEAD + 4, "<I", 0xFFFFFFFF),
    "more words": (HEAD + 4, "<I", 42),
    "gaps": (HEAD + 8, "<I", 0xFFFFFFFF),
    "depth": (HEAD + 12, "<H", patches.DEPTH_MAX + 1),
    "no depth": (HEAD + 12, "<H", 0),
    "width of a gap": (HEAD + 14, "<B", 3),
    "tail": (HEAD + 15, "<B", 1),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_patch_is_refused(what: str) -> None:
    raw, base = few_changes()
    stored = made(raw, base, 2, BASE, patches.WHOLE)
    assert stored is not None
    assert patches.head_of(stored).words == 41
    offset, form, value = FORGED[what]
    with pytest.raises(Corrupt):
        applied(base, [(resealed(stored, offset, form, value), 2)])


def test_a_patch_that_goes_on_behind_the_chunk_is_refused() -> None:
    raw, base = few_changes()
    stored = made(raw, base, 2, BASE, patches.WHOLE)
    assert stored is not None
    with pytest.raises(Corrupt, match="goes on to word"):
        applied(base[: len(base) // 2], [(stored, 2)])
