"""How far a long job is."""

from ckptstore.maintenance import Counter, Progress, silent
