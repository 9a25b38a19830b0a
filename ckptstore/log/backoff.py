"""How long does a writer wait for others who append to the same log?

Where many append at once, all but one attempt for each number are in vain, and where the server is
what limits, each of them makes all others slower. Who waits lets others through; but by chance
alone some would be let through again and again and one never. So a wait is drawn from the time that
an attempt takes there, and becomes shorter with the number of entries that others appended since
the call began; and whoever was passed by many, and comes back at once with the next entry, begins
with a wait. That needs no message among the writers and no clock that they share.
"""

from dataclasses import dataclass

_LONGEST_ATTEMPTS = 8.0
"""Who was never passed waits for at most so many attempts. Two writers lose little by it, and of
thirty-two some four compete."""
_PATIENCE = 8.0
"""Whoever so many entries have passed waits half as long."""
_CROWD = 32
_OF_CROWD = 0.5
"""Who comes back lets at most so many of those through that passed it the last time."""
_LONGEST_S = 2.0
"""Where an attempt takes seconds, the server is not to be spared by waiting longer."""


def pause_s(attempt_s: float, passed: int, draw: float) -> float:
    """After an attempt in vain, which took `attempt_s`; others appended `passed` entries since the
    call began. `draw` is from 0 to 1."""
    return min(draw * _LONGEST_ATTEMPTS * attempt_s, _LONGEST_S) / (1 + passed / _PATIENCE)


@dataclass(frozen=True, slots=True)
class Met:
    """What a writer met in its last append: how many entries passed it, how long its last attempt
    in vain took, when it ended."""

    passed: int = 0
    attempt_s: float = 0.0
    ended_s: float = 0.0

    def pause_s(self, now_s: float, draw: float) -> float:
        """Before the first attempt of an append that begins at `now_s`."""
        crowd = min(self.passed, _CROWD)
        if crowd < 2 or now_s > self.ended_s + crowd * self.attempt_s:
            return 0.0
        return min(draw * _OF_CROWD * crowd * self.attempt_s, _LONGEST_S)
