"""How do trainers connect for a commit or restore? With gloo connections of our own, made once per
set of ranks.

They are separate from the caller's process group, which training may use at the same time with any
backend. The caller's `torch.distributed` store introduces the ranks to each other.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckptstore.core.options import Ranks
from ckptstore.distributed.collective import TIMEOUT_S, Collective, Transfer
from ckptstore.distributed.waiting import EVERY_RANK, named, warning_when_slow
from ckptstore.errors import InvalidInput, Unavailable

ALONE = "alone"
"""Given instead of a process group: this process works alone, whatever is initialized."""

FOREGROUND, BACKGROUND = "calls", "background"
"""Channels: connections for calls that block, and for commits in the background."""

_known: dict[tuple[Any, tuple[int, ...], str], Collective] = {}
"""The connected ranks by the store that introduced them, their numbers and the channel."""

_made: Counter[tuple[Any, tuple[int, ...], str]] = Counter()


def collective_of(
    process_group: Any = None, timeout_s: float = TIMEOUT_S, *, channel: str = FOREGROUND
) -> Collective | None:
    """The connected ranks of `process_group` (default: the default group); None if this process
    works alone.

    It works alone if nothing is initialized, the group has one rank, or `process_group` is
    `"alone"`. A background thread uses its own `channel`, so that its rounds do not mix with the
    caller's. On first use all ranks of the group must call this. Raises `InvalidInput` if this
    process is not in the group, and `Unavailable` if the ranks cannot reach each other.
    """
    if not is_several(process_group):
        return None
    group = process_group if process_group is not None else dist.group.WORLD
    return _connected(
        tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), timeout_s, channel
    )


def is_several(process_group: Any = None) -> bool:
    """Whether several ranks act together. Raises `InvalidInput` for an invalid group."""
    if isinstance(process_group, str):
        if process_group != ALONE:
            raise InvalidInput(
                f"process_group is {process_group!r}; wanted a process group, None, or {ALONE!r}"
            )
        return False
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise InvalidInput(
                "a process_group was given, but torch.distributed is not initialized"
            )
        return False
    group = process_group if process_group is not None else dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise InvalidInput(
            "this process is no member of the process_group; only its ranks may call"
        )
    return len(dist.get_process_group_ranks(group)) > 1


def _connected(ranks: tuple[int, ...], rank: int, timeout_s: float, channel: str) -> Collective:
    store = dist.distributed_c10d._get_default_store()
    key = (store, ranks, channel)
    peers = _known.get(key)
    if peers is None:
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
        peers = _known[key] = Collective(
            _GlooLink(group, own), rank, len(ranks), timeout_s, called=channel == FOREGROUND
        )
    peers.timeout_s = timeout_s
    return peers


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
        return _GlooTransfer(self._group.send([_tensor(memory)], rank, lane))

    def receive(self, rank: int, lane: int, memory: memoryview) -> Transfer:
        return _GlooTransfer(self._group.recv([_tensor(memory)], rank, lane))

    def leave(self, name: str, data: bytes) -> None:
        _quietly(lambda: self._store.set(name, data))

    def left(self, name: str, timeout_s: float) -> bytes | None:
        _quietly(lambda: self._store.wait([name], timedelta(seconds=timeout_s)))
        found = _quietly(lambda: self._store.get(name) if self._store.check([name]) else None)
        return bytes(found) if found else None


class _GlooTransfer:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timedelta(seconds=timeout_s))


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _quietly(act: Callable[[], Any]) -> Any:
    """The result of `act`; None if the store is gone as well."""
    try:
        return act()
    except RuntimeError:
        return None


def agreed_schedule(options: Mapping[str, Any], due: bool, came: bool) -> tuple[bool, bool]:
    """Whether a commit is due and a signal came, as the ranks that commit together agree."""
    ranks = options.get("ranks") or Ranks()
    peers = collective_of(ranks.process_group, ranks.timeout_s)
    return peers.is_due(due, came) if peers else (due, came)
