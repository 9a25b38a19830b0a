"""Damage: bytes flipped, cut out, doubled or put in anywhere."""

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after one to three random changes; never equal to it."""
    result = data
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(result) - 1, 0)))
        stop = draw(st.integers(start, min(start + 16, len(result))))
        result = result[:start] + draw(st.binary(max_size=16)) + result[stop:]
    return result if result != data else data[:-1]
