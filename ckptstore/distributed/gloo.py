"""How do trainers connect for a commit or restore? With gloo connections of our own, made once per
set of ranks.

They are separate from the caller's process group, which training may use at the same time with any
backend. The caller's `torch.distributed` store introduces the ranks to each other.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ckptstore.distributed.collective import Collective, Transfer
from ckptstore.distributed.waiting import EVERY_RANK, named, warning_when_slow
from ckptstore.errors import Unavailable
from ckptstore.repository.thread_pool import wholly

_Key: TypeAlias = tuple[Any, tuple[int, ...], bool]
"""The store that introduces ranks to each other, their numbers, and whether they are `behind`."""

_known: dict[_Key, Collective] = {}
"""The connected ranks."""

_made: Counter[_Key] = Counter()


def connected(process_group: Any, timeout_s: float, *, behind: bool) -> Collective:
    """The connected ranks of `process_group` (None: the default group), for calls that block, or
    for commits `behind` their callers. On first use all ranks of the group must call this.

    Raises `Unavailable` if the ranks cannot reach each other.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    store = dist.distributed_c10d._get_default_store()
    key = (store, ranks, behind)
    if key not in _known:
        wholly(partial(_connect, key, rank, timeout_s))
    _known[key].timeout_s = timeout_s
    return _known[key]


def _connect(key: _Key, rank: int, timeout_s: float) -> None:
    """Meet the other ranks. Who has met them must know it: they do not come again."""
    store, ranks, behind = key
    channel = "background" if behind else "calls"
    name = f"ckptstore/{channel}/{'-'.join(map(str, ranks))}/{_made[key]}"
    _made[key] += 1
    own: Any = dist.distributed_c10d.PrefixStore(name, store)
    try:
        own.set(f"came/{rank}", "1")
        probe = _another(own)
        with warning_when_slow(
            "connecting the ranks",
            timeout_s,
            lambda: _absent(probe, len(ranks)) if probe else "",
            soon=True,
            advice=EVERY_RANK,
        ):
            group = dist.ProcessGroupGloo(own, rank, len(ranks), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = _absent(own, len(ranks))
        why = f"waited for {absent}; {EVERY_RANK}" if absent else error
        raise Unavailable(
            f"the {len(ranks)} ranks cannot reach each other within {timeout_s:g} s: {why}"
        ) from error
    _known[key] = Collective(_GlooLink(group, own), rank, len(ranks), timeout_s, called=not behind)


def _another(store: Any) -> Any:
    """A clone of the store for another thread, since a waiting store is busy. None where torch
    cannot clone it: before 2.8, and for some kinds.
    """
    return _quietly(store.clone) if hasattr(store, "clone") else None


def _absent(store: Any, size: int) -> str:
    """The ranks that never connected."""
    found = _quietly(lambda: [other for other in range(size) if not store.check([f"came/{other}"])])
    return f"{named(found)}, which did not come" if found else ""


class _GlooLink:
    """A gloo group as a link.

    Gloo closes all connections of a rank that one peer timed out on, before that rank itself hears
    of it. So a disconnected rank looks into the store for the rank that failed.
    """

    def __init__(self, group: Any, store: Any) -> None:
        self._group, self._store = group, store

    def send(self, rank: int, lane: int, memory: memoryview) -> Transfer:
        memory = (
            memoryview(bytearray(memory)) if memory.readonly else memory
        )  # torch warns about read-only buffers
        return _transfer(self._group.send([_tensor(memory)], rank, lane))

    def receive(self, rank: int, lane: int, memory: memoryview) -> Transfer:
        return _transfer(self._group.recv([_tensor(memory)], rank, lane))

    def leave(self, name: str, data: bytes) -> None:
        _quietly(lambda: self._store.set(name, data))

    def left(self, name: str, timeout_s: float) -> bytes | None:
        _quietly(lambda: self._store.wait([name], timedelta(seconds=timeout_s)))
        found = _quietly(lambda: self._store.get(name) if self._store.check([name]) else None)
        return bytes(found) if found else None


def _transfer(work: Any) -> Transfer:
    return lambda timeout_s: work.wait(timedelta(seconds=timeout_s))


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _quietly(act: Callable[[], Any]) -> Any:
    """The result of `act`; None if the store is gone as well."""
    try:
        return act()
    except RuntimeError:
        return None
