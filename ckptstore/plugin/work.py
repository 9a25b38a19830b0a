"""Threads, processes, and what a fork does to them."""

from ckptstore.core import forks
from ckptstore.core.forks import Condition, cached_property, survives_forks
from ckptstore.core.process import Pool, behind, each_done, free_bytes, pauses, start, uncollected
from ckptstore.core.public_calls import public_methods
from ckptstore.repository.thread_pool import Scratch, ThreadPool, reads_at_once, wholly
